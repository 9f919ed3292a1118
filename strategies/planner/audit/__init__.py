"""Tests of DTensor's own redistributions."""

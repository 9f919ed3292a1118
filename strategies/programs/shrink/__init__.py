"""Shrinking: the smallest program that still fails."""

"""Trials of more than one op or mesh axis."""

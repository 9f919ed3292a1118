"""Validation of our own rules, and their comparison with DTensor's."""

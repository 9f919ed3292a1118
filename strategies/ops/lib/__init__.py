"""Helpers that several families of rules share."""

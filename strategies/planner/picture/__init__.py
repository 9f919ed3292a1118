"""Layouts and plans, drawn."""

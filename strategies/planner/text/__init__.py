"""Redistributions written in one line, their options and reports."""

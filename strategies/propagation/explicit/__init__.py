"""Refusal of implicit communication: only collectives and redistributions in the program's text are allowed."""

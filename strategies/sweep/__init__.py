"""A whole run: tasks over workers, journal, confirmation, coverage."""

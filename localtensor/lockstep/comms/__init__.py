"""Collectives on stacked values for all groups at once; process groups, Work, adjoints."""

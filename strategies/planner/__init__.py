"""Redistribution: steps, cost, search, execution, audit of DTensor's own."""

from localtensor._util.doors import door

__getattr__, __dir__, __all__ = door(__name__, __file__)

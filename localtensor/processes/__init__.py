"""Ranks as real processes: pool, worker, forked ranks, transport of exceptions."""

from localtensor._util.doors import door

__getattr__, __dir__, __all__ = door(__name__, __file__)

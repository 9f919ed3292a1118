"""Ranks as threads: run token, simulation, process group, Work, store, diagnosis of deadlocks."""

from localtensor._util.doors import door

__getattr__, __dir__, __all__ = door(__name__, __file__)

"""Ranks as threads: run token, simulation, process groups, store, diagnosis of deadlocks."""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

"""Ranks as real processes: pool, worker, forked ranks, transport of exceptions."""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

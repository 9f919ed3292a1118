"""Propagation: how a call runs on a mesh under a registry of rules."""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

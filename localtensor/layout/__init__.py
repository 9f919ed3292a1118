"""Meshes, placements, shards, partial values, tolerances: arithmetic on shapes, no process group."""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

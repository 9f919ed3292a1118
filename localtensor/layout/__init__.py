"""Meshes, placements, shards, partial values, tolerances: arithmetic on shapes, no process group."""

from localtensor._util.doors import door

__getattr__, __dir__, __all__ = door(__name__, __file__)

"""The propagator: how a call runs on a mesh; key, cache, expansion."""

from localtensor._util.doors import door

__getattr__, __dir__, __all__ = door(__name__, __file__)

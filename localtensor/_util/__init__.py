"""Domain-free utilities of the process: ambient context, call sites, patching, pickling."""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

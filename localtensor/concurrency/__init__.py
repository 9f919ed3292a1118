"""Schedules, the explorer of interleavings, the single-flight cache.  No torch.distributed."""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

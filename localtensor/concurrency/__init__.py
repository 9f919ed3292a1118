"""Schedules, the explorer of interleavings, the single-flight cache.  No torch.distributed."""

from localtensor._util.doors import door

__getattr__, __dir__, __all__ = door(__name__, __file__)

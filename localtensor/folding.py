"""Pickles on disk name `localtensor.folding.partition`: here it is found."""

from localtensor.lockstep.values.partition import partition

__all__ = ["partition"]

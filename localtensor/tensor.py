"""Pickles on disk name `localtensor.tensor.unpickled`: here it is found."""

from localtensor.lockstep.values.local_tensor import unpickled

__all__ = ["unpickled"]

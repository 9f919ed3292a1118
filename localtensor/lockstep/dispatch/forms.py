"""All forms of ops on stacks: this module sees to it that they are registered."""

from localtensor.lockstep.dispatch import batching_dims as _dims
from localtensor.lockstep.dispatch import batching_foreach as _lists
from localtensor.lockstep.dispatch import batching_nn as _nn
from localtensor.lockstep.dispatch.batching import FORMS

__all__ = ["FORMS"]

assert _dims.FORMS is _lists.FORMS is _nn.FORMS is FORMS

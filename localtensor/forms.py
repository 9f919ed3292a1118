"""All forms of ops on stacks: this module sees to it that they are registered."""

from localtensor import physical_dims as _dims
from localtensor import physical_lists as _lists
from localtensor import physical_nn as _nn
from localtensor.physical import FORMS

__all__ = ["FORMS"]

assert _dims.FORMS is _lists.FORMS is _nn.FORMS is FORMS

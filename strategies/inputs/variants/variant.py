"""What a form is: a named way to make other calls, or other values, from a sample."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.model.rule import Sample


@dataclass(frozen=True, slots=True)
class Form:
    """Other calls made from one.  `same` promises the very same results, which the caller must check; without
    it the call is a new one, which the op may refuse."""

    name: str
    why: str
    make: Callable[[Sample], Iterable[Sample]]
    same: bool = False
    weight: int = 1
    """Turns that it has while another form has one: more for those that make many calls, or find much."""
    always: int = 0
    """On so many samples of an overload, the first, it is tried besides all others."""


@dataclass(frozen=True, slots=True)
class Values:
    """Other values for the same call, or another decomposition of its partial inputs.

    `partial` says of which rules they are asked: those without a partial input ("never"), all ("also"), or
    those with one ("only").  `split` names how parts are made ("" for the usual ways).  `wild` are values with
    NaN or infinities, for which a result that is no float means nothing.
    """

    name: str
    why: str
    make: Callable[[Sample, torch.Generator], tuple[Tensor, ...] | None]
    partial: str = "also"
    split: str = ""
    wild: bool = False

    def asks(self, partial: bool) -> bool:
        """Whether a rule with, or without, a partial input is asked."""
        return self.partial == "also" or partial == (self.partial == "only")


def generator(name: str, seed: int) -> torch.Generator:
    """The random numbers of one kind of values: the same for a name and a seed, whatever was drawn before."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))

"""Tensors that are another one on each rank: after `mine = parts[rank]`, on rank 2 `mine` is `parts[2]`.

In lockstep such a tensor is a copy.  What is written to it, the ranks would see in the tensors that it was made of, and what is written to
those, in it.  So neither can be written to while both are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from localtensor.errors import NotInLockstep
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.storage import memory_of

Keys = list["weakref.ref[Any]"]


class JoinedTensors:
    """Which tensors of a mode were made of which others, by their memories, as long as they are there."""

    def __init__(self) -> None:
        self.pairs: list[tuple[weakref.ref[Any], Keys]] = []  # empty as long as none was made
        self._narrowed: list[tuple[weakref.ref[Any], Keys]] = []  # what one of the kinds of rank has of another tensor

    def narrowed(self, copy: Tensor, whole: Tensor) -> None:
        """`copy` has the values of some ranks of another tensor."""
        self._narrowed = self._with(self._narrowed, copy, [whole])

    def joined(self, copy: Tensor, of: Iterable[Tensor]) -> None:
        """`copy` is one of these tensors on each rank."""
        self.pairs = self._with(self.pairs, copy, of)

    def _with(self, known: list[tuple[weakref.ref[Any], Keys]], copy: Tensor, of: Iterable[Tensor]) -> Any:
        key, sources = _key(copy), []
        for one in of:
            source = _key(one)
            sources += [weakref.ref(source), *self._sources(source)]
        return [(one, others) for one, others in known if one() is not None] + [(weakref.ref(key), sources)]

    def _sources(self, key: object) -> Keys:
        return [source for one, sources in (*self._narrowed, *self.pairs) if one() is key for source in sources]

    def check_write(self, x: Tensor, op: str) -> None:
        """Raises `NotInLockstep` if another tensor has what is written here, on some ranks only."""
        if not self.pairs:
            return
        key = _key(x)
        for copy, sources in self.pairs:
            made = copy()
            there = [one for source in sources if (one := source()) is not None and one is not made]
            if made is not None and there and any(one is key for one in (made, *there)):
                problem = "the tensor is on each rank another one of several, or one of those, and the others would not see what is written"
                raise NotInLockstep(f"{op} on some ranks", problem)


def _key(x: Tensor) -> Any:
    """What is alive as long as the memory of a tensor is."""
    with torch._C._DisableTorchDispatch():  # making a memory lays the values out anew, which writes nothing
        if isinstance(x, LocalTensor):
            if x._memory is None or not x._memory.outside:
                return memory_of(x)
            x = x._cells[0]
        return x.untyped_storage()

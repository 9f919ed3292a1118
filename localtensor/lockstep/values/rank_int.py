"""Ints of each rank, where torch takes an int: sizes and coordinates that differ, in one control flow.

They are SymInts: arithmetic and comparison work on all ranks at once, see lockstep/values/sym_nodes.py.
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FrameType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from localtensor._util.call_sites import is_user_file
from localtensor.errors import AnotherMode, NotHeld
from localtensor.lockstep.values.formatting import user_place
from localtensor.lockstep.values.partition import Array, Partition
from localtensor.lockstep.values.sym_nodes import Constant, RankBools, RankInts, bool_node, int_node

Int = int | torch.SymInt  # one for all ranks, or one of each rank
_MOST_KEPT = 512  # ints by value: 16 MB with 4096 ranks


def _class_for_programs(kind: type) -> Any:
    """The property `__class__`, which `isinstance` asks for: to a program such a number is one of Python, as on a rank; to torch a SymInt."""

    def asked(number: object) -> type:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in _ASK_FOR_OTHERS:
            frame = frame.f_back
        return kind if frame is not None and is_user_file(frame.f_code.co_filename) else type(number)

    return property(asked)


_ASK_FOR_OTHERS = ("abc", "functools")  # isinstance(x, numbers.Integral), functools.singledispatch


class RankInt(torch.SymInt):
    """An int of each rank: a SymInt of which `isinstance(x, int)` is true in a program."""

    __class__ = _class_for_programs(int)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.SymInt, (self.node,)


class RankBool(torch.SymBool):
    """A bool of each rank: a SymBool of which `isinstance(x, bool)` is true in a program."""

    __class__ = _class_for_programs(bool)


_KINDS: dict[type, type] = {RankInts: RankInt, RankBools: RankBool}


def _made_by_torch(original: Callable[..., None]) -> Any:
    """A constructor of SymInts or SymBools: where torch makes one that differs between ranks, it is of these classes, too."""

    def __init__(self: Any, node: Any) -> None:  # noqa: N807
        original(self, node)
        kind = _KINDS.get(type(node))
        if kind is not None and type(self) is not kind:
            self.__class__ = kind

    return __init__


torch.SymInt.__init__ = _made_by_torch(torch.SymInt.__init__)  # type: ignore[method-assign]
torch.SymBool.__init__ = _made_by_torch(torch.SymBool.__init__)  # type: ignore[method-assign]


def rank_int(values: Array | Sequence[int], held: Array | None = None) -> Int:
    """The int of each rank: a plain int if all ranks share it, else a SymInt, one object for equal values.

    `values` are ints of shape [world] that fit int64; `held` are bools of that shape that mark the ranks that have one
    (None: all).  Raises `NotHeld` if no rank has one, and TypeError for anything but ints.

    >>> rank_int([4, 4, 4]), rank_int([4, 4, 3]), 2 * rank_int([4, 4, 3]) + 1
    (4, RankInts(4, 4, 3), RankInts(9, 9, 7))
    """
    array = np.asarray(values)
    if array.dtype != np.int64:
        array = array.astype(np.int64, casting="safe")
    if held is None:
        return _known(array.tobytes(), None)
    mask = np.asarray(held, bool)
    return _known(np.where(mask, array, 0).tobytes(), None if mask.all() else mask.tobytes())


@lru_cache(_MOST_KEPT)
def _known(values: bytes, held: bytes | None) -> Int:
    array = np.frombuffer(values, np.int64)
    mask = None if held is None else np.frombuffer(held, bool)
    if mask is not None and not mask.any():
        raise NotHeld("rank_int", range(len(array)), ())
    node = int_node(array, mask)
    return node.constant if type(node) is Constant else RankInt(node)


def rank_bool(values: Array, held: Array | None) -> bool | torch.SymBool:
    """The bool of each rank, as `rank_int` an int.

    >>> rank_bool(np.array([True, False]), None), rank_bool(np.array([True, False]), np.array([True, False]))
    (RankBools(True, False), True)
    """
    node = bool_node(np.array(values), held, lambda: "value")
    return node.constant if type(node) is Constant else RankBool(node)


def rank_lists(cells: Sequence[Tensor], held: Partition) -> Any:
    """The nested lists of ints or bools of each rank as one; the cells have rows of one shape.

    >>> from localtensor.lockstep.values.partition import partition
    >>> rank_lists([torch.tensor([[0, 5], [1, 5]])], partition(np.array([0, 1, 1]), [2]))
    [RankInts(0, 1, 1), 5]
    """
    each = [cell.tolist() if rows > 1 else [cell.tolist()] for cell, rows in zip(cells, held.sizes, strict=True)]
    return _nested([row for rows in each for row in rows], held)


def _nested(rows: Sequence[Any], held: Partition) -> Any:
    if isinstance(rows[0], list):
        return [_nested([row[place] for row in rows], held) for place in range(len(rows[0]))]
    values = np.array(rows)[held.row_of]
    return rank_bool(values, held.held) if isinstance(rows[0], bool) else rank_int(values, held.held)


def is_rank_int(x: object) -> TypeGuard[torch.SymInt]:
    """Whether x is a SymInt that differs between ranks.

    >>> is_rank_int(rank_int([0, 1])), is_rank_int(3)
    (True, False)
    """
    return isinstance(x, torch.SymInt) and type(x.node) is RankInts


def is_rank_number(x: object) -> TypeGuard[torch.SymInt | torch.SymBool]:
    """Whether x is a SymInt or a SymBool that differs between ranks.

    >>> [is_rank_number(x) for x in (rank_int([0, 1]), rank_int([0, 1]) == 1, 3, True)]
    [True, True, False, False]
    """
    return isinstance(x, torch.SymInt | torch.SymBool) and type(x.node) in (RankInts, RankBools)


def rank_values(x: object, world: int) -> Array | None:
    """The int of each rank, read-only int64 of shape [world]; None for anything that does not differ between ranks.

    The number of a rank that holds none (see `held` of the node) has no meaning.  Raises `AnotherMode` for another
    number of ranks.

    >>> rank_values(rank_int([0, 1]), 2), rank_values(3, 2)
    (array([0, 1]), None)
    """
    if not isinstance(x, torch.SymInt) or type(x.node) is not RankInts:
        return None
    if len(x.node.values) != world:
        raise AnotherMode("values_of", user_place())
    found: Array = x.node.values
    return found


def on_rank(x: Int | torch.SymBool, rank: int) -> int:
    """The int of one rank, or its bool.  Raises `NotHeld` if the rank holds none or does not exist.

    >>> on_rank(rank_int([5, 7]), 1), on_rank(3, 1), on_rank(rank_int([5, 7]) == 7, 1)
    (7, 3, True)
    """
    if not is_rank_number(x):
        return int(x)
    values, held = x.node.values, x.node.held
    if not 0 <= rank < len(values) or not (held is None or held[rank]):
        raise NotHeld("on_rank", [rank], range(len(values)) if held is None else np.flatnonzero(held).tolist())
    return values[rank].item()  # type: ignore[no-any-return]

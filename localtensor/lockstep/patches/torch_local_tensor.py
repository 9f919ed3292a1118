"""Programs that were written for torch's own `LocalTensorMode`, run on ours.

They make a process group of the backend "fake", enter the mode for its ranks, and destroy the group: so the group is what opens and closes
our mode, and their mode stands for it.  torch's own tests enter the mode first, and make the group inside: it is the mode's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_map

from localtensor._util import ambient
from localtensor.errors import RanksDiverge
from localtensor.lockstep.mode import LocalTensor, LocalTensorMode, rank_map, tensor_map
from localtensor.lockstep.patches import rank_queries
from localtensor.lockstep.patches.device_mesh import wait_for
from localtensor.lockstep.values.formatting import user_place, values_by_rank
from localtensor.lockstep.values.rank_int import is_rank_int, on_rank, rank_int
from localtensor.lockstep.values.sym_nodes import RankInts, int_node

TORCH = "torch.distributed._local_tensor"
"""torch's module; read on 2.13.0: its classes, and the functions that ask for the mode."""
TESTS = "torch.testing._internal.distributed._tensor.common_dtensor"
"""torch's bases of tests, whose functions by rank are made with those of that module."""


@contextlib.contextmanager
def in_place_of_torch() -> Iterator[None]:
    """A context in which torch's `LocalTensorMode` and `LocalTensor` are ours, in every module that has imported them and in those that
    do so inside.

    `init_process_group` with the backend "fake" opens the mode, `destroy_process_group` closes it; what is still open at the end is
    closed.  Other backends are torch's.  It is for one thread, and not to be entered twice.

    >>> import torch
    >>> with in_place_of_torch():
    ...     from torch.distributed._local_tensor import LocalTensorMode as TheirMode
    ...     torch.distributed.init_process_group("fake", rank=0, world_size=2)
    ...     with TheirMode(2) as mode:
    ...         x = mode.rank_map(torch.tensor)
    ...         torch.distributed.all_reduce(x)
    ...     torch.distributed.destroy_process_group()
    >>> x.reconcile()
    tensor(1)
    """
    opened: list[LocalTensorMode] = []
    theirs = importlib.import_module(TORCH)
    pairs: list[tuple[Any, Any]] = [
        (theirs.LocalTensorMode, functools.partial(_OpenMode, opened)),
        (theirs.LocalTensor, _Tensor),
        (theirs.LocalIntNode, _IntNode),
    ]
    found = {name: getattr(theirs, name, None) for name in _FUNCTIONS}  # torch 2.11 has no rank_map
    pairs += [(one, _FUNCTIONS[name](one)) for name, one in found.items() if one is not None]
    tests = sys.modules.get(TESTS)
    for name in _BY_RANK if hasattr(tests, _BY_RANK[0]) else ():
        pairs.append((getattr(tests, name), _by_rank(getattr(tests, name).__wrapped__)))
    rank_queries.install()  # it patches the functions that are replaced here
    begin, end = _process_groups(opened)
    pairs += [(dist.init_process_group, begin), (dist.destroy_process_group, end)]
    _replace(pairs)
    try:
        by_rank = property(lambda node: values_by_rank(node.values, node.held))
        has_type = tests is not None and hasattr(tests, "LocalTensor")  # which it compares with the type of a tensor
        with (
            mock.patch.multiple(dist, init_process_group=begin, destroy_process_group=end),
            mock.patch.multiple(c10d, init_process_group=begin, destroy_process_group=end),
            mock.patch.object(RankInts, "_local_ints", by_rank, create=True),
            mock.patch.object(tests, "LocalTensor", LocalTensor) if has_type else contextlib.nullcontext(),
        ):
            yield
    finally:
        _replace([(ours, original) for original, ours in pairs])
        while opened:
            opened.pop().__exit__(None, None, None)


def _replace(pairs: Sequence[tuple[object, object]]) -> None:
    """Put the second object of each pair wherever a module has the first: torch's own module of the mode, its tests' bases, and all
    outside of torch."""
    made = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        of_torch = name.startswith("torch.") and name not in (TORCH, TESTS)
        if isinstance(module, ModuleType) and name != __name__ and not of_torch:
            for attribute, value in list(vars(module).items()):
                if id(value) in made:
                    setattr(module, attribute, made[id(value)])


def _process_groups(opened: list[LocalTensorMode]) -> tuple[Callable[..., None], Callable[..., None]]:
    """What begins and ends the process group of a program, and with it the mode."""
    begin, end = dist.init_process_group, dist.destroy_process_group

    def init(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if str(backend) != "fake":
            begin(backend, *args, **kwargs)
            return
        if ambient.lockstep() is not None:
            begin()  # the group of the ranks of their mode, which is ours already
            return
        mode = LocalTensorMode(kwargs["world_size"])
        mode.__enter__()
        opened.append(mode)

    def destroy(group: Any = None) -> None:
        if opened and group in (None, opened[-1].groups.default_pg):
            opened.pop().__exit__(None, None, None)
        else:
            end(group)

    return init, destroy


def _by_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function called for each rank with that rank's values, as torch's `maybe_run_for_local_tensor` makes it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        mode: Any = ambient.lockstep()
        if mode is None or mode._paused:
            return function(*args, **kwargs)
        args, kwargs = tree_map(wait_for, (args, kwargs))

        def on(rank: int) -> tuple[Any, ...]:
            return tree_map(lambda value: _value_on(value, rank), (args, kwargs))  # type: ignore[no-any-return]

        found = mode._as_each(mode.ranks, lambda args, kwargs: function(*args, **kwargs), on)
        return _joined(mode, function.__name__, found)

    return run


def _value_on(value: Any, rank: int) -> Any:
    if isinstance(value, LocalTensor):
        return value.__localtensor_on__(rank)
    return on_rank(value, rank) if is_rank_int(value) else value


def _joined(mode: LocalTensorMode, call: str, found: Mapping[int, Any]) -> Any:
    """One value of all ranks.  Raises `RanksDiverge` if they differ and are neither tensors nor ints."""
    first = next(iter(found.values()))
    if isinstance(first, Tensor):
        return mode.gather(found, call)
    if isinstance(first, list | tuple) and len({len(one) for one in found.values()}) == 1:
        columns = [{rank: one[place] for rank, one in found.items()} for place in range(len(first))]
        return type(first)([_joined(mode, call, column) for column in columns])
    if any(one != first for one in found.values()):
        if type(first) is not int:
            raise RanksDiverge(call, "its result", dict(found), user_place())
        values = np.zeros(mode.world, np.int64)
        values[list(found)] = list(found.values())
        return rank_int(values, mode.everyone.held)
    return first


def _mode_for_programs(*, paused: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Our mode where a program asks for theirs; theirs where torch's own functions ask, which are patched for our mode."""

    def choose(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def mode() -> Any:
            caller = str(sys._getframe(1).f_globals.get("__name__"))
            ours = theirs() if caller.startswith("torch.") and caller != TESTS else ambient.lockstep()
            return None if ours is None or (not paused and getattr(ours, "_paused", False)) else ours

        return mode

    return choose


def _disabled() -> contextlib.AbstractContextManager[None]:
    mode: Any = ambient.lockstep()
    return contextlib.nullcontext() if mode is None else mode.disable()


def _in_a_mode(ours: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def choose(theirs: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return (theirs if ambient.lockstep() is None else ours)(*args)

        return call

    return choose


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "maybe_run_for_local_tensor": lambda _: _by_rank,
    "maybe_disable_local_tensor_mode": lambda _: _disabled,
    "local_tensor_mode": _mode_for_programs(paused=True),
    "enabled_local_tensor_mode": _mode_for_programs(paused=False),
    "rank_map": _in_a_mode(rank_map),
    "tensor_map": _in_a_mode(tensor_map),
}
"""What ours is for each function of torch's module."""
_BY_RANK = ("map_local_tensor_for_rank", "map_local_for_rank")


class _Node(type):
    """The type of a class that stands for torch's LocalIntNode: ours are its instances, and it is made from an int of each rank."""

    def __instancecheck__(cls, x: object) -> bool:
        return type(x) is RankInts

    def __call__(cls, local_ints: Mapping[int, int], *_: Any, **__: Any) -> Any:
        return int_node(np.array([local_ints[rank] for rank in sorted(local_ints)], np.int64), None)


class _IntNode(metaclass=_Node):
    pass


class _LikeTheirs(type):
    """The type of a class that stands for torch's LocalTensor: ours are its instances, and it is made from a tensor of each rank."""

    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, LocalTensor)

    def __call__(cls, local_tensors: Mapping[int, Tensor], *_: Any, **__: Any) -> LocalTensor:
        return rank_map(local_tensors.__getitem__)


class _Tensor(metaclass=_LikeTheirs):
    pass


class _OpenMode:
    """What a program has for torch's mode: the mode that its process group opened; without a group, one of its own."""

    def __init__(self, opened: list[LocalTensorMode], ranks: Any) -> None:
        self._own = not opened
        self._mode = LocalTensorMode(ranks) if self._own else opened[-1]

    def __enter__(self) -> LocalTensorMode:
        return self._mode.__enter__() if self._own else self._mode

    def __exit__(self, *error: object) -> None:
        if self._own:
            self._mode.__exit__(*error)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mode, name)

"""Programs that were written for torch's own `LocalTensorMode`, run on ours.

They make a process group of the backend "fake", enter the mode for its ranks, and destroy the group: so the group is what opens and closes
our mode, and their mode stands for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from torch import Tensor

from localtensor.lockstep.mode import LocalTensor, LocalTensorMode, rank_map
from localtensor.lockstep.values.sym_nodes import int_node

TORCH = "torch.distributed._local_tensor"
"""torch's module; read on 2.13.0: LocalTensorMode, LocalTensor and LocalIntNode."""


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
    pairs = [
        (theirs.LocalTensorMode, functools.partial(_OpenMode, opened)),
        (theirs.LocalTensor, _Tensor),
        (theirs.LocalIntNode, _node),
    ]
    _replace(pairs)
    try:
        with _process_groups(opened):
            yield
    finally:
        _replace([(ours, original) for original, ours in pairs])
        while opened:
            opened.pop().__exit__(None, None, None)


def _replace(pairs: Sequence[tuple[object, object]]) -> None:
    """Put the second object of each pair wherever a module has the first: torch's own module of the mode, and all outside of torch."""
    made = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name != __name__ and (name == TORCH or not name.startswith("torch.")):
            for attribute, value in list(vars(module).items()):
                if id(value) in made:
                    setattr(module, attribute, made[id(value)])


@contextlib.contextmanager
def _process_groups(opened: list[LocalTensorMode]) -> Iterator[None]:
    begin, end = dist.init_process_group, dist.destroy_process_group

    def init(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if str(backend) != "fake":
            begin(backend, *args, **kwargs)
            return
        mode = LocalTensorMode(kwargs["world_size"])
        mode.__enter__()
        opened.append(mode)

    def destroy(group: Any = None) -> None:
        if opened and group is None:
            opened.pop().__exit__(None, None, None)
        else:
            end(group)

    with mock.patch.object(dist, "init_process_group", init), mock.patch.object(dist, "destroy_process_group", destroy):
        yield


def _node(values: Mapping[int, int]) -> Any:
    return int_node(np.array([values[rank] for rank in sorted(values)], np.int64), None)


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

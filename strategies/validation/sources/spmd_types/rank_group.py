"""Functions that communicate over a process group, on all ranks together: in lockstep, or on rank threads.

A function whose ranks do not all do the same cannot run in lockstep: it runs on rank threads then.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import localtensor as lt
from localtensor.errors import LocalTensorError, error_in_one_line
from strategies.torch_api.rank_runs import values_by_rank
from strategies.validation.sources.spmd_types import typed

SECONDS = 30.0
"""Time limit of a run on rank threads."""
GroupFunction = Callable[[Sequence[Tensor], Any], Sequence[Tensor]]
"""From a rank's tensors and the process group to its flat results."""


@contextlib.contextmanager
def lockstep_mesh(sizes: Sequence[int], names: Sequence[str]) -> Iterator[DeviceMesh]:
    """A context in which all ranks run in lockstep; gives their mesh."""
    typed.forget_groups()
    try:
        with typed.quiet_checker(), lt.LocalTensorMode(math.prod(sizes)):
            yield _mesh(sizes, names)
    finally:
        typed.forget_groups()


@contextlib.contextmanager
def lockstep_group(axis: str) -> Iterator[Any]:
    """A context in which the one rank of a mesh runs in lockstep; gives the process group of its axis, of that name."""
    with lockstep_mesh((1,), (axis,)) as mesh:
        yield mesh.get_group(axis)


def run_on_ranks(
    function: GroupFunction, held: Sequence[Sequence[Tensor]], ranks: int, axis: str
) -> list[tuple[Any, ...]]:
    """The flat results of each rank; `held[i][rank]` are the pieces, of which the function gets copies.

    Raises what the function raises, and `RuntimeError` where the ranks' collectives do not fit.
    """
    return run_on_mesh(function, held, (ranks,), (axis,), axis)


def run_on_mesh(
    function: GroupFunction, held: Sequence[Sequence[Tensor]], sizes: Sequence[int], names: Sequence[str], axis: str
) -> list[tuple[Any, ...]]:
    """The same on a mesh of several axes, of which the function gets the group along `axis`."""
    ranks = math.prod(sizes)
    try:
        with lockstep_mesh(sizes, names) as mesh:
            tensors = [lt.rank_map(functools.partial(_copy, column)) for column in held]
            found = [values_by_rank(x, ranks) for x in function(tensors, mesh.get_group(axis))]
        return [tuple(x[rank] for x in found) for rank in range(ranks)]
    except LocalTensorError:
        return _on_threads(function, held, sizes, names, axis)


def _on_threads(
    function: GroupFunction, held: Sequence[Sequence[Tensor]], sizes: Sequence[int], names: Sequence[str], axis: str
) -> list[tuple[Any, ...]]:
    ranks = math.prod(sizes)
    found: list[tuple[Any, ...]] = [()] * ranks

    def body() -> None:
        rank = dist.get_rank()
        tensors = [column[rank].clone() for column in held]
        found[rank] = tuple(x.detach() for x in function(tensors, _mesh(sizes, names).get_group(axis)))

    typed.forget_groups()
    try:
        lt.run(body, ranks=ranks, timeout=SECONDS, leftovers="ignore")
    except LocalTensorError as error:
        raise RuntimeError(error_in_one_line(error)) from None
    finally:
        typed.forget_groups()
    return found


def _mesh(sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))


def _copy(column: Sequence[Tensor], rank: int) -> Tensor:
    return column[rank].clone()

"""Functions that communicate over a process group, on all ranks together: in lockstep, or on rank threads.

A function whose ranks do not all do the same cannot run in lockstep: it runs on rank threads then.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import localtensor as lt
from localtensor.errors import LocalTensorError, error_in_one_line
from strategies.torch_api.rank_runs import values_by_rank
from strategies.validation.sources.spmd_types import typed

SECONDS = 30.0
"""Time limit of a run on rank threads."""
GroupFunction = Callable[[Sequence[Tensor], Any], Sequence[Tensor]]
"""From a rank's tensors and the process group to its flat results."""


@contextlib.contextmanager
def lockstep_group(ranks: int, axis: str) -> Iterator[Any]:
    """A context in which all ranks run in lockstep; gives the process group of a mesh axis of that name."""
    typed.forget_groups()
    try:
        with typed.quiet_checker(), lt.LocalTensorMode(ranks):
            yield _group(ranks, axis)
    finally:
        typed.forget_groups()


def run_on_ranks(
    function: GroupFunction, held: Sequence[Sequence[Tensor]], ranks: int, axis: str
) -> list[tuple[Any, ...]]:
    """The flat results of each rank; `held[i][rank]` are the pieces, of which the function gets copies.

    Raises what the function raises, and `RuntimeError` where the ranks' collectives do not fit.
    """
    try:
        with lockstep_group(ranks, axis) as group:
            tensors = [lt.rank_map(functools.partial(_copy, column)) for column in held]
            found = [values_by_rank(x, ranks) for x in function(tensors, group)]
        return [tuple(x[rank] for x in found) for rank in range(ranks)]
    except LocalTensorError:
        return _on_threads(function, held, ranks, axis)


def _on_threads(
    function: GroupFunction, held: Sequence[Sequence[Tensor]], ranks: int, axis: str
) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()] * ranks

    def body() -> None:
        rank = dist.get_rank()
        tensors = [column[rank].clone() for column in held]
        found[rank] = tuple(x.detach() for x in function(tensors, _group(ranks, axis)))

    typed.forget_groups()
    try:
        lt.run(body, ranks=ranks, timeout=SECONDS, leftovers="ignore")
    except LocalTensorError as error:
        raise RuntimeError(error_in_one_line(error)) from None
    finally:
        typed.forget_groups()
    return found


def _group(ranks: int, axis: str) -> Any:
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,)).get_group(axis)


def _copy(column: Sequence[Tensor], rank: int) -> Tensor:
    return column[rank].clone()

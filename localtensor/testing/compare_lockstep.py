"""The parallel program of a comparison in lockstep: one control flow for all ranks, whose values are taken apart by rank.

For programs whose ranks do the same.  What lockstep does not run (DistributedDataParallel, pipelines, a branch whose results
cannot be joined) is refused by its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from localtensor.errors import LocalTensorError, NotComparable
from localtensor.errors.runs import OWN_FLOW
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.testing.compare.watch import Key, Observation, Watch

if TYPE_CHECKING:
    from localtensor.testing.compare_dropout import Drawn

REMEDY = 'Pass on="threads", where each rank has a control flow of its own.'


@dataclass(slots=True)
class LockstepWatch(Watch):
    """What all ranks of a lockstep run compute: the values go to the watches in `ranks`, all else is theirs alike."""

    ranks: tuple[Watch, ...] = ()

    def _keep_local(self, key: Key, local: Tensor, made: Observation) -> None:
        for rank, watch in enumerate(self.ranks):
            part = _on(local, rank)
            with _disable_current_modes():
                watch._keep_local(key, part, made)

    def _attach(self, key: Key, drawn: Drawn) -> None:
        for rank, watch in enumerate(self.ranks):
            watch._attach(key, _drawn_on(drawn, rank))

    def by_rank(self) -> tuple[Watch, ...]:
        """The watch of each rank, when the run has ended."""
        for rank, watch in enumerate(self.ranks):
            watch.step, watch.calls, watch.tied, watch.declared = self.step, self.calls, self.tied, self.declared
            watch.draws, watch.seeds = self.draws, self.seeds
            for step, drawn in self.again:
                watch.again.append((step, _drawn_on(drawn, rank)))
        return tuple(watch.finished() for watch in self.ranks)


def _drawn_on(drawn: Drawn, rank: int) -> Drawn:
    return replace(drawn, kept=None if drawn.kept is None else _on(drawn.kept, rank))


def _on(value: Tensor, rank: int) -> Tensor:
    """What one rank has of a value; a plain tensor is the same on every rank."""
    return value.on(rank).detach() if isinstance(value, LocalTensor) else value


def in_lockstep(sizes: Sequence[int], names: Sequence[str], program: Callable[..., None], watch: LockstepWatch) -> None:
    """Calls `program(watch, parts)` once for all ranks of a mesh; `parts` makes each rank's own argument of a function.

    Raises `NotComparable` for a program that does not run so.
    """
    coordinates = [dict(zip(names, at, strict=True)) for at in itertools.product(*(range(size) for size in sizes))]

    def parts(part_of: Callable[[Mapping[str, int]], Any]) -> Any:
        each = [part_of(one) for one in coordinates]

        def joined(*values: Any) -> Any:
            return rank_map(lambda rank: values[rank]) if isinstance(values[0], Tensor) else values[0]

        return tree_map(joined, *each)

    try:
        with LocalTensorMode(len(coordinates)):
            program(watch, parts)
    except NotComparable:
        raise
    except LocalTensorError as fault:
        what = str(fault).partition("\n")[0].partition(f". {OWN_FLOW}")[0].rstrip(".")
        raise NotComparable(what, "on='lockstep'", REMEDY) from fault

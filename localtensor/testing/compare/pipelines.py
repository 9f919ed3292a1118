"""A pipeline schedule in the place of a model: its stages are watched as one model, and its micro-batches put together again.

Private parts of torch, which tests/localtensor/testing/compare/test_pipelines.py guards:

| part                                                                    | torch | tried on |
|-------------------------------------------------------------------------|-------|----------|
| PipelineScheduleSingle._stage, PipelineScheduleMulti._stages: the stages | 2.13  | 2.13     |
| their _n_microbatches and _loss_fn                                      | 2.13  | 2.13     |
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from localtensor.testing.compare.watch import OF_MODULES, Key, Observation, Watch


class Stages(nn.Module):
    """The stages of one rank as one module, in which each module has the name that it has in the whole model."""

    def __init__(self, stages: list[Any]) -> None:
        super().__init__()
        for number, stage in enumerate(stages):
            self.add_module(str(number), stage.submod)

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        for stage in self.children():
            yield from stage.named_modules(set(), prefix, remove_duplicate)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule of torch.distributed.pipelining on one rank."""

    schedule: Any

    @property
    def stages(self) -> list[Any]:
        return list(self.schedule._stages) if hasattr(self.schedule, "_stages") else [self.schedule._stage]

    @property
    def microbatches(self) -> int:
        """Into how many parts the schedule cuts what it gets."""
        return int(self.schedule._n_microbatches)

    @property
    def loss(self) -> Any:
        """The loss function of the schedule."""
        return self.schedule._loss_fn

    def step(self, batch: Any) -> Tensor | None:
        """One step, forward and backward; on the rank of the last stage the loss of the whole batch."""
        losses: list[Tensor] = []
        first, last = (any(getattr(stage, which) for stage in self.stages) for which in ("is_first", "is_last"))
        args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})
        rows = next(len(x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim())
        more = {"target": torch.zeros(rows), "losses": losses} if last else {}
        self.schedule.step(*(args if first else ()), **(kwargs if first else {}), **more)
        if not losses:
            return None
        each = torch.stack([loss.detach() for loss in losses])
        return each.mean() if self.schedule.scale_grads else each.sum()

    def watch(self, watch: Watch) -> None:
        """Of a stage's own input and output only those of the whole model are seen."""
        watch.microbatches = self.microbatches
        for stage in self.stages:
            watch.edges[id(stage.submod)] = (bool(stage.is_first), bool(stage.is_last))


def pipeline_of(made: object) -> Pipeline | None:
    """The pipeline that a program has made, None if it is something else."""
    pipelining = sys.modules.get("torch.distributed.pipelining.schedules")
    if pipelining is None or not isinstance(
        made, (pipelining.PipelineScheduleSingle, pipelining.PipelineScheduleMulti)
    ):
        return None
    return Pipeline(made)


def reassembled(watch: Watch) -> Watch:
    """The watch of a rank with the values of its micro-batches put together, as those of one call."""
    count = watch.microbatches
    if count < 2:
        return watch
    seen: dict[Key, Observation] = {}
    calls = Counter({at: _calls_and_probes(many, count)[0] for at, many in watch.calls.items()})
    many: Counter[tuple[int, str, str]] = Counter()
    for key in watch.seen:
        many[key[:3]] = max(many[key[:3]], key.call + 1)
    for key, one in watch.seen.items():
        alone, probes = _calls_and_probes(many[key[:3]], count)
        if key.kind not in OF_MODULES or alone == many[key[:3]]:
            seen[key] = one
        elif key.call < alone + probes and key.call >= probes:
            call = key.call - probes
            numbers = [key.call + alone * part for part in range(count)]
            parts = [watch.seen.get(key._replace(call=number)) for number in numbers]
            whole = _joined([part.value for part in parts if part is not None])
            if whole is not None and None not in parts:
                kept = [None if x is None or x.drawn is None else x.drawn.kept for x in parts]
                masks = _joined([x for x in kept if x is not None]) if None not in kept else None
                drawn = None if one.drawn is None else replace(one.drawn, kept=masks)
                seen[key._replace(call=call)] = replace(one, value=whole, drawn=drawn)
    return replace(watch, seen=seen, calls=calls)


def _calls_and_probes(many: int, count: int) -> tuple[int, int]:
    """How often each micro-batch calls a module that is called so often, and the calls before, by which shapes are found.

    >>> _calls_and_probes(8, 4), _calls_and_probes(5, 4), _calls_and_probes(3, 4)
    ((2, 0), (1, 1), (3, 0))
    """
    if many % count == 0:
        return many // count, 0
    if many % (count + 1) == 0:
        return many // (count + 1), many // (count + 1)
    return many, 0


def _joined(parts: list[Tensor]) -> Tensor | None:
    """Rows one after the other; of numbers, the mean."""
    one = parts[0]
    if one.dim() == 0:
        return torch.stack(parts).double().mean().to(one.dtype)
    if any(x.shape[1:] != one.shape[1:] or x.dtype != one.dtype for x in parts):
        return None
    return torch.cat(parts)

"""`localtensor cost rule`: the bytes that a call of an op moves, by the placements of its arguments, before and after a change.

Each call is made by DTensor on rank threads: once by the rules that it has, once by those of `overlay_dtensor`, or of
the user's module.  What is counted are the calls of collectives; the bytes are those that a rank passes to them.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves

import localtensor as lt
from localtensor._util.units import bytes_text
from localtensor.errors import LocalTensorError
from localtensor.layout import short
from strategies.base.signals import EXIT_CLEAN, EXIT_NOTHING, EXIT_USAGE, write_stdout
from strategies.cli.options import RuleCostOptions, fail
from strategies.model.rule import Sample
from strategies.propagation.overlay.context import overlay_dtensor
from strategies.validation.discover import resolve_overloads, samples_of

CALL = "localtensor cost rule"
MOST_CALLS, MOST_PLACEMENTS = 2, 64  # of an overload; of a call


@dataclass(frozen=True, slots=True)
class Moved:
    """What a call with placed arguments moves: bytes that a rank passes to collectives, by kind; and what comes out.

    `refused` says why the call was not made, "" if it was.
    """

    gives: str
    bytes: int
    kinds: tuple[tuple[str, int], ...]
    refused: str = ""

    def __str__(self) -> str:
        if self.refused:
            return "refused"
        how = ", ".join(f"{kind} {bytes_text(size)}" for kind, size in self.kinds)
        return f"-> {self.gives}  {bytes_text(self.bytes)}" + (f" ({how})" if how else "")


def run(options: RuleCostOptions) -> int:
    """The exit code: 0; 2 for an unknown op; 3 where no call of the op could be made."""
    try:
        overloads = resolve_overloads(options.op, CALL)
    except LocalTensorError as error:
        return fail(str(error), EXIT_USAGE)
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the calls that it draws
        for op in overloads:
            for sample in _chosen(samples_of(op, options.seed), options.ranks):
                rows += _rows(sample, options.ranks)
    if not rows:
        return fail(f"{CALL}: no call of {options.op} could be made; nothing was measured.", EXIT_NOTHING)
    text = json.dumps(rows, indent=1) + "\n" if options.as_json else _table(rows, options.ranks)
    return fail(f"{CALL}: {problem}", EXIT_NOTHING) if (problem := write_stdout(text)) else EXIT_CLEAN


def _chosen(samples: Sequence[Sample], ranks: int) -> list[Sample]:
    """The calls whose price says most: of floats, of dims that the ranks divide, large; of equal shapes only one.

    A call of empty tensors moves nothing by any rule, so it comes last.
    """

    def order(sample: Sample) -> tuple[bool, bool, int, int]:
        sizes = [size for x in sample.tensors for size in x.shape]
        numel = sum(x.numel() for x in sample.tensors)
        real = all(x.is_floating_point() for x in sample.tensors[:1])
        scalars = sum(not x.shape for x in sample.tensors)
        return 0 in sizes, not real, scalars + sum(size % ranks > 0 for size in sizes), -numel

    found: dict[tuple[tuple[int, ...], ...], Sample] = {}
    for sample in sorted(samples, key=order):
        found.setdefault(tuple([tuple(x.shape) for x in sample.tensors]), sample)
    return list(found.values())[:MOST_CALLS]


def _rows(sample: Sample, ranks: int) -> list[dict[str, Any]]:
    """A row for each placement of the call's arguments."""
    placed = list(itertools.islice(_placements(sample), MOST_PLACEMENTS))
    if not placed:
        return []
    before, after = measure(sample, placed, ranks), measure(sample, placed, ranks, overlay=True)
    return [
        {
            "op": sample.op, "call": ", ".join(sample.arguments(one)), "torch": str(was), "overlay": str(now),
            "torch_bytes": None if was.refused else was.bytes, "overlay_bytes": None if now.refused else now.bytes,
        }
        for one, was, now in zip(placed, before, after, strict=True)
    ]  # fmt: skip


def _placements(sample: Sample) -> Any:
    """All placements of the call's tensors along one axis: replicated, or sharded along a dim that has rows."""
    each: list[list[Placement]] = [
        [Replicate(), *(Shard(dim) for dim, size in enumerate(x.shape) if size > 0)] for x in sample.tensors
    ]
    return itertools.product(*each)


def measure(sample: Sample, placed: Sequence[Sequence[Placement]], ranks: int, *, overlay: bool = False) -> list[Moved]:
    """What the call moves for each of these placements of its tensors, by DTensor's rules, or by those of the overlay.

    >>> import torch
    >>> from strategies.model.rule import Call, Leaf
    >>> sample = Sample(Call("aten.add.Tensor", (Leaf(0), Leaf(1))), (torch.ones(4, 6), torch.ones(4, 6)), "by hand")
    >>> [str(one) for one in measure(sample, [(Shard(0), Shard(0)), (Shard(0), Shard(1))], 2)]
    ['-> S(0)  0 B', '-> S(0)  48 B (all_gather_into_tensor 48 B)']
    """
    rules: AbstractContextManager[Any] = overlay_dtensor() if overlay else nullcontext()
    with rules:
        ran = lt.run(partial(_program, sample, placed, ranks), ranks=ranks, leftovers="ignore")
    kinds: list[dict[str, int]] = []
    for call in (call for call in ran.calls if call.rank == 0):
        if call.kind == "barrier":
            kinds.append({})
        elif kinds:
            kinds[-1][call.kind] = kinds[-1].get(call.kind, 0) + call.bytes
    return [
        Moved(gives, sum(by_kind.values()), tuple(by_kind.items()), refused)
        for (gives, refused), by_kind in zip(ran[0], kinds, strict=True)
    ]


def _program(sample: Sample, placed: Sequence[Sequence[Placement]], ranks: int) -> list[tuple[str, str]]:
    """On one rank: each call after a barrier, which marks it in the log."""
    mesh = init_device_mesh("cpu", (ranks,))
    found = []
    for placements in placed:
        given = [
            distribute_tensor(x.clone(), mesh, [one], src_data_rank=None)
            for x, one in zip(sample.tensors, placements, strict=True)
        ]
        dist.barrier()
        try:
            done = sample.call(given)
        except Exception as error:  # why: an op and its rule may raise anything; the row says so
            found.append(("", f"{type(error).__name__}: {error}".partition("\n")[0]))
            continue
        results = [x for x in tree_leaves(done) if isinstance(x, DTensor)]
        found.append((", ".join(short(x.placements[0]) for x in results) or "no DTensor", ""))
    return found


def _table(rows: Sequence[dict[str, Any]], ranks: int) -> str:
    heads = {"call": "arguments", "torch": "DTensor moves", "overlay": "overlay_dtensor moves"}
    width = {name: max(len(head), *(len(row[name]) for row in rows)) for name, head in heads.items()}
    lines = [f"bytes that one of {ranks} ranks passes to collectives, a call"]
    op = ""
    for row in rows:
        if row["op"] != op:
            op = row["op"]
            lines += [op, "  " + "  ".join(head.ljust(width[name]) for name, head in heads.items()).rstrip()]
        lines.append("  " + "  ".join(row[name].ljust(width[name]) for name in heads).rstrip())
    more = [row for row in rows if None not in (row["torch_bytes"], row["overlay_bytes"])]
    torch_bytes, ours = sum(row["torch_bytes"] for row in more), sum(row["overlay_bytes"] for row in more)
    lines.append(f"in all {bytes_text(torch_bytes)} by DTensor's rules, {bytes_text(ours)} by overlay_dtensor's")
    return "\n".join(lines) + "\n"

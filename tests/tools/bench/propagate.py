"""A cached propagate, ours beside DTensor's Python path (`propagate_op_sharding`), on the same calls, in one run.

Theirs is asked in three ways: with a schema made for each call from specs that are kept, which is what ours starts from;
with a schema that is kept, so that its comparison key is made but once; and as its dispatcher asks, from tensors
(`unwrap_to_op_info`), which does more than ours: it also takes the tensors out.  Ours is asked with specs that are kept,
as a DTensor keeps its own, and with specs made for each call, without the time that it takes to make them.  What DTensor
has in C++ in front of all of this is no part of it.

Times are the best of many short runs, so that what else the machine does counts for little.  With many threads they are
the processor's seconds for a call, of all threads together: what one call costs beyond the interpreter's lock.
`python -m tests.tools.bench.propagate` prints it all.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import LocalLRUCache

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from strategies.model.rule import LEAVES, Leaf, overload
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.semantics.rule_registry import RuleRegistry
from strategies.propagation.propagator import Propagator

MICROSECONDS, TIMES, THREADS = 3.0, 2.0, 8
"""Targets: of a cached call, and of how many times faster than DTensor's; and the threads."""
SIZES = (2, 2)


@dataclass(frozen=True, slots=True)
class Asked:
    """One call on a mesh of 2 x 2."""

    op: str
    tensors: tuple[tuple[tuple[int, ...], str], ...]
    args: tuple[Any, ...] | None = None
    kwargs: tuple[tuple[str, Any], ...] = ()

    def specs(self, mesh: Mesh) -> list[Spec]:
        return [Spec(mesh, tuple(map(parse, p.split())), shape, torch.float32) for shape, p in self.tensors]

    def question(self, mesh: Mesh) -> tuple[str, list[Spec], tuple[Any, ...], dict[str, Any]]:
        args = LEAVES[: len(self.tensors)] if self.args is None else self.args
        return self.op, self.specs(mesh), args, dict(self.kwargs)


CALLS = (
    Asked("aten.mul.Tensor", (((64, 32), "S(0) R"), ((64, 32), "S(0) R"))),
    Asked("aten.add.Tensor", (((64, 32), "S(0) S(1)"), ((32,), "R S(0)")), kwargs=(("alpha", 2),)),
    Asked("aten.mm.default", (((64, 32), "S(0) R"), ((32, 16), "R S(1)"))),
    Asked("aten.bmm.default", (((8, 4, 6), "S(0) R"), ((8, 6, 2), "S(0) R"))),
    Asked("aten.sum.dim_IntList", (((64, 32), "S(0) R"),), (LEAVES[0], [1], True)),
    Asked("aten.view.default", (((64, 32), "S(0) R"),), (LEAVES[0], [64, 4, 8])),
    Asked("aten._softmax.default", (((64, 32), "S(0) R"),), (LEAVES[0], -1, False)),
    Asked("aten.transpose.int", (((64, 32), "S(0) S(1)"),), (LEAVES[0], 0, 1)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds for one op."""

    op: str
    ours: float
    ours_new_specs: float
    making_specs: float
    theirs: float
    theirs_kept: float
    theirs_from_tensors: float


@dataclass(frozen=True, slots=True)
class Found:
    """The rows; the processor's microseconds for a call at one thread and at many; and how often a key was computed."""

    rows: tuple[Row, ...]
    alone: float
    together: float
    keys: int
    ours_computed: int
    theirs_computed: int
    cold_ours: float
    cold_theirs: float

    @property
    def slowest(self) -> float:
        return max(row.ours for row in self.rows)

    @property
    def ratio(self) -> float:
        """The least of all ops, with a schema for each call."""
        return min(row.theirs / row.ours for row in self.rows)

    def figures(self) -> dict[str, Any]:
        return asdict(self) | {"slowest": self.slowest, "ratio": self.ratio}


def best(call: Callable[[], Any], calls: int = 200, runs: int = 300) -> float:
    """Microseconds of one call in the best of many short runs."""
    found = []
    turns = range(calls)
    gc.disable()
    try:
        for _ in range(runs):
            start = time.perf_counter()
            for _ in turns:
                call()
            found.append(time.perf_counter() - start)
    finally:
        gc.enable()
    return min(found) / calls * 1e6


def anew(specs: Sequence[Spec]) -> list[Spec]:
    """Equal specs that nobody has seen."""
    return [Spec(spec.mesh, spec.placements, spec.shape, spec.dtype) for spec in specs]


def schema_of(asked: Asked, mesh: DeviceMesh) -> Callable[[], OpSchema]:
    """Makes DTensor's question; the specs are made once, as they are part of the tensors."""
    op = overload(asked.op)
    specs = [
        DTensorSpec(mesh, tuple(map(parse, p.split())), TensorMeta(torch.Size(shape), _strides(shape), torch.float32))
        for shape, p in asked.tensors
    ]
    given = asked.question(Mesh.of(*SIZES))[2]
    args = tuple(specs[a.index] if isinstance(a, Leaf) else a for a in given)
    prop = DTensor._op_dispatcher.sharding_propagator
    info = prop.op_to_schema_info.get(op) or prop.op_to_schema_info_for_single_dim_strategy.get(op)
    return lambda: OpSchema(op, args, dict(asked.kwargs), schema_info=info)


def from_tensors(asked: Asked, mesh: DeviceMesh) -> Callable[[], Any]:
    """What DTensor's dispatcher does in Python, from the tensors to the answer."""
    dispatcher, op = DTensor._op_dispatcher, overload(asked.op)
    given = schema_of(asked, mesh)()
    args = tuple(
        DTensor(torch.empty(1), a, requires_grad=False) if isinstance(a, DTensorSpec) else a for a in given.args_schema
    )
    kwargs = dict(asked.kwargs)
    ask = dispatcher.sharding_propagator.propagate_op_sharding
    return lambda: ask(dispatcher.unwrap_to_op_info(op, args, kwargs).schema)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def compare(book: RuleRegistry = OUR_RULES) -> Found:
    """All of it; about half a minute."""
    mesh = Mesh.of(*SIZES)
    device_mesh = DeviceMesh("cpu", torch.arange(4).reshape(SIZES), _init_backend=False, _rank=0)
    ours = Propagator(book)
    rows = []
    for asked in CALLS:
        op, specs, args, kwargs = asked.question(mesh)
        _check_found(ours, asked, mesh)
        theirs = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        make = schema_of(asked, device_mesh)
        kept = make()
        theirs(kept)
        rows.append(
            Row(
                asked.op,
                best(lambda op=op, specs=specs, args=args, kwargs=kwargs: ours.propagate(op, specs, args, kwargs)),
                best(lambda op=op, specs=specs, args=args, kwargs=kwargs: ours.propagate(op, anew(specs), args, kwargs), 50),
                best(lambda specs=specs: anew(specs), 50),
                best(lambda make=make, theirs=theirs: theirs(make())),
                best(lambda kept=kept, theirs=theirs: theirs(kept)),
                best(from_tensors(asked, device_mesh), 50),
            )
        )  # fmt: skip
    counts = computed(book, device_mesh)
    return Found(tuple(rows), *at_once(ours), len(CALLS), *counts, *cold(book, device_mesh))


def _check_found(ours: Propagator, asked: Asked, mesh: Mesh) -> None:
    """A figure for an op that was refused would be none."""
    found = ours.propagate(*asked.question(mesh))
    if found.mesh != mesh or not found.outputs:
        raise RuntimeError(f"{asked.op} was not propagated: {found}")


def at_once(ours: Propagator, calls: int = 16000, runs: int = 7) -> tuple[float, float]:
    """The processor's microseconds for one cached call of one thread, and of many: the best of runs taken in turn."""
    found = [(_together(ours, 1, calls), _together(ours, THREADS, calls)) for _ in range(runs)]
    return min(alone for alone, _ in found), min(together for _, together in found)


def _together(ours: Propagator, threads: int, calls: int) -> float:
    questions = [asked.question(Mesh.of(*SIZES)) for asked in CALLS]
    ready = threading.Barrier(threads + 1)

    def ask() -> None:
        ready.wait()
        for _ in range(calls // threads // len(questions)):
            for op, specs, args, kwargs in questions:
                ours.propagate(op, specs, args, kwargs)

    workers = [threading.Thread(target=ask) for _ in range(threads)]
    for worker in workers:
        worker.start()
    start = time.process_time()
    ready.wait()
    for worker in workers:
        worker.join()
    return (time.process_time() - start) / calls * 1e6


def computed(book: RuleRegistry, mesh: DeviceMesh) -> tuple[int, int]:
    """How many times a propagation was computed for the keys, where every thread asks for all: ours and theirs."""
    ours = Propagator(book)
    counted: list[int] = []
    compute = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached

    def counting(schema: OpSchema) -> Any:
        counted.append(1)
        return compute(schema)

    theirs = LocalLRUCache(counting)
    lock = threading.Lock()  # theirs are asked in turn: what is counted is how often, not how they meet
    ready = threading.Barrier(THREADS)

    def ask(_: int) -> None:
        ready.wait()
        for asked in CALLS:
            ours.propagate(*asked.question(Mesh.of(*SIZES)))
        for asked in CALLS:
            with lock:
                theirs(schema_of(asked, mesh)())

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(ask, range(THREADS)))
    return ours.stats().misses, len(counted)


def cold(book: RuleRegistry, mesh: DeviceMesh, runs: int = 5) -> tuple[float, float]:
    """Microseconds to compute one anew, on average over the calls, in the best of some runs: ours and theirs."""
    compute = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached
    ours = Propagator(book)
    questions = [asked.question(Mesh.of(*SIZES)) for asked in CALLS]
    makes = [schema_of(asked, mesh) for asked in CALLS]
    found = []
    for _ in range(runs):
        ours.clear()
        start = time.perf_counter()
        for question in questions:
            ours.propagate(*question)
        middle = time.perf_counter()
        for make in makes:
            compute(make())
        found.append((middle - start, time.perf_counter() - middle))
    return min(a for a, _ in found) / len(CALLS) * 1e6, min(b for _, b in found) / len(CALLS) * 1e6


def show(console: Console, found: Found) -> None:
    """The tables."""
    table = Table(title="a cached propagate, microseconds", title_justify="left")
    theirs = ("new schema", "kept schema", "from tensors")
    for name in ("op", "ours", "new specs", *(f"DTensor, {way}" for way in theirs), "times faster"):
        table.add_column(name, justify="left" if name == "op" else "right")
    for row in found.rows:
        cells = (row.ours, row.ours_new_specs - row.making_specs, row.theirs, row.theirs_kept, row.theirs_from_tensors)
        times = " / ".join(f"{cell / row.ours:.1f}" for cell in cells[2:])
        table.add_row(row.op, *(f"{cell:.2f}" for cell in cells), times)
    console.print(table)
    console.print(
        f"slowest of ours {found.slowest:.2f} us (target {MICROSECONDS:g}); least ratio {found.ratio:.1f} (target {TIMES:g})"
    )
    console.print(
        f"{THREADS} threads: {found.together:.2f} us of the processor for a call, one thread {found.alone:.2f} us"
    )
    console.print(
        f"{found.keys} keys asked for by {THREADS} threads: ours computed {found.ours_computed}, DTensor {found.theirs_computed}"
    )
    console.print(f"computed anew: ours {found.cold_ours:.0f} us, DTensor {found.cold_theirs:.0f} us for a call")


def main() -> int:
    """Print it; 1 if a target is missed that does not depend on the machine."""
    found = compare()
    show(Console(width=None if sys.stdout.isatty() else 120, highlight=False), found)
    return int(found.ours_computed != found.keys)


if __name__ == "__main__":
    sys.exit(main())

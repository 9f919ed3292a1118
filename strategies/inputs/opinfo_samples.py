"""Concrete op calls: torch's OpInfo database, forward, in place, and the backward that autograd ran.

| torch part (under torch.testing._internal)                  | read on     | run on |
|-------------------------------------------------------------|-------------|--------|
| common_methods_invocations.op_db                            | 2.11 - 2.15 | 2.13   |
| OpInfo.name, .aten_name, .aliases, .supported_dtypes        | 2.11 - 2.15 | 2.13   |
| OpInfo.inplace_variant, .supports_autograd                  | 2.11 - 2.15 | 2.13   |
| the sizes S, M, L, XS of opinfo.core and its copies         | 2.11 - 2.15 | 2.13   |

OpInfo's own sizes are 20, 10, 5 and 3, of which two ranks can halve two; so every op is also
sampled with 12, 8, 4 and 2.  The import takes seconds and is therefore left to the first use.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor._util import drawn
from localtensor.errors import in_a_line
from strategies.base.worker_pool import Done, Lost, Workers
from strategies.inputs.schema_binding import Bound, Unbound, bind, calm
from strategies.inputs.typed_values import FIRST, draw_for
from strategies.model.call_signature import choose
from strategies.model.rule import Sample, call_of
from strategies.torch_api.population import lacks_kernel

SIZES = {"odd": (20, 10, 5, 3), "even": (12, 8, 4, 2)}
"""L, M, S and XS of the two passes."""
ONE_SIZE = {"_segment_reduce_lengths", "_segment_reduce_offsets"}
"""OpInfos whose samples hold lengths written for S = 5: with another S torch writes out of bounds (2.13)."""
MOST_DRAWN, MOST_CALLS = 240, 60
"""Samples of one OpInfo, dtype and pass: looked at, and run."""
MOST_KEPT, MOST_OTHERS, MOST_MET = 24, 4, 12
"""Calls kept of an overload that bears the OpInfo's name, and of one met on the way, out of how many."""
MOST_NUMEL, MOST_INPUT = 20_000, 200_000
"""Elements of a tensor of a sample, and of all inputs of an OpInfo's sample that is run at all."""


def database() -> list[Any]:
    """torch's OpInfos, in their own order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def names(info: Any) -> set[str]:
    """Every name by which a user may ask for it."""
    return {info.name, info.aten_name or info.name, *(alias.name for alias in info.aliases or ())}


@functools.cache
def _size_homes() -> tuple[Any, ...]:
    database()  # asked before OpInfo is imported, this would find no module, and remember that
    found = [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal.")]
    return tuple(m for m in found if all(isinstance(vars(m).get(size), int) for size in "LMS"))


@contextlib.contextmanager
def sizes(which: str) -> Iterator[None]:
    """OpInfo's S, M, L and XS as that pass wants them, put back afterwards."""
    chosen = dict(zip(("L", "M", "S", "XS"), SIZES[which], strict=True))
    before = [(m, size, vars(m)[size]) for m in _size_homes() for size in chosen if size in vars(m)]
    try:
        for m, size, _ in before:
            setattr(m, size, chosen[size])
        yield
    finally:
        for m, size, value in before:
            setattr(m, size, value)


def seed_all(seed: int, *names: object) -> None:
    """Every generator that OpInfo draws from, from a seed and the name of the unit of work."""
    mixed = zlib.crc32(repr((seed, *names)).encode())
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed)


def capture(
    info: Any, dtype: torch.dtype, which: str, *, device: str, seed: int, wanted: Callable[[Any], bool]
) -> tuple[list[Sample], Counter[str]]:
    """The calls that reach a wanted overload while this OpInfo's samples run; and what failed, by reason.

    A sample that raises in torch itself costs that sample only, and is counted under its error.
    """
    own = {part.strip("_") for name in names(info) for part in (name, name.split(".")[-1], name.replace(".", "_"))}
    recorder = _Recorder(wanted, own, f"{info.formatted_name}[{str(dtype).removeprefix('torch.')},{which}]")
    failed: Counter[str] = Counter()
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    seed_all(seed, info.formatted_name, str(dtype), which)
    if which != "odd" and info.formatted_name in ONE_SIZE:
        return [], failed
    with sizes(which):
        with drawn(info, device, dtype, requires_grad=grad) as every:
            few = _spread(every, failed)
        for number, sample in few:
            try:
                _run(info, sample, recorder, number)
            except _REFUSALS as error:
                failed[in_a_line(error, 100)] += 1
    return recorder.best(), failed


def _spread(every: Iterator[Any], failed: Counter[str]) -> list[tuple[int, Any]]:
    """At most MOST_CALLS of the first MOST_DRAWN samples, from all over them: like stands next to like."""
    found: list[tuple[int, Any]] = []
    try:
        found.extend(enumerate(itertools.islice(every, MOST_DRAWN)))  # keeps what came before an error
    except _REFUSALS as error:
        failed[in_a_line(error, 100)] += 1
    small = [(number, sample) for number, sample in found if _numel(sample) <= MOST_INPUT]
    if len(small) < len(found):
        failed[f"samples of more than {MOST_INPUT} elements are left out"] += len(found) - len(small)
    found = small
    step = max(1.0, len(found) / MOST_CALLS)
    return [found[int(i * step)] for i in range(min(MOST_CALLS, len(found)))]


def _numel(sample: Any) -> int:
    """Elements of the tensors that stand in the call themselves; those in lists are never the large ones."""
    return sum(x.numel() for x in (sample.input, *sample.args) if isinstance(x, Tensor))


_REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AttributeError, AssertionError, KeyError)  # fmt: skip
"""What torch raises for a sample that this build, device or dtype cannot run."""


def _run(info: Any, sample: Any, recorder: _Recorder, number: int) -> None:
    with recorder.stage(f"#{number} forward"):
        out = info(sample.input, *sample.args, **sample.kwargs)
    outs = [t for t in _tensors(out) if t.requires_grad]
    if outs:
        cotangents = [torch.randn_like(t) for t in outs]
        with recorder.stage(f"#{number} backward"):
            torch.autograd.backward(outs, cotangents)
    inplace = info.inplace_variant
    if inplace is None or not isinstance(sample.input, Tensor) or sample.broadcasts_input:
        return
    with torch.no_grad():
        target = sample.input.detach().clone()
        with recorder.stage(f"#{number} in place"):
            inplace(target, *sample.args, **sample.kwargs)


def _tensors(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]


class _Recorder(TorchDispatchMode):
    """Keeps the first calls of each wanted overload that differ in shapes, dtypes or scalars."""

    def __init__(self, wanted: Callable[[Any], bool], own: set[str], origin: str) -> None:
        super().__init__()
        self.wanted, self.own, self.origin, self.now = wanted, own, origin, ""
        self.kept: dict[str, list[Sample]] = defaultdict(list)
        self._own: dict[str, bool] = {}
        self._seen: set[str] = set()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.now = name
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        room = len(self.kept[str(func)]) < (MOST_CALLS if self._is_own(func) else MOST_MET)
        copy = self._copy(func, args, kwargs or {}) if room and self.wanted(func) else None
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            out.fill_(1)  # left-over memory would make the next op's sample another one each time
        if copy is not None:  # only now: a call that the op refuses is no sample
            self.kept[str(func)].append(copy)
        return out

    def _is_own(self, func: Any) -> bool:
        packet = func.overloadpacket.__name__
        if packet not in self._own:
            self._own[packet] = any(name in packet if len(name) > 3 else name == packet.strip("_") for name in self.own)
        return self._own[packet]

    def best(self) -> list[Sample]:
        """Of each overload the samples that differ most."""
        most = {op: MOST_KEPT if self._own.get(op.split(".")[1]) else MOST_OTHERS for op in self.kept}
        few = {op: found if len(found) <= most[op] else choose(found, most[op]) for op, found in self.kept.items()}
        return [sample for found in few.values() for sample in found]

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Sample | None:
        """The call with its tensors as they are before it, or None if one like it is kept already."""
        call, tensors = call_of(func, args, kwargs)
        if not all(map(_usable, tensors)) or any(map(_is_generator, kwargs.values())):
            return None
        sample = Sample(call, tuple(tensors), f"{self.origin} {self.now}")
        key = f"{func} {sample.arguments()}"
        if key in self._seen:
            return None
        self._seen.add(key)
        copies = tuple(t.detach().clone().resolve_conj().resolve_neg() for t in tensors)
        return Sample(call, copies, sample.origin)


def _is_generator(value: object) -> bool:
    return isinstance(value, torch.Generator)


def _usable(t: Tensor) -> bool:
    plain = type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided
    return plain and not t.is_quantized and t.numel() <= MOST_NUMEL


# Samples for overloads that no database reaches: bound from their siblings' samples, else drawn from the schema.

MOST_SIBLINGS, MOST_OF_ONE, MOST = 2, 28, 24
"""Siblings that are asked for samples, samples of each, and samples made of one overload."""
_NEAR = 0.7
"""How much of the longer name the shorter one must be, if it has no other words."""
MOST_ALONE = 12
"""Samples of an overload that are tried one at a time, in a worker each, after one of them killed its worker."""
SECONDS = 60.0
"""Time limit of one overload."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """One overload without samples, and the samples of its nearest siblings: what a worker needs."""

    op: str
    siblings: tuple[Sample, ...]
    seed: int = 0
    dtypes: tuple[str, ...] = FIRST
    draws: bool = True
    """Whether calls are drawn from the schema where no sibling's sample fits."""


def lacking(by_op: Mapping[str, Sequence[Sample]], wanted: Sequence[str], seed: int = 0) -> list[Lacking]:
    """The units of work: each wanted overload that has no sample yet, in the order of their names."""
    have = sorted(op for op, found in by_op.items() if found)
    return [
        Lacking(op, tuple(s for name in siblings(op, have) for s in _spread_of(by_op[name])), seed)
        for op in sorted(set(wanted))
        if not by_op.get(op)
    ]


def siblings(op: str, have: Sequence[str]) -> list[str]:
    """The overloads nearest to this one in name, nearest first: of the same op, in place or not, alike in name."""
    near = sorted((d, name) for name in have for d in [_distance(op, name)] if d is not None)
    return [name for _, name in near[:MOST_SIBLINGS]]


def _distance(op: str, other: str) -> float | None:
    ours, theirs = _root(op), _root(other)
    if ours == theirs:
        same = op.split(".")[1] == other.split(".")[1]
        return 0.0 if same else 0.1
    return _between(ours, theirs)


@functools.cache
def _between(ours: str, theirs: str) -> float | None:
    long, short = sorted((ours, theirs), key=len, reverse=True)
    if ("backward" in ours) != ("backward" in theirs) or not set(short.split("_")) <= set(long.split("_")):
        return None
    share = len(short) / len(long)
    return 2.0 - share if share >= _NEAR else None


@functools.cache
def _root(op: str) -> str:
    """The name that an op shares with its variants: `_index_put_impl_` and `index_put`, `view_copy` and `view`."""
    packet = op.split(".")[1].strip("_")
    for ending in ("_functional", "_copy", "_impl"):
        packet = packet.removesuffix(ending)
    return packet


def _spread_of(found: Sequence[Sample]) -> list[Sample]:
    """At most `MOST_OF_ONE` samples from all over them: like stands next to like."""
    step = max(1.0, len(found) / MOST_OF_ONE)
    return [found[int(i * step)] for i in range(min(MOST_OF_ONE, len(found)))]


def make(task: Lacking, note: Callable[[int], None]) -> tuple[list[Sample], str]:
    """A worker's part: samples of one overload, or why there are none.  `note` hears which sibling is tried.

    An op that crashes on what it should refuse takes this process with it.
    """
    why = lacks_kernel(task.op)
    if why:
        return [], why
    made: dict[str, Bound] = {}
    refused: Counter[str] = Counter()
    for number, sample in enumerate(task.siblings):
        note(number)
        try:
            bound = bind(sample, task.op)
        except Unbound as no:
            refused[str(no)] += 1
            continue
        made.setdefault(str(bound.sample.arguments()), bound)
        if len(made) >= MOST:
            break
    if made:
        return calm(made.values()), ""
    if not task.draws:
        return [], max(refused, key=lambda why: refused[why], default="")
    try:
        return draw_for(task.op, task.dtypes, task.seed), ""
    except Unbound as no:
        return [], str(no)


def gather(
    crew: Workers,
    by_op: Mapping[str, Sequence[Sample]],
    wanted: Sequence[str],
    seed: int = 0,
    tick: Callable[[int], None] | None = None,
) -> tuple[dict[str, list[Sample]], dict[str, str]]:
    """Samples for the wanted overloads that have none, and the reason for those which still have none.

    The same for the same seed.  Of an op that kills its process on one sample the rest are tried alone.
    """
    made: dict[str, list[Sample]] = {}
    reasons: dict[str, str] = {}
    todo = lacking(by_op, wanted, seed)
    while todo:
        again: list[Lacking] = []
        for task, answer in zip(todo, crew.run(make, todo, limit=SECONDS, tick=tick), strict=True):
            if isinstance(answer, Done):
                found, why = answer.value
                made.setdefault(task.op, []).extend(found)
            else:
                why = answer.why if isinstance(answer, Lost) else answer.error
                again += _apart(task, answer.noted) if isinstance(answer, Lost) else []
            reasons.update({task.op: why} if why else {})
        todo = again
    made = {op: found for op, found in sorted(made.items()) if found}
    return made, {op: why for op, why in sorted(reasons.items()) if op not in made}


def _apart(task: Lacking, killer: int) -> list[Lacking]:
    """The task without the sample that killed its worker: those before it together, those behind it each alone."""
    if len(task.siblings) <= 1 or killer < 0:
        return []
    behind = [replace(task, siblings=(s,), draws=False) for s in task.siblings[killer + 1 :][:MOST_ALONE]]
    return [replace(task, siblings=task.siblings[:killer], draws=True), *behind]

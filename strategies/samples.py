"""Concrete op calls: torch's OpInfo database, forward, in place, and the backward that autograd ran.

| torch part (under torch.testing._internal)                  | read on     | run on |
|-------------------------------------------------------------|-------------|--------|
| common_methods_invocations.op_db, OpInfo.sample_inputs      | 2.11 - 2.15 | 2.13   |
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
import math
import random
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.rules import Call, Leaf, Sample, call_of, overload

SIZES = {"odd": (20, 10, 5, 3), "even": (12, 8, 4, 2)}
"""L, M, S and XS of the two passes."""
ONE_SIZE = {"_segment_reduce_lengths", "_segment_reduce_offsets"}
"""OpInfos whose samples hold lengths written for S = 5: with another S torch writes out of bounds (2.13)."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "int64": torch.int64, "bool": torch.bool,
          "complex64": torch.complex64}  # fmt: skip
MOST_DRAWN, MOST_CALLS = 240, 60
"""Samples of one OpInfo, dtype and pass: looked at, and run."""
MOST_KEPT, MOST_OTHERS, MOST_MET = 24, 4, 12
"""Calls kept of an overload that bears the OpInfo's name, and of one met on the way, out of how many."""
MOST_NUMEL = 20_000


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
        drawn = iter(info.sample_inputs(device, dtype, requires_grad=grad))
        if hasattr(drawn, "set_seed"):
            drawn.set_seed = False  # it would seed all devices before each sample, which costs more than most samples
        for number, sample in _spread(drawn, failed):
            try:
                _run(info, sample, recorder, number)
            except _REFUSALS as error:
                failed[_said(error)] += 1
    return recorder.best(), failed


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"


def _spread(drawn: Iterator[Any], failed: Counter[str]) -> list[tuple[int, Any]]:
    """At most MOST_CALLS of the first MOST_DRAWN samples, from all over them: like stands next to like."""
    found: list[tuple[int, Any]] = []
    try:
        found.extend(enumerate(itertools.islice(drawn, MOST_DRAWN)))  # keeps what came before an error
    except _REFUSALS as error:
        failed[_said(error)] += 1
    step = max(1.0, len(found) / MOST_CALLS)
    return [found[int(i * step)] for i in range(min(MOST_CALLS, len(found)))]


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
        return [sample for op, found in self.kept.items() for sample in choose(found, most[op])]

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


_DIM_NAMES = {"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis"}


def respelled(sample: Sample) -> list[Sample]:
    """The same call with its dims spelled the other way: 1 as -1 of two dims, -1 as 1.

    A rule that compares `dim` with a shard dim is often wrong in just one of the spellings.  The
    caller must check that the op gives the same: for unsqueeze and stack -1 counts one dim more,
    which is why there are two candidates.  Ops whose name begins with an underscore trust their caller:
    `_fft_r2c` with a negative dim crashes the process (2.13), so they keep the dims that they came with.
    """
    if not sample.tensors or sample.op.split(".")[1].startswith("_"):
        return []
    schema = overload(sample.op)._schema.arguments
    spots = {a.name for a in schema if a.name in _DIM_NAMES and "int" in str(a.type)}
    made = []
    for ndim in (sample.tensors[0].ndim, sample.tensors[0].ndim + 1):
        args = tuple(_other(v, ndim) if a.name in spots else v for a, v in zip(schema, sample.call.args, strict=False))
        kwargs = tuple((name, _other(v, ndim) if name in spots else v) for name, v in sample.call.kwargs)
        if (args, kwargs) != (sample.call.args, sample.call.kwargs):
            made.append(replace(sample, call=Call(sample.op, args, kwargs), origin=f"{sample.origin}, dims respelled"))
    return made


def shortened(sample: Sample) -> list[Sample]:
    """The same call with one operand shorter than the first along one dim: what gather and scatter take.

    Rules that pair the shards of two operands often assume that they are equally long.  Ops that
    trust their caller (underscore, native_, backward) are not asked: they would read past the end.
    """
    packet = sample.op.split(".")[1]
    if packet.startswith(("_", "native_")) or "backward" in packet or not sample.tensors:
        return []
    first, made = sample.tensors[0], []
    for i, other in enumerate(sample.tensors[1:], 1):
        for dim in range(other.ndim if other.ndim == first.ndim else 0):
            if other.shape[dim] == first.shape[dim] and other.shape[dim] >= 4:
                short = other.narrow(dim, 0, other.shape[dim] // 2 + 1).clone()
                tensors = (*sample.tensors[:i], short, *sample.tensors[i + 1 :])
                made.append(replace(sample, tensors=tensors, origin=f"{sample.origin}, operand {i} shortened"))
    return made


def _other(value: Any, ndim: int) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_other(v, ndim) for v in value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return value - ndim if value >= 0 else value + ndim


def features(sample: Sample) -> list[tuple[int, str]]:
    """What a rule could look at, argument by argument: dtype, number of dims, ones, evenness, scalars."""

    def show(value: Any) -> str:
        if isinstance(value, Leaf):
            x = sample.tensors[value.index]
            sizes = "".join("1" if size == 1 else "e" if size % 2 == 0 else "o" for size in x.shape)
            return f"{x.dtype}{sizes}{'' if x.is_contiguous() else ' strided'}"
        if isinstance(value, float):
            return "inf" if math.isinf(value) else "integral" if value.is_integer() else "float"
        return f"{type(value).__name__}({', '.join(map(show, value))})" if isinstance(value, (list, tuple)) else repr(value)  # fmt: skip

    shown = [show(a) for a in sample.call.args] + [f"{n}={show(v)}" for n, v in sample.call.kwargs]
    shapes = {tuple(t.shape) for t in sample.tensors}
    beside = [(-3 - i, _beside(sample.tensors[0], t)) for i, t in enumerate(sample.tensors[1:])]
    return [*enumerate(shown), (-1, f"{len(shapes)} shapes"), (-2, f"{len(shown)} arguments"), *beside]


def _beside(first: Tensor, other: Tensor) -> str:
    """Dim by dim, whether the other tensor is as long as the first, shorter or longer."""
    if first.ndim != other.ndim:
        return f"{other.ndim - first.ndim:+d} dims"
    return "".join("=" if a == b else "<" if b < a else ">" for a, b in zip(first.shape, other.shape, strict=True))


MOST_CANDIDATES = 200


def choose(found: Sequence[Sample], most: int) -> list[Sample]:
    """At most so many samples of one overload, each chosen for what it adds to those before it.

    New values of an argument count most, then new pairs of values; of equals one that can be split
    is taken before one that cannot, then the smaller, then the earlier.  The order is that of choice.
    """
    unique: dict[str, tuple[Sample, set[Any]]] = {}
    for sample in sorted(found, key=lambda s: (_largest(s) < 4, s.size)):
        seen = features(sample)
        unique.setdefault(repr(seen), (sample, _weighed(seen)))
    left = list(unique.values())[:MOST_CANDIDATES]
    covered: set[Any] = set()
    chosen: list[Sample] = []
    while left and len(chosen) < most:
        gains = [sum(_WORTH[len(f)] for f in worth - covered) for _, worth in left]
        best, worth = left.pop(max(range(len(left)), key=lambda i: (gains[i], -i)))
        covered |= worth
        chosen.append(best)
    return chosen


def _largest(sample: Sample) -> int:
    return max((t.numel() for t in sample.tensors), default=0)


_WORTH = {1: 12, 2: 1}


def _weighed(seen: Sequence[tuple[int, str]]) -> set[Any]:
    """Values alone, as 1-tuples, and pairs of them."""
    return {(f,) for f in seen} | set(itertools.combinations(seen, 2))

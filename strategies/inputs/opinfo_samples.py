"""Concrete op calls from torch's OpInfo database: forward, in place, and backward under autograd.

| torch part (under torch.testing._internal)                  | read on     | run on |
|-------------------------------------------------------------|-------------|--------|
| OpInfo.name, .aten_name, .aliases, .supported_dtypes        | 2.11 - 2.15 | 2.13   |
| OpInfo.inplace_variant, .supports_autograd                  | 2.11 - 2.15 | 2.13   |
| the sizes S, M, L, XS of opinfo.core and its copies         | 2.11 - 2.15 | 2.13   |

OpInfo's own sizes are 20, 10, 5 and 3, of which only two are even; so every op is also sampled with 12, 8, 4 and 2.
OpInfo is imported on first use, since the import takes seconds.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor._util import drawn_samples, opinfo_list
from localtensor.errors import error_in_one_line
from strategies.model.arguments import trusts_caller
from strategies.model.call_signature import diverse_subset
from strategies.model.kernels import copied_to
from strategies.model.rule import Sample, call_of, flat_results

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

SIZES = {"odd": (20, 10, 5, 3), "even": (12, 8, 4, 2)}
"""The values of L, M, S and XS in the two passes."""
ONE_SIZE = {"_segment_reduce_lengths", "_segment_reduce_offsets"}
"""OpInfos whose samples contain lengths for S = 5: with another S torch writes out of bounds (2.13)."""
ATTENTION = "nn.functional.scaled_dot_product_attention"
MOST_DRAWN, MOST_CALLS = 240, 60
"""Samples of one OpInfo, dtype and pass that are drawn, and that are run."""
MOST_KEPT, MOST_OTHERS, MOST_MET = 24, 4, 12
"""Calls kept of an overload with the OpInfo's name, and of another one, out of how many."""
MOST_BROADCAST = 4
"""Samples of which an operand has one more dim, for the overloads that trust their caller."""
MOST_NUMEL, MOST_INPUT = 20_000, 200_000
"""The most elements of a tensor of a recorded call, and of all inputs of a sample that is run."""
T = TypeVar("T")
Overload = torch._ops.OpOverload
Wanted = Callable[[Overload], bool]


def database() -> list[OpInfo]:
    """torch's OpInfos, in torch's order."""
    return opinfo_list()


@functools.cache
def quoted_names() -> frozenset[str]:
    """Every quoted name in the sources of torch's OpInfos: theirs and others.  OpInfo is not imported.

    Empty where torch is installed without its sources.
    """
    folder = Path(torch.__file__).parent / "testing" / "_internal"
    files = [folder / "common_methods_invocations.py", *sorted(folder.glob("opinfo/**/*.py"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return frozenset(re.findall(r"""["']([A-Za-z_][\w.]*)["']""", text))


def names(info: OpInfo) -> set[str]:
    """Every name by which a user may select the OpInfo."""
    return {info.name, info.aten_name or info.name, *(alias.name for alias in info.aliases or ())}


def plain_names(info: OpInfo) -> set[str]:
    """The names of an OpInfo, whole, without the namespace, and with underscores for dots."""
    return {part for name in names(info) for part in (name, name.split(".")[-1], name.replace(".", "_"))}


@functools.cache
def _modules_with_sizes() -> tuple[ModuleType, ...]:
    database()  # the modules must be imported before the result is cached
    found = [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal.")]
    return tuple(m for m in found if all(isinstance(vars(m).get(size), int) for size in "LMS"))


@contextlib.contextmanager
def opinfo_sizes(which: str) -> Iterator[None]:
    """A context in which OpInfo's S, M, L and XS have the values of that pass."""
    chosen = dict(zip(("L", "M", "S", "XS"), SIZES[which], strict=True))
    before = [(m, size, vars(m)[size]) for m in _modules_with_sizes() for size in chosen if size in vars(m)]
    try:
        for m, size, _ in before:
            setattr(m, size, chosen[size])
        yield
    finally:
        for m, size, value in before:
            setattr(m, size, value)


def seed_all(seed: int, *names: object) -> None:
    """Seeds every generator that OpInfo draws from, by a seed and the names of the unit of work."""
    mixed = zlib.crc32(repr((seed, *names)).encode())
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed)


def capture_calls(
    info: OpInfo, dtype: torch.dtype, which: str, *, device: str, seed: int, wanted: Wanted
) -> tuple[list[Sample], Counter[str]]:
    """The calls of wanted overloads while this OpInfo's samples run, and the number of failed samples by reason.

    A sample for which torch raises is left out and counted under its error.
    """
    own = {name.strip("_") for name in plain_names(info)}
    recorder = _Recorder(wanted, own, f"{info.formatted_name}[{str(dtype).removeprefix('torch.')},{which}]")
    failed: Counter[str] = Counter()
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    seed_all(seed, info.formatted_name, str(dtype), which)
    if which != "odd" and info.formatted_name in ONE_SIZE:
        return [], failed
    with opinfo_sizes(which):
        with drawn_samples(info, device, dtype, requires_grad=grad) as every:
            few = _drawn_samples(every, failed)
        for kernels in _kernels(info, dtype, device):
            for number, sample in few:
                try:
                    with kernels():
                        _run(info, sample, recorder, str(number))
                except _REFUSALS as error:
                    failed[error_in_one_line(error, 100)] += 1
        recorder.wanted = lambda op: wanted(op) and trusts_caller(str(op))
        others = _with_operand_of_more_dims(info, few) if any(map(trusts_caller, recorder.kept)) else iter(())
        for number, sample, what in itertools.islice(others, MOST_BROADCAST):
            with contextlib.suppress(*_REFUSALS):
                _run(info, sample, recorder, f"{number}, {what},")
    return [_on_host(sample) for sample in recorder.best()], failed


def _on_host(sample: Sample) -> Sample:
    if all(x.device.type == "cpu" for x in sample.tensors):
        return sample
    return replace(sample, tensors=tuple(copied_to(x, "cpu") for x in sample.tensors))


def _with_operand_of_more_dims(
    info: OpInfo, few: Sequence[tuple[int, SampleInput]]
) -> Iterator[tuple[int, SampleInput, str]]:
    """Samples with one more dim of the same size before the first of an operand: those of most dims, and the last operand, first.

    An op that trusts its caller gets no such form of ours, since it does not check how its operands broadcast: its caller does.
    """
    every: list[tuple[int, SampleInput, list[Any]]] = [(n, one, [one.input, *one.args]) for n, one in few]
    for number, sample, given in sorted(every, key=lambda one: -sum(x.ndim for x in one[2] if isinstance(x, Tensor))):
        tensors = [x for x in given if isinstance(x, Tensor)]
        if any(not _usable(x) or not (x.is_floating_point() or x.is_complex()) for x in tensors):
            continue  # a kernel that reads where integers tell, such as pivots, may end the process
        places = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.ndim and len(x) > 1]
        for i in reversed(places) if len(tensors) > 1 else ():
            more = torch.stack([given[i].detach()] * len(given[i])).requires_grad_(given[i].requires_grad)
            made = copy.copy(sample)
            changed = [*given[:i], more, *given[i + 1 :]]
            made.input, made.args = changed[0], tuple(changed[1:])
            if _broadcasts(info, sample, made):
                yield number, made, f"operand {i} with one more dim"


def _broadcasts(info: OpInfo, sample: SampleInput, more: SampleInput) -> bool:
    """Whether a result has more dims, each with the values of before: batch norm reads the first elements of a weight of more dims."""
    try:
        with torch.no_grad():
            first, other = (info(one.input, *one.args, **one.kwargs) for one in (sample, more))
    except _REFUSALS:
        return False
    outs = [[x for x in flat_results(out) if isinstance(x, Tensor)] for out in (first, other)]
    pairs = [*zip(*outs, strict=False)]
    if len(outs[0]) != len(outs[1]) or all(b.ndim == a.ndim for a, b in pairs):  # a sum of all elements shows nothing
        return False
    fits = all(a.shape == b.shape[b.ndim - a.ndim :] for a, b in pairs)
    return fits and all(torch.allclose(a.expand(b.shape), b, rtol=1e-3, atol=1e-5, equal_nan=True) for a, b in pairs)


def _kernels(info: OpInfo, dtype: torch.dtype, device: str) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    """Contexts in which the samples run: torch's own choice of kernels, then for attention on a GPU each of its kernels.

    Torch chooses one for a call, and each has its own overload; none of the others takes double precision.
    """
    yield contextlib.nullcontext
    if torch.device(device).type == "cuda" and info.name == ATTENTION and dtype.itemsize <= torch.float32.itemsize:
        from torch.nn.attention import SDPBackend, sdpa_kernel  # lazy: not needed without a GPU

        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            yield functools.partial(sdpa_kernel, backend)


def bearers(ops: Collection[str]) -> list[int]:
    """The OpInfos whose samples may reach these overloads, by their names: the op of a kernel, forward or backward."""
    roots = {op.split(".")[1].strip("_") for op in ops}

    def is_near(name: str) -> bool:
        words = set(name.split("_"))
        return len(words) > 1 and any(words <= set(root.split("_")) for root in roots)

    return [n for n, info in enumerate(database()) if any(map(is_near, plain_names(info)))]


def _drawn_samples(every: Iterator[Any], failed: Counter[str]) -> list[tuple[int, Any]]:
    """At most MOST_CALLS of the first MOST_DRAWN samples, with their numbers."""
    found: list[tuple[int, Any]] = []
    try:
        found.extend(enumerate(itertools.islice(every, MOST_DRAWN)))  # extend keeps the samples before an error
    except _REFUSALS as error:
        failed[error_in_one_line(error, 100)] += 1
    small = []
    for number, sample in found:
        tensors = [x for x in (sample.input, *sample.args) if isinstance(x, Tensor)]  # those in lists are never large
        if sum(x.numel() for x in tensors) <= MOST_INPUT:
            small.append((number, sample))
    if len(small) < len(found):
        failed[f"samples of more than {MOST_INPUT} elements are left out"] += len(found) - len(small)
    return evenly(small, MOST_CALLS)


def evenly(found: Sequence[T], most: int) -> list[T]:
    """At most so many items at even distances, since neighbours are alike."""
    step = max(1.0, len(found) / most)
    return [found[int(i * step)] for i in range(min(most, len(found)))]


_REFUSALS = (
    RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AttributeError, AssertionError, KeyError,
)  # fmt: skip
"""What torch raises for a sample that it cannot run in this build, on this device or for this dtype."""


def _run(info: OpInfo, sample: SampleInput, recorder: _Recorder, label: str) -> None:
    with recorder.stage(f"#{label} forward"):
        out = info(sample.input, *sample.args, **sample.kwargs)
    outs = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor) and t.requires_grad]
    if outs:
        cotangents = [torch.randn_like(t) for t in outs]
        with recorder.stage(f"#{label} backward"), torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(outs, cotangents)  # in this thread on a GPU, too
    inplace = info.inplace_variant
    if inplace is None or not isinstance(sample.input, Tensor) or sample.broadcasts_input:
        return
    with torch.no_grad():
        target = sample.input.detach().clone()
        with recorder.stage(f"#{label} in place"):
            inplace(target, *sample.args, **sample.kwargs)


class _Recorder(TorchDispatchMode):
    """A dispatch mode that records the first different calls of each wanted overload."""

    def __init__(self, wanted: Wanted, own: set[str], origin: str) -> None:
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

    def __torch_dispatch__(
        self, func: Overload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        full = len(self.kept[str(func)]) >= (MOST_CALLS if self._is_own(func) else MOST_MET)
        copy = self._copy(func, args, kwargs or {}) if not full and self.wanted(func) else None
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            out.fill_(1)  # uninitialised memory would make the samples of the next op differ by run
        if copy is not None:  # only now: a call that the op rejects is no sample
            self.kept[str(func)].append(copy)
        return out

    def _is_own(self, func: Overload) -> bool:
        packet = func.overloadpacket.__name__
        if packet not in self._own:
            self._own[packet] = any(name in packet if len(name) > 3 else name == packet.strip("_") for name in self.own)
        return self._own[packet]

    def best(self) -> list[Sample]:
        """A diverse subset of the samples of each overload."""
        most = {op: MOST_KEPT if self._own.get(op.split(".")[1]) else MOST_OTHERS for op in self.kept}
        return [
            sample
            for op, found in self.kept.items()
            for sample in (found if len(found) <= most[op] else diverse_subset(found, most[op]))
        ]

    def _copy(self, func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sample | None:
        """The call with its tensors as they are before it; None if one like it is recorded already."""
        call, tensors = call_of(func, args, kwargs)
        if not all(map(_usable, tensors)) or any(isinstance(v, torch.Generator) for v in kwargs.values()):
            return None
        sample = Sample(call, tuple(tensors), f"{self.origin} {self.now}")
        key = f"{func} {sample.arguments()}"
        if key in self._seen:
            return None
        self._seen.add(key)
        copies = tuple(t.detach().clone().resolve_conj().resolve_neg() for t in tensors)
        return Sample(call, copies, sample.origin)


def _usable(t: Tensor) -> bool:
    plain = type(t) in (Tensor, torch.nn.Parameter) and t.layout == torch.strided
    return plain and not t.is_quantized and t.numel() <= MOST_NUMEL

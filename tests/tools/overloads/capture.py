"""Calls of aten overloads, as torch's OpInfos reach them: forward, in place, out=, and the backward that autograd runs."""

import contextlib
import copy
import itertools
import random
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor._util.opinfo import drawn_samples
from tests.localtensor.lockstep.lockstep_reference import leaves

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64)
MOST_SAMPLES = 24  # of an OpInfo and dtype that are run by `make overloads`
MOST_NUMEL = 4096
LIST = 4  # tensors that are kept of a longer list
REFUSED = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AttributeError, AssertionError, KeyError, ArithmeticError)  # fmt: skip


@dataclass
class Call:
    """One call with plain tensors, and where it was met; `telling` if what it gives is more than zeros and NaN."""

    op: Any
    args: tuple
    kwargs: dict
    origin: str
    telling: bool = True


def infos():
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def foreach_infos():
    from torch.testing._internal import common_methods_invocations as found

    names = (
        "foreach_unary_op_db",
        "foreach_binary_op_db",
        "foreach_pointwise_op_db",
        "foreach_reduce_op_db",
        "foreach_other_op_db",
    )
    return [info for name in names for info in getattr(found, name)]


def captured(
    dtypes: Sequence[torch.dtype] = DTYPES, most: int = 3, samples: int = MOST_SAMPLES, of: Container[str] | None = None
) -> dict[str, list[Call]]:
    """Calls of every overload that the OpInfos reach, by its name: up to `most` captured ones, and their variants.

    `samples` are run of each OpInfo and dtype.  `of` are the names of OpInfos, by default all.

    Behind them stands, of each dtype, one that gave nothing but zeros or NaN, as `_cdist_backward` does with p=0; where
    there are no others, up to `most` of these.
    """
    found: defaultdict = defaultdict(list)
    seen: Counter = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in dtypes:
            for info in [*infos(), *foreach_infos()]:
                if of is not None and info.name not in of:
                    continue
                for call in calls_of(info, dtype, seen, most, samples=samples):
                    found[call.op.name()].append(call)
    return {name: _telling_first(calls) for name, calls in sorted(found.items())}


def _telling_first(calls: list[Call]) -> list[Call]:
    telling = [call for call in calls if call.telling]
    others = [call for call in calls if not call.telling]
    by_dtype = {call.origin.split(" as ")[0].split()[-1]: call for call in others}
    return [*telling, *by_dtype.values()] if telling else others


def calls_of(
    info: Any, dtype: torch.dtype, seen: Counter, most: int, each: int = 3, samples: int = MOST_SAMPLES
) -> list[Call]:
    """Calls that this OpInfo's samples make: `each` of an overload here, and `most` of it over all OpInfos."""
    if dtype not in info.supported_dtypes("cpu"):
        return []
    mixed = zlib.crc32(f"{info.formatted_name} {dtype}".encode())
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed)
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    recorder = Recorder(f"{info.formatted_name} {dtype}", seen, most, each)
    kept = []
    with drawn_samples(info, "cpu", dtype, requires_grad=grad) as drawn, contextlib.suppress(*REFUSED):
        kept.extend(itertools.islice(drawn, 4 * samples))
    for sample in kept[:: max(1, len(kept) // samples)]:
        with contextlib.suppress(*REFUSED):
            _run(info, sample, recorder)
    return recorder.found


def _run(info, sample, recorder):
    given = copy.deepcopy(sample.args) if info.name.startswith("_foreach") else sample.args
    with recorder:
        out = info(sample.input, *given, **sample.kwargs)
    outs = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor) and x.requires_grad]
    if outs:
        cotangents = [torch.randn_like(x) for x in outs]
        with recorder:
            torch.autograd.backward(outs, cotangents)
    if info.inplace_variant is None or sample.broadcasts_input:
        return
    with torch.no_grad():
        fresh = (
            sample.input.detach().clone()
            if isinstance(sample.input, Tensor)
            else [x.detach().clone() for x in sample.input]
        )
        with recorder:
            info.inplace_variant(fresh, *sample.args, **sample.kwargs)


class Recorder(TorchDispatchMode):
    def __init__(self, origin: str, seen: Counter, most: int, each: int) -> None:
        super().__init__()
        self.origin, self.seen, self.most, self.each = origin, seen, most, each
        self.found: list[Call] = []
        self._here: Counter = Counter()
        self._signatures: defaultdict = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        call = self._call(func, args, kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            out.fill_(1)
        if call is not None:
            call.telling = tells(out)
            kind = func.name(), call.telling
            if self.seen[kind] < self.most and self._here[kind] < self.each:
                self.found += [call, *variants(call)]
                self.seen[kind] += 1
                self._here[kind] += 1
        return out

    def _call(self, func, args, kwargs):
        name = func.name()
        if func.overloadpacket.__name__.startswith("_foreach_"):
            args = [value[-LIST:] if isinstance(value, list | tuple) else value for value in args]
        if func.namespace != "aten" or self.seen[name, True] >= self.most or self._here[name, True] >= self.each:
            return None
        tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not all(usable(x) for x in tensors) or "generator" in kwargs:
            return None
        signature = repr(
            [(tuple(x.shape), x.dtype, x.stride()) if isinstance(x, Tensor) else x for x in leaves((args, kwargs))]
        )
        if signature in self._signatures[name]:
            return None
        self._signatures[name].add(signature)
        known: dict = {}
        return Call(func, copied(tuple(args), known), copied(kwargs, known), self.origin)


def variants(call: Call) -> list[Call]:
    """The same call in place and with out=, where there are such overloads."""
    found = []
    packet = call.op.overloadpacket
    names = [(a.name, str(a.type)) for a in call.op._schema.arguments]
    in_place = getattr(torch.ops.aten, f"{packet.__name__}_", None)
    for one, wanted in [(in_place, "_"), (packet, "out")] if not packet.__name__.endswith("_") else []:
        for overload in one.overloads() if one is not None else []:
            op = getattr(one, overload)
            given = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
            outs = [a for a in op._schema.arguments if a.is_out]
            if given == names and bool(outs) == (wanted == "out"):
                made = _variant(call, op, outs)
                if made is not None:
                    found.append(made)
    return found


def _variant(call, op, outs):
    known: dict = {}
    args, kwargs = copied(call.args, known), copied(call.kwargs, known)
    if outs:
        known = {}
        try:
            result = call.op(*copied(call.args, known), **copied(call.kwargs, known))
        except REFUSED:
            return None
        results = result if isinstance(result, tuple) and len(outs) > 1 else [result]
        if len(results) != len(outs):
            return None
        for argument, value in zip(outs, results, strict=True):
            kwargs[argument.name] = (
                [torch.zeros_like(x) for x in value] if isinstance(value, list | tuple) else torch.zeros_like(value)
            )
    call = Call(op, args, kwargs, f"{call.origin} as {op.name()}", call.telling)
    try:
        done = op(*copied(args, {}), **copied(kwargs, {}))
    except REFUSED:
        return None
    same = outs or not isinstance(done, Tensor) or done.shape == args[0].shape
    return call if same else None  # addbmm_ gives a smaller tensor another shape


def tells(out: Any) -> bool:
    """Whether there is a value in what an op gave that is neither zero nor NaN, or no tensor to look into."""
    tensors = [x for x in leaves(out) if isinstance(x, Tensor) and usable(x)]
    return not tensors or any(not x._is_zerotensor() and bool(((x != 0) & (x == x)).any()) for x in tensors)


def usable(x: Tensor) -> bool:
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not x.is_quantized
        and x.numel() <= MOST_NUMEL
    )


def copied(value, known):
    if isinstance(value, Tensor):
        if id(value) not in known:
            known[id(value)] = value, value.detach().clone().resolve_conj().resolve_neg()
        return known[id(value)][1]
    if isinstance(value, list | tuple):
        return type(value)([copied(one, known) for one in value])
    if isinstance(value, dict):
        return {name: copied(one, known) for name, one in value.items()}
    return value

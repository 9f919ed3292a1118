"""Calls of every function in the op table of `spmd_types`: from torch's OpInfo samples, and written here for the rest."""

from __future__ import annotations

import functools
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from localtensor._util import drawn_samples
from strategies.inputs import opinfo_samples
from strategies.validation.sources.functions import FunctionCall
from strategies.validation.sources.spmd_types import typed

DTYPES = {torch.float64: 6, torch.int64: 2, torch.bool: 1, torch.complex64: 1, torch.bfloat16: 1}
"""Calls of each function by the dtype of their tensors."""
MOST_DRAWN, MOST_ELEMENTS, MOST_TENSORS = 120, 600, 4
"""OpInfo samples that are looked at; the elements and the tensors of the largest call that is kept."""
SIZES = ((6, 4), (5, 3))
"""Sizes of tensors of the calls that are written here: even shards, and uneven ones."""


@functools.cache
def functions() -> Mapping[str, Callable[..., Any]]:
    """Every function of the op table by its label, `torch.Tensor.__radd__`, in the order of the table."""
    table = typed.registry()
    rest = [*table._DETERMINISTIC_FACTORIES, *table._DETERMINISTIC_NEW_FACTORIES]
    known = dict.fromkeys([*table._OP_REGISTRY, *table._DECOMP_TYPE_RULES])
    found = {_label(function): _plain(function) for function in known}
    return found | {_label(function): function for function in sorted(rest, key=_label)}


@functools.cache
def _names() -> Mapping[int, str]:
    """The names of torch's functions by their identity; aliases have their own objects."""
    found = {id(value): f"torch.{name}" for name, value in vars(torch).items() if callable(value)}
    for name in dir(Tensor):
        value = getattr(Tensor, name)
        found.setdefault(id(value), f"torch.Tensor.{name}")
    return found


def _label(function: Any) -> str:
    owner: Any = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__get__":
        return f"torch.Tensor.{owner.__name__}"
    if id(function) in _names():
        return _names()[id(function)]
    own = getattr(function, "__name__", repr(function))
    # Asked in lockstep, where `torch.tensor` is a function of ours, torch's own has no name above; it is no method for that.
    of_tensor = isinstance(function, (types.MethodDescriptorType, types.WrapperDescriptorType))
    return f"torch.Tensor.{own}" if of_tensor or function is getattr(Tensor, own, None) else f"torch.{own}"


def _plain(function: Any) -> Callable[..., Any]:
    """The function as a caller uses it: a getter takes its tensor alone."""
    owner: Any = getattr(function, "__self__", None)
    if getattr(function, "__name__", "") == "__get__":
        return functools.partial(_get, owner.__name__)
    return function  # type: ignore[no-any-return]


@functools.cache
def getters() -> frozenset[str]:
    """The labels of attributes of a tensor, which are no calls."""
    return frozenset(label for label, function in functions().items() if isinstance(function, functools.partial))


def _get(name: str, x: Tensor) -> Any:
    return getattr(x, name)


def base_name(label: str) -> str:
    """The name of the function without its form: `add` of `torch.Tensor.__radd__` and `torch.Tensor.add_`."""
    own = label.rpartition(".")[2]
    if own.startswith("__") and own.endswith("__"):
        own = own.strip("_")
        own = own[1:] if own[1:] in _DUNDER or own.startswith(("radd", "rsub", "rmul")) else own
        return {"truediv": "div"}.get(own, own)
    return own.rstrip("_")


_DUNDER = ("add", "sub", "mul", "truediv", "matmul")


def calls(names: Sequence[str], seed: int) -> Iterator[FunctionCall]:
    """The calls of each function, of those whose label or base name is among the names if there are any."""
    for label, function in functions().items():
        if names and label not in names and base_name(label) not in names:
            continue
        seen: set[str] = set()
        for dtype, most in DTYPES.items():
            kept = 0
            for args, kwargs, origin in _drawn(label, dtype, seed):
                call = FunctionCall(label, function, args, kwargs, origin)
                key = _key(call)
                if kept == most:
                    break
                if key not in seen and _runs(call):
                    seen.add(key)
                    kept += 1
                    yield call


def _key(call: FunctionCall) -> str:
    shapes = [(tuple(x.shape), x.dtype) for x in call.tensors]
    return (
        f"{shapes} {call.on(call.tensors).kwargs.keys()} {[a for a in call.args if not isinstance(a, (Tensor, list))]}"
    )


def _runs(call: FunctionCall) -> bool:
    tensors = call.tensors
    if not 1 <= len(tensors) <= MOST_TENSORS or sum(x.numel() for x in tensors) > MOST_ELEMENTS:
        return False
    if not any(size >= 2 for x in tensors for size in x.shape):
        return False
    try:
        call.on([x.clone() for x in tensors])()
    except Exception:  # why: OpInfo's arguments of another form of the function; torch raises anything for them
        return False
    return True


def _drawn(label: str, dtype: torch.dtype, seed: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], str]]:
    yield from _written(label, dtype)
    info = _infos().get(base_name(label)) or _infos().get(label.rpartition(".")[2])
    if info is None or dtype not in info.supported_dtypes("cpu"):
        return
    for which in opinfo_samples.SIZES:
        opinfo_samples.seed_all(seed, label, str(dtype), which)
        with opinfo_samples.opinfo_sizes(which), drawn_samples(info, "cpu", dtype, requires_grad=False) as every:
            found = _some(every)
        for number, sample in found:
            first = sample.input
            given = (first, *sample.args)
            if label == "torch.einsum":
                given = (sample.args[0], *sample.input)
            elif label == "torch.block_diag" or (
                label.startswith("torch.Tensor.") and isinstance(first, (list, tuple))
            ):
                given = (*first, *sample.args)
            yield given, dict(sample.kwargs), f"{info.name}[{str(dtype).removeprefix('torch.')},{which}] #{number}"


def _some(every: Iterator[Any]) -> list[tuple[int, Any]]:
    found = []
    try:
        for number, sample in enumerate(every):
            if number == MOST_DRAWN:
                break
            found.append((number, sample))
    except Exception:  # why: OpInfo raises anything for some dtypes and sizes; what came before is kept
        return found
    return found


@functools.cache
def _infos() -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for info in opinfo_samples.database():
        for name in (info.name, *(alias.name for alias in info.aliases or ())):
            found.setdefault(name, info)
    return found


def _written(label: str, dtype: torch.dtype) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], str]]:
    """Calls that OpInfo lacks: matrices and vectors of even and uneven sizes, in place and with `out=`."""
    own = label.rpartition(".")[2]
    for rows, columns in SIZES:
        x, y, square = (
            _tensor(label, dtype, rows, columns),
            _tensor(label, dtype, rows, columns),
            _tensor(label, dtype, rows, rows),
        )
        origin = f"written, {rows} rows"
        if own in (
            "T",
            "mT",
            "H",
            "mH",
            "real",
            "imag",
            "positive",
            "fliplr",
            "flipud",
            "ravel",
            "clone",
            "neg",
            "__pos__",
            "detach",
            "detach_",
        ):
            yield (x,), {}, origin
        if base_name(label) in ("add", "sub", "mul", "div", "multiply", "divide", "subtract", "true_divide", "idiv"):
            yield (x, y), {}, origin
            yield (x, 2), {}, origin
            yield (x, y[0]), {}, origin
            if label.startswith("torch.") and not label.startswith("torch.Tensor."):
                yield (x, y), {"out": torch.zeros_like(x)}, f"{origin}, out="
        if base_name(label) == "matmul" or own in ("mm",):
            yield (x, _tensor(label, dtype, columns, rows)), {}, origin
            yield (square, square), {}, origin
        if own == "broadcast_to":
            yield (x, (2, rows, columns)), {}, origin
            yield (_tensor(label, dtype, 1, columns), (rows, columns)), {}, origin
        if own in ("unflatten",):
            yield (_tensor(label, dtype, 2 * rows, columns), 0, (2, rows)), {}, origin
        if own in ("zeros_like", "ones_like", "new_zeros", "new_ones"):
            yield ((x,) if own.endswith("_like") else (x, (rows, columns))), {}, origin
        if own in ("full_like", "new_full"):
            yield ((x, 3) if own.endswith("_like") else (x, (rows, columns), 3)), {}, origin


def _tensor(label: str, dtype: torch.dtype, *shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(zlib.crc32(f"{label} {shape}".encode()))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=rng).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(1, 9, shape, generator=rng, dtype=dtype)
    return torch.randn(shape, generator=rng, dtype=dtype)

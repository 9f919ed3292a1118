"""Samples, rules and tensors as JSON, and back; and as Python text of a script that needs torch alone.

A tensor is its bytes in base64 beside dtype, shape and strides, so that a case is restored bit for bit.
"""

from __future__ import annotations

import base64
import contextlib
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import BadPlacement, error_in_one_line
from localtensor.layout import StridedShard, is_inexact, max_abs, parse, short
from strategies.model.rule import Call, Leaf, Rule, Sample, leaf_numbers, overload


class NotEncodable(ValueError):
    """A value without a JSON form, such as a generator or a sparse tensor; or JSON that is the form of none."""


NOT_READABLE = (
    AssertionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of torch and Python on JSON that is no form of a value: RecursionError and unknown devices are among them."""
MOST_ELEMENTS = 1 << 24
"""Elements of the storage of a tensor that is read: as many as no case of a sweep has by far."""


@dataclass(frozen=True)
class NamedPlacement(Placement):
    """A placement class private to DTensor, known by name only: it can be printed, and not used to split a tensor."""

    text: str

    def __post_init__(self) -> None:
        Placement.__init__(self)  # torch 2.11's C++ class insists

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedPlacement, (self.text,)  # torch's C++ base class cannot be pickled


_CONSTANTS = {getattr(torch, kind): kind for kind in ("dtype", "device", "layout", "memory_format")}


def value(x: object) -> object:
    """The JSON form of an argument.  Raises `NotEncodable`."""
    if x is None or isinstance(x, (bool, str)) or type(x) is int:
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else {"float": repr(x)}
    if isinstance(x, complex):
        return {"complex": [value(x.real), value(x.imag)]}
    if isinstance(x, Leaf):
        return {"leaf": x.index}
    if isinstance(x, list):
        return [value(v) for v in x]
    if isinstance(x, tuple):
        return {"tuple": [value(v) for v in x]}
    if type(x) in _CONSTANTS:
        return {_CONSTANTS[type(x)]: str(x).removeprefix("torch.")}
    if isinstance(x, Tensor):
        return {"tensor": tensor(x)}
    # Its repr may contain an address, which differs by run.
    raise NotEncodable(f"an argument of type {type(x).__name__}")


def read_value(data: object) -> Any:
    """The argument of that JSON form; the inverse of `value`.  Raises as `read_sample`, before it says which error it is."""
    if isinstance(data, list):
        return [read_value(v) for v in data]
    if not isinstance(data, dict):
        return data
    ((kind, inner),) = data.items()
    if kind == "float":
        return float(inner)
    if kind == "complex":
        return complex(*map(read_value, inner))
    if kind == "leaf":
        return Leaf(operator.index(inner))
    if kind == "tuple":
        return tuple(read_value(v) for v in inner)
    if kind == "tensor":
        return read_tensor(inner)
    return torch.device(inner) if kind == "device" else _constant(kind, inner)


def _constant(kind: str, name: str) -> Any:
    """torch's constant of that kind and name.  Raises `NotEncodable` for any other attribute of torch."""
    found = getattr(torch, name, None)
    if _CONSTANTS.get(type(found)) != kind:
        raise NotEncodable(f"torch has no {kind} called {name!r:.60}")
    return found


def tensor(x: Tensor) -> list[Any]:
    """`[dtype, shape, bytes, strides, device]`, elements in index order; the last two only where they are not the default.

    Raises `NotEncodable`.
    """
    if not _is_dense(x):
        raise NotEncodable(f"a tensor of layout {x.layout}")
    plain = x.detach().cpu().resolve_conj().resolve_neg()
    raw = torch.empty(x.numel(), dtype=x.dtype, device="cpu").copy_(plain.reshape(-1))
    data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
    made: list[Any] = [str(x.dtype).removeprefix("torch."), list(x.shape), base64.b64encode(data).decode()]
    contiguous = x.stride() == torch.empty(x.shape, device="meta").stride()
    if x.device.type != "cpu":
        return [*made, None if contiguous else list(x.stride()), str(x.device)]
    return made if contiguous else [*made, list(x.stride())]


def _is_dense(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_quantized


def read_tensor(data: Sequence[Any]) -> Tensor:
    """The tensor of that JSON form, with its strides; the inverse of `tensor`.  Expanded tensors are expanded again."""
    name, shape, text, strides, device = (*data, None, None)[:5]
    made = _read_on_cpu(name, shape, text, strides)
    if device is None:
        return made
    there = torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device=device)
    return there.copy_(made) if 0 not in made.stride() else made.to(device)


def _read_on_cpu(name: str, shape: Sequence[int], data: str, strides: Sequence[int] | None) -> Tensor:
    dtype = _constant("dtype", name)
    raw = base64.b64decode(data)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    whole = flat.reshape(shape)
    if strides is None:
        return whole
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if whole.numel() and reach > MOST_ELEMENTS:
        raise NotEncodable(f"a tensor of {reach} elements")
    made = torch.empty_strided(shape, strides, dtype=dtype)
    if any(step == 0 and size > 1 for step, size in zip(strides, shape, strict=True)):
        seen = tuple(slice(0, 1) if step == 0 else slice(None) for step in strides)
        made[seen].copy_(whole[seen])
        return made
    return made.copy_(whole)


def sample(x: Sample) -> dict[str, Any]:
    """The JSON form of a sample with its tensors.  Raises `NotEncodable`."""
    _check_opens_no_file(x.call.op)
    call = [value(list(x.call.args)), [[name, value(v)] for name, v in x.call.kwargs]]
    return {"op": x.call.op, "call": call, "tensors": [tensor(t) for t in x.tensors], "origin": x.origin}


def is_encodable(x: Sample) -> bool:
    """Whether the sample has a JSON form."""
    try:
        _check_opens_no_file(x.call.op)
        value([list(x.call.args), [list(pair) for pair in x.call.kwargs]])
    except NotEncodable:
        return False
    return all(map(_is_dense, x.tensors))


def read_sample(data: dict[str, Any]) -> Sample:
    """The sample of that JSON form; the inverse of `sample`.  Raises `NotEncodable` for any other JSON."""
    try:
        args, kwargs = data["call"]
        named = tuple((_text(name), read_value(v)) for name, v in kwargs)
        _check_opens_no_file(_op_name(data["op"]))
        call = Call(data["op"], tuple(read_value(args)), named)
        tensors = tuple(map(read_tensor, data["tensors"]))
        if any(leaf not in range(len(tensors)) for leaf in leaf_numbers([call.args, [v for _, v in named]])):
            raise NotEncodable("a leaf without a tensor")
        return Sample(call, tensors, _text(data["origin"]))
    except NOT_READABLE as error:
        raise NotEncodable(f"no sample ({error_in_one_line(error, 90)})") from None


def _op_name(name: Any) -> str:
    """The name of an overload, which is no path and no code.  Raises `NotEncodable`."""
    if not isinstance(name, str) or not re.fullmatch(r"\w+\.\w+\.\w+", name):
        raise NotEncodable(f"{name!r:.60} names no overload")
    return name


def _check_opens_no_file(op: str) -> None:
    """Raises `NotEncodable` for an op such as `aten.from_file`, which makes a file: a sample is data, and is run.

    Of an op that is not registered here nothing is known, and it cannot be run.
    """
    with contextlib.suppress(AttributeError):
        if any(argument.name == "filename" for argument in overload(op)._schema.arguments):
            raise NotEncodable(f"{op} opens a file")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise NotEncodable(f"{value!r:.60} is no text")
    return value


def rule(x: Rule) -> list[Any]:
    """`[op, inputs, outputs]` with placements in short form."""
    return [x.op, [short(p) for p in x.inputs], [short(p) for p in x.outputs]]


def read_rule(data: Sequence[Any]) -> Rule:
    """The rule of that JSON form; the inverse of `rule`.  DTensor's private placements become `NamedPlacement`.

    Raises `NotEncodable` for what names no overload, TypeError or ValueError for data of another form.
    """
    op, inputs, outputs = data
    return Rule(_op_name(op), tuple(map(read_placement, inputs)), tuple(map(read_placement, outputs)))


def read_placement(text: str) -> Placement | None:
    """The placement of that short form; None for "-"."""
    text = _text(text)
    if text == "-":
        return None
    try:
        return parse(text)
    except BadPlacement:
        return NamedPlacement(text)


FLATTEN_FUNCTION = '''def flat(out):
    """All results of an op, in one list; none of an op that returns nothing."""
    if isinstance(out, (tuple, list)):
        return [leaf for item in out for leaf in ([item] if item is None else flat(item))]
    return [] if out is None else [out]
'''
"""The function of a script that flattens the results of an op."""
COMPARISON_FUNCTION = '''def differs(got, want, atol):
    """Whether DTensor's result differs from the right one, in a rank's piece or as a whole.  It prints both; all ranks call it."""
    rank, placements = dist.get_rank(), getattr(got, "placements", None)
    if placements is not None:
        print(f"rank {rank} placements {placements}", flush=True)
    if isinstance(got, DTensor) and isinstance(want, torch.Tensor):
        layout, apart = [Replicate() if p.is_partial() else p for p in placements], got.shape != want.shape
        if apart:
            print(f"rank {rank}: DTensor says shape {tuple(got.shape)}, right is {tuple(want.shape)}", flush=True)
        if all(type(p) is Replicate or (type(p) is Shard and p.dim < want.ndim) for p in layout):
            held, right = got.to_local(), distribute_tensor(want, got.device_mesh, layout, src_data_rank=None).to_local()
            if held.shape != right.shape:
                apart = True
                print(f"rank {rank} holds shape {tuple(held.shape)}, its piece of {tuple(want.shape)} has {tuple(right.shape)}", flush=True)
        wrong_pieces = torch.tensor([float(apart)])
        dist.all_reduce(wrong_pieces)
        if wrong_pieces.item():
            print(f"rank {rank} WRONG", flush=True)
            return True
        try:
            got = got.full_tensor()
        except RuntimeError as error:  # gloo has no averages, for one: a partial value that it cannot add up is not wrong
            if any(p.is_partial() for p in placements):
                raise
            print(f"rank {rank} WRONG: the result cannot be gathered: {error}", flush=True)
            return True
    if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        same = (got.shape, got.dtype) == (want.shape, want.dtype) and torch.allclose(got, want, rtol=0.0, atol=atol, equal_nan=True)
        want, got = want.tolist(), got.tolist()
    else:
        same = type(got) is type(want) and (got == want or got != got and want != want)
    print(f"rank {rank} got  {got}\\nrank {rank} want {want}\\nrank {rank} {'right' if same else 'WRONG'}", flush=True)
    return not same
'''
"""The function of a script that compares a result of DTensor with the right one, as `Confirmation` does."""
END_CODE = """\
dist.barrier()
dist.destroy_process_group()
sys.exit(1 if wrong else 0)
"""
"""The end of a script, which sets the exit code."""


_NO_SOURCE = re.compile("[\0-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Characters that no source file of Python has: controls, and halves of surrogate pairs."""


def docstring_text(text: str) -> str:
    r"""The text as a part of a docstring, which it does not end: a title or a reason comes from a journal, and may be any text.

    >>> print(docstring_text("".join(["a", chr(34) * 3, "b", chr(92), chr(0)])))
    a\"\"\"b\\\u0000
    """
    quoted = text.replace("\\", "\\\\").replace('"' * 3, '\\"' * 3)
    return _NO_SOURCE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)


def docstring_code(shown: str, wrong: str, ranks: int, name: str, prints: str) -> str:
    """The docstring of a script: its subject, what is wrong with it in this torch, and how to run it."""
    return f'''"""{docstring_text(shown)}

DTensor in torch {torch.__version__.split("+")[0]}{docstring_text(wrong)}

Run:  torchrun --nproc-per-node {ranks} {name}
It prints {prints}
"""'''


def tensor_literal(x: Tensor) -> str:
    """Python text of a bitwise equal tensor, with the strides of a dense layout."""
    if x.is_complex():  # the repr of a Python complex number loses the sign of a zero, and nan
        return f"torch.complex({tensor_literal(x.detach().real.clone())}, {tensor_literal(x.detach().imag.clone())})"
    made = f"torch.tensor({x.detach().cpu().tolist()!r}, dtype={x.dtype})"
    if x.numel() == 0:
        made = f"torch.empty({tuple(x.shape)}, dtype={x.dtype})"
    if not x.is_contiguous():
        made = f"torch.empty_strided({tuple(x.shape)}, {tuple(x.stride())}, dtype={x.dtype}).copy_({made})"
    return made


def slack_text(want: object, slack: Tensor | None) -> str:
    """The tolerance as text: the largest finite slack, and at least 1e-9 of the result's scale; unstable elements are ignored."""
    finite = [v for v in slack.flatten().tolist() if math.isfinite(v)] if isinstance(slack, Tensor) else []
    size = float(max_abs(want)) if isinstance(want, Tensor) and is_inexact(want) else 0.0
    return f"{max([*finite, 1e-9 * size]):.3g}"


def placement_code(placement: Placement) -> str:
    """Python text of the placement, for a follower and for a script."""
    if isinstance(placement, StridedShard):
        return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
    if isinstance(placement, Partial):
        return f"Partial({placement.reduce_op!r})"
    return f"Shard({placement.dim})" if isinstance(placement, Shard) else "Replicate()"


def placements_code(placements: Sequence[Placement]) -> str:
    """Python text of a list of these placements.

    >>> from torch.distributed.tensor import Partial, Shard
    >>> placements_code([Shard(1), Partial("max")])
    "[Shard(1), Partial('max')]"
    """
    return f"[{', '.join(map(placement_code, placements))}]"


def flatten_code(names: Sequence[str], every: Sequence[str]) -> str:
    """Python text that flattens these axes of `mesh`, whose axes are `every`."""
    part = "mesh" if tuple(names) == tuple(every) else f"mesh[{tuple(names)!r}]"
    return f'{part}._flatten("{"_".join(names)}")\n'

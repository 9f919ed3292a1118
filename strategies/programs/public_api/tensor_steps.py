"""Uses of the public calls which make, convert and move tensors: one generator for each public name.

A generator takes the number of mesh axes and yields steps.  They differ in layouts, flags and dtypes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import PARTIAL_KINDS, Layout
from strategies.model.codec import placement_code, placements_code

R, S0, S1, LAST, SUM = Replicate(), Shard(0), Shard(1), Shard(-1), Partial("sum")
FLOATS, NUMBERS, MATRICES, ROWS, SEQUENCES = "floats", "numbers", "matrices", "rows", "sequences"
EVEN_SEQUENCES, INDICES, LOGITS = "even sequences", "indices", "logits"
IMAGES, FEW_CLASSES, EVEN = "images", "few classes", "even"
"""The kinds of tensors that a step takes: of floats; of any numbers; two dims that all ranks cut evenly; two dims; three
dims; three that all ranks cut evenly; rows of a table; classes along dim 1; of images, too; fewer of
them than most meshes have ranks; and floats that all ranks cut evenly."""


def any_layout(x: Tensor, layout: Layout) -> bool:
    """Whether a step takes a tensor in this layout: any."""
    return True


@dataclass(frozen=True, slots=True)
class PublicStep:
    """`call` as a user writes it, and the expression `code` of the tensor `x` that makes it.

    `takes` is the kind of tensor, `layouts` are those that x must be able to have besides its own, and `fits` says whether x
    may come in a layout.  Steps of all `group`s of a name are tried on each mesh; faults of unlike `aspect`s are not one.
    """

    call: str
    code: str
    takes: str = FLOATS
    layouts: tuple[Layout, ...] = ()
    fits: Callable[[Tensor, Layout], bool] = any_layout
    group: str = ""
    aspect: str = ""


def layouts_on(axes: int, placements: Sequence[Placement]) -> list[Layout]:
    """All layouts on a mesh of so many axes, of these placements."""
    return list(itertools.product(placements, repeat=axes))


def option_text(name: str, value: object) -> str:
    """Python text of an argument by keyword: `grad_placements=[Shard(0)]`."""
    if isinstance(value, Placement):
        return f"{name}={placement_code(value)}"
    if isinstance(value, (list, tuple)) and value and all(isinstance(p, Placement) for p in value):
        return f"{name}={placements_code(value)}"
    return f"{name}={value}"


def options_text(**options: object) -> str:
    """Python text of the arguments that are not None: `async_op=True, placements=[Shard(0)]`."""
    return ", ".join(option_text(name, value) for name, value in options.items() if value is not None)


def call_text(function: str, *first: str, **options: object) -> str:
    """Python text of a call: `distribute_tensor(x, mesh, placements=[Shard(0)])`."""
    return f"{function}({', '.join(text for text in (*first, options_text(**options)) if text)})"


def combined(**choices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Each combination of the choices, by name."""
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


MOVES = (R, S0, S1)
"""The placements to which a tensor is moved."""


def distribute_tensor(axes: int) -> Iterator[PublicStep]:
    for layout in [None, *layouts_on(axes, (*MOVES, LAST))]:
        for source in ({}, {"src_data_rank": "None"}):
            call = call_text("distribute_tensor", "x", "mesh", placements=layout, **source)
            code = call_text("distributed", "x", placements_code(layout) if layout else "None", **source)
            yield PublicStep(call, code, NUMBERS, _named(layout))


def _named(*layouts: Sequence[Placement] | None) -> tuple[Layout, ...]:
    """The layouts that a tensor must be able to have; a dim that is counted from the back it always has."""
    return tuple(
        tuple(R if p == LAST else p for p in layout) for layout in layouts if layout is not None
    )  # fmt: skip


def from_local(axes: int) -> Iterator[PublicStep]:
    call = "DTensor.from_local of a pending reduction, then the gradient of its pieces"
    yield PublicStep(call, "reduced_pieces(x)", FLOATS, (), _of_one_reduction, "a reduction")
    for one in combined(
        grad_placements=[None, *layouts_on(axes, (R, S0, S1, SUM))],
        run_check=[None, True],
        sized=[None, True],
        coming=[None, (S0,) * axes, (SUM,) * axes],
    ):
        size = ("shape=x.shape, stride=x.stride()",) if one["sized"] else ()
        own = {name: one[name] for name in ("grad_placements", "run_check")}
        call = _with_gradient(call_text("DTensor.from_local", *size, **own), one["coming"])
        code = call_text("from_local", "x", sized=one["sized"], coming=one["coming"], **own)
        fits = functools.partial(_fits_pieces, one["grad_placements"])
        yield PublicStep(call, code, FLOATS if one["grad_placements"] else NUMBERS, _named(one["coming"]), fits)


def _fits_pieces(grad_placements: Layout | None, x: Tensor, layout: Layout) -> bool:
    """`_fits_gradient` for `from_local`, without averages, maxima and products: `reduced_pieces` tests the gradient of their pieces."""
    return _fits_gradient(grad_placements, x, layout) and not any(p.is_partial() and p != SUM for p in layout)


def _fits_gradient(grad_placements: Layout | None, x: Tensor, layout: Layout) -> bool:
    """Whether the gradient of a piece in this layout may have these placements: it has the shape of the piece."""
    pairs = zip(grad_placements or (), layout, strict=False)
    return all(g == p if isinstance(p, Shard) else not isinstance(g, Shard) for g, p in pairs)


def _of_one_reduction(x: Tensor, layout: Layout) -> bool:
    return sum(isinstance(p, Partial) for p in layout) == 1


def _with_gradient(call: str, coming: Layout | None) -> str:
    return call if coming is None else f"{call}, then its gradient in {placements_code(coming)}"


def to_local(axes: int) -> Iterator[PublicStep]:
    for grad_placements in [None, *layouts_on(axes, (R, S0, S1, SUM))]:
        given = {"grad_placements": grad_placements}
        fits = functools.partial(_fits_gradient, grad_placements)
        call = call_text("DTensor.to_local", **given)
        yield PublicStep(call, call_text("to_local", "x", **given), FLOATS if grad_placements else NUMBERS, (), fits)


def full_tensor(axes: int) -> Iterator[PublicStep]:
    for grad_placements in [None, *layouts_on(axes, (R, SUM))]:
        given = {"grad_placements": grad_placements}
        call = call_text("DTensor.full_tensor", **given)
        yield PublicStep(call, call_text("full_tensor", "x", **given), FLOATS if grad_placements else NUMBERS)


def redistribute(axes: int) -> Iterator[PublicStep]:
    known = inspect.signature(DTensor.redistribute).parameters
    dtypes = [
        {},
        {"forward_dtype": "torch.float64"},
        {"forward_dtype": "torch.float64", "backward_dtype": "torch.float32"},
    ]
    dtypes += [{"backward_dtype": "torch.float64"}]
    for layout in layouts_on(axes, (*MOVES, LAST)):
        for one in combined(coming=[None, (S0,) * axes, (SUM,) * axes], async_op=[None, True], dtypes=dtypes):
            options = {"async_op": one["async_op"], **one["dtypes"]}
            if set(options) - set(known):
                continue
            call = _with_gradient(call_text("DTensor.redistribute", placements=layout, **options), one["coming"])
            code = call_text("redistributed", "x", placements_code(layout), coming=one["coming"], **options)
            yield PublicStep(call, code, FLOATS, _named(layout, one["coming"]))


_OTHER_MESHES = {
    "DeviceMesh(device, mesh.mesh.flip(0))": "lambda mesh: DeviceMesh(mesh.device_type, mesh.mesh.flip(0))",
    "DeviceMesh(device, mesh.mesh.roll(1, -1))": "lambda mesh: DeviceMesh(mesh.device_type, mesh.mesh.roll(1, -1))",
    "DeviceMesh(device, mesh.mesh.T)": "lambda mesh: DeviceMesh(mesh.device_type, mesh.mesh.T.contiguous())",
}
_NAMED_MESHES = {
    "init_device_mesh(device, (1, *mesh.shape))[...]": "lambda mesh: sliced(mesh, (1, *mesh.shape), 1)",
    "init_device_mesh(device, (*mesh.shape, 1))[...]": "lambda mesh: sliced(mesh, (*mesh.shape, 1), 0)",
}
"""Meshes of the ranks of a mesh in another order, and slices of one with an axis more: what makes them, by what users write."""


def another_mesh(meshes: dict[str, str], axes: int) -> Iterator[PublicStep]:
    """Tensors cut and moved on a mesh of the same ranks that is made anew."""
    for layout in layouts_on(axes, MOVES):
        for text, make in meshes.items():
            if axes > 1 or not text.endswith(".T)"):
                call = f"{text}, then distribute_tensor and redistribute to {placements_code(layout)}"
                yield PublicStep(
                    call, f"on_another_mesh(x, {make}, {placements_code(layout)})", NUMBERS, _named(layout)
                )


def factory(name: str, axes: int) -> Iterator[PublicStep]:
    """Uses of `zeros`, `ones`, `empty` or `full`."""
    values = ("2.0",) if name == "full" else ()
    for layout in [None, *layouts_on(axes, MOVES)]:
        listed = placements_code(layout) if layout else "None"
        for dtype in (None, "torch.float64", "torch.int64", "torch.bool"):
            call = call_text(name, "x.shape", *values, dtype=dtype, device_mesh="mesh", placements=layout)
            code = call_text("created", "x", repr(name), listed, *values, dtype=dtype)
            yield PublicStep(call, code, NUMBERS, _named(layout))
        grad = {"requires_grad": True, "layout": "torch.strided"}
        call = call_text(name, "x.shape", *values, device_mesh="mesh", placements=layout, **grad)
        yield PublicStep(call, call_text("created", "x", repr(name), listed, *values, **grad), NUMBERS, _named(layout))


def random_factory(name: str, axes: int) -> Iterator[PublicStep]:
    """Uses of `rand` or `randn`."""
    for layout in layouts_on(axes, MOVES):
        call = call_text(name, "x.shape", dtype="torch.float64", device_mesh="mesh", placements=layout)
        yield PublicStep(
            call, call_text("drawn_at_random", "x", repr(name), placements_code(layout)), NUMBERS, _named(layout)
        )


def placement(which: type[Placement], axes: int) -> Iterator[PublicStep]:
    """Tensors held in layouts with placements of this class."""
    every: list[Placement] = [R, S0, S1, LAST, *map(Partial, PARTIAL_KINDS)]
    kinds = [p for p in every if isinstance(p, which)]
    for layout in layouts_on(axes, tuple(dict.fromkeys((*kinds, R, S0)))):
        partial = {p for p in layout if isinstance(p, Partial)}
        if set(kinds) & set(layout) and len(partial) <= 1:
            yield PublicStep(placements_code(layout), f"held(x, {placements_code(layout)})", NUMBERS, _named(layout))


_MAPPED = {"a * 2 + 1": "lambda a: a * 2 + 1", "a.exp()": "lambda a: a.exp()"}
_SUMMED = {R: R, S0: SUM, S1: S0}
"""Where a sum over dim 0 leaves each placement."""
_PRODUCT = {(R, R): (R, R, R), (S0, R): (S0, S0, SUM), (R, S1): (S1, SUM, S1), (S1, S0): (SUM, S1, S0)}
"""For the placements of the operands of a matrix product those of its result and of the gradients of the operands."""


def _maps_to_partial(axes: int) -> Iterator[PublicStep]:
    """`local_map` of functions whose results are parts of a reduction."""
    for function, kind in (("sum", "sum"), ("mean", "avg"), ("amax", "max"), ("amin", "min")):
        out, taken = f"[{', '.join([f'Partial({kind!r})', *['Replicate()'] * (axes - 1)])}]", [S0, *[R] * (axes - 1)]
        call = f"local_map(a.{function}(0), out_placements={out}, in_placements=({placements_code(taken)},)), then its gradient"
        yield PublicStep(
            call, f"mapped_to_partial(x, lambda a: a.{function}(0), {kind!r})", EVEN, (tuple(taken),), group=kind
        )


def local_map(axes: int) -> Iterator[PublicStep]:
    yield from _maps_to_partial(axes)
    for layout in layouts_on(axes, MOVES):
        for text, function in _MAPPED.items():
            yield _mapped(text, function, "[]", [layout], layout)
            yield _mapped(text, function, "[]", [layout], layout, device_mesh=True)
        yield _mapped("a * k", "lambda a, k: a * k", "[3]", [layout, None], layout)
        yield _mapped("a.sum(0)", "lambda a: a.sum(0)", "[]", [layout], tuple(_SUMMED[p] for p in layout))
    for pairs in layouts_on(axes, tuple(_PRODUCT)):  # type: ignore[arg-type]
        left, right = ([pair[i] for pair in pairs] for i in range(2))  # type: ignore[index]
        out, *gradients = ([_PRODUCT[pair][i] for pair in pairs] for i in range(3))  # type: ignore[index]
        if len({p for p in out if isinstance(p, Shard)}) < sum(isinstance(p, Shard) for p in out):
            continue  # a dim that is cut twice: the two operands would be cut in the same way, which is drawn above
        other = f"[on_mesh(eighths((x.shape[1], 12), x), x, {placements_code(right)})]"
        hint = gradients if [left, right] != gradients else None
        yield _mapped("a @ b", "lambda a, b: a @ b", other, [left, right], out, in_grad_placements=hint)


def _mapped(
    text: str, function: str, others: str, takes: Sequence[Sequence[Placement] | None], gives: Sequence[Placement],
    in_grad_placements: Sequence[Sequence[Placement]] | None = None, device_mesh: bool = False,
) -> PublicStep:  # fmt: skip
    options = {
        "out_placements": list(gives),
        "in_placements": f"({', '.join(placements_code(p) if p else 'None' for p in takes)},)",
        "in_grad_placements": in_grad_placements and f"({', '.join(map(placements_code, in_grad_placements))},)",
    }
    more = {"device_mesh": "getattr(x, 'device_mesh', None)"} if device_mesh else {}
    call = call_text("local_map", text, **options, **({"device_mesh": "mesh"} if device_mesh else {}))
    return PublicStep(call, call_text("mapped", "x", function, f"lambda x: {others}", **options, **more), MATRICES)


_EACH = "*(([Shard(d - {gone})], [Shard(d)] * 2) for d in range({gone}, x.ndim))"
_REGISTERED = {
    "scaled": ("x * 2 + y", f"[([Replicate()], [Replicate()] * 2), {_EACH.format(gone=0)}]"),
    "difference": (
        "x - y",
        f"[([Replicate()], [Replicate()] * 2), ([Partial('sum')], [Partial('sum')] * 2), {_EACH.format(gone=0)}]",
    ),
    "overlap": (
        "(x * y).sum(0)",
        f"[([Replicate()], [Replicate()] * 2), ([Partial('sum')], [Shard(0)] * 2), {_EACH.format(gone=1)}]",
    ),
}
"""Ops of our own by name: what each computes, and its rules for a number of dims."""


def register_sharding(axes: int) -> Iterator[PublicStep]:
    for name, (function, rules) in _REGISTERED.items():
        given = f"{name!r}, '(Tensor x, Tensor y) -> Tensor', lambda x, y: {function}, lambda x, y: {rules}"
        yield PublicStep(f"register_sharding of {function}", f"registered(x, {given})")


_MIXED = (
    "a * b",
    "b - a",
    "a @ b",
    "torch.where(a > b, a, b)",
    "F.layer_norm(a, b.shape, b, b)",
    "F.linear(a, b[None])",
)
"""Expressions of a DTensor `a` and a plain tensor `b` of its last dim."""


def implicit_replication(axes: int) -> Iterator[PublicStep]:
    for text in _MIXED:
        call = f"implicit_replication(), then {text}"
        yield PublicStep(call, f"replicated_implicitly(x, lambda a, b: {text})", ROWS)
    yield PublicStep(
        "an exception within implicit_replication()",
        "after_an_error(x, experimental.implicit_replication, lambda a: a * 2)",
    )


Generator = Callable[[int], Iterator[PublicStep]]
"""From the number of mesh axes to steps."""
TENSOR_STEPS: dict[str, Generator] = {
    "tensor.distribute_tensor": distribute_tensor,
    "DTensor.from_local": from_local,
    "DTensor.to_local": to_local,
    "DTensor.redistribute": redistribute,
    "DTensor.full_tensor": full_tensor,
    **{f"tensor.{name}": functools.partial(factory, name) for name in ("zeros", "ones", "empty", "full")},
    **{f"tensor.{name}": functools.partial(random_factory, name) for name in ("rand", "randn")},
    **{f"tensor.{one.__name__}": functools.partial(placement, one) for one in (Replicate, Shard, Partial)},
    "device_mesh.DeviceMesh": functools.partial(another_mesh, _OTHER_MESHES),
    "device_mesh.init_device_mesh": functools.partial(another_mesh, _NAMED_MESHES),
    "experimental.local_map": local_map,
    "experimental.register_sharding": register_sharding,
    "experimental.implicit_replication": implicit_replication,
}

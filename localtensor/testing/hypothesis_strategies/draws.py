"""Hypothesis strategies for distributed programs: meshes, placements, specs, tensors, sharded values, op calls, schedules.

    >>> from hypothesis import given
    >>> from localtensor.testing import draws
    >>> @given(draws.sharded(kinds=("R", "S")))
    ... def test_doubling_works_shard_by_shard(x):
    ...     doubled = draws.assemble([piece * 2 for piece in x.pieces], x.spec)
    ...     assert torch.equal(doubled, x.whole * 2)
    >>> test_doubling_works_shard_by_shard()

A drawn value is frozen, with a short repr that can be executed, or a plain tensor.  Tensors are drawn as shape, seed
and pattern, never element by element.  Except for "rough" values, sums over up to eight ranks are exact in every dtype
and every order, so that a property can compare with `torch.equal`.

Counterexamples shrink to

1. fewer ranks, then fewer axes,
2. `Replicate()`, then shards of the first dims, then partial values, then strided shards,
3. fewer dims, then smaller ones, down to 1; a dim of size 0 is left only where the failure needs it,
4. simpler values: the first dtype (float32), the first pattern (zeros, ones, arange ...), the smallest seed,
5. the first op and its first sample; the schedule `round_robin`.

Arguments are checked when a strategy is made: each strategy raises `BadDraw` for invalid ones.  `dtype` is a dtype or
None for any of `DTYPES`, `shape` a tuple of sizes or None for any, `kinds` a tuple out of `KINDS`: "R" (replicate),
"S" (shard), "SS" (strided shard), "P" (partial, of any of five reductions), or one of them, as in "P(sum)".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import Layout, assemble
from localtensor.layout.spec import Spec
from localtensor.testing.hypothesis_strategies import search, values
from localtensor.testing.hypothesis_strategies.layouts import AXES, Sharded, placement_options, read_spec, spec_text
from localtensor.testing.hypothesis_strategies.op_calls import OpCall
from localtensor.testing.hypothesis_strategies.values import DTYPES, KINDS, PATTERNS, USUAL, BadDraw, Drawn, no_gradient

__all__ = [
    "DTYPES", "KINDS", "PATTERNS", "PLAIN", "USUAL", "BadDraw", "Drawn", "Layout", "OpCall", "Sharded", "assemble",
    "drawn", "layouts", "meshes", "op_calls", "placements", "read_spec", "schedules", "shapes",
    "sharded", "spec_text", "specs", "tensor_of", "tensors",
]  # fmt: skip
PLAIN = ("R", "S", "P")
"""The kinds of placement that are drawn by default; "SS", which few ops support, is drawn on request only."""


def meshes(
    max_ranks: int = 8,
    max_axes: int = 3,
    min_ranks: int = 1,
    *,
    min_axes: int = 1,
    names: Sequence[str] | None = None,
) -> st.SearchStrategy[Mesh]:
    """A `Mesh` with these numbers of ranks and axes; axes are called a, b, c ... or by `names`.

    Axes of one rank are among them.  It shrinks to fewer ranks, then to fewer axes.

    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: mesh.ranks >= 3), find(meshes(min_axes=2), lambda mesh: min(mesh.sizes) > 1)
    (Mesh(a=3), Mesh(a=2, b=2))
    """
    requested = _meshes("meshes", (min_ranks, max_ranks), (min_axes, max_axes), names)
    return st.composite(requested.mesh)()


def placements(
    ndim: int, *, kinds: Sequence[str] = PLAIN, dtype: torch.dtype | None = None
) -> st.SearchStrategy[Placement]:
    """One placement, for one axis, of a tensor of `ndim` dims.

    With a dtype, only placements that are defined for it: no minimum of complex numbers, no average of integers.  It
    shrinks to `Replicate()`.  Raises `BadDraw` also where no placement is left, as for shards of a scalar.

    >>> from torch.distributed.tensor import Partial
    >>> from hypothesis import find
    >>> find(placements(2), lambda placement: isinstance(placement, Partial))
    Partial(sum)
    """
    values.check_count("placements", "ndim", ndim, 0)
    values.check_dtype("placements", dtype)
    return search.one_of(_left("placements", ndim, dtype, _kinds("placements", kinds)))


def layouts(
    mesh: Mesh, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, kinds: Sequence[str] = PLAIN
) -> st.SearchStrategy[Layout]:
    """A placement for each axis of the mesh, which together are valid for a tensor of that shape and dtype.

    Of different kinds, only sum and avg are partial at once.  With "SS" in `kinds`, a dim that several axes cut is
    also cut in other orders than from left to right, as FSDP over tensor parallelism does; where torch has two
    readings of a strided shard, because pieces are uneven, it becomes a plain one.

    >>> from hypothesis import find
    >>> find(layouts(Mesh.of(2, 2), (8,), kinds=("R", "S", "SS")), lambda layout: "strided" in repr(layout).lower())
    (Replicate(), _StridedShard(dim=0, sf=2))
    """
    values.check_mesh("layouts", mesh)
    values.check_shape("layouts", shape)
    values.check_dtypes("layouts", (dtype,))
    wanted, of = _kinds("layouts", kinds), tuple(shape)
    _left("layouts", len(of), dtype, wanted)
    return search.layouts(mesh, of, dtype, wanted)


def shapes(max_dims: int = 3, max_size: int = 8, *, min_dims: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """The shape of a tensor: scalars, dims of one element and empty ones are among them.

    It shrinks to fewer dims, then to smaller ones, down to 1; an empty dim is the last choice.

    >>> from hypothesis import find
    >>> find(shapes(), lambda shape: len(shape) == 2 and shape[1] > 2), find(shapes(), lambda shape: 0 in shape)
    ((1, 3), (0,))
    """
    requested = _shapes("shapes", None, (min_dims, max_dims), max_size)

    @st.composite
    def drawn(draw: search.Draw) -> tuple[int, ...]:
        return requested.of(draw, requested.ndim(draw))

    return drawn()


def specs(
    mesh: Mesh | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    *,
    kinds: Sequence[str] = PLAIN,
    orders: bool = False,
    dtypes: Sequence[torch.dtype] = DTYPES,
    max_ranks: int = 8,
    min_ranks: int = 1,
    max_axes: int = 3,
    min_dims: int = 0,
    max_dims: int = 3,
    max_size: int = 8,
) -> st.SearchStrategy[Spec]:
    """A `Spec`: a mesh, placements, a shape and a dtype.  Given arguments are not drawn.

    Uneven and empty shards are among them, dims of one element and none, scalars, and several axes that cut the same
    dim.  The layouts are those of `layouts`.  With `orders`, such axes also cut in another order than from left to
    right, `spec.shard_order`; this finds code that reads placements alone.

    >>> from hypothesis import find
    >>> spec = find(specs(Mesh.of(dp=2), kinds=("S",)), lambda spec: spec.shape[0] > 2)
    >>> spec, spec_text(spec)
    (f32[3] @ dp:S(0), 'f32[3] @ dp=2:S(0)')
    >>> spec_text(find(specs(orders=True), lambda spec: spec.shard_order and min(spec.mesh.sizes) > 1))
    'f32[1] @ a=2:S(0)[1], b=2:S(0)[0]'
    """
    some = (dtype,) if dtype is not None else dtypes
    ranks, dims = (min_ranks, max_ranks), (min_dims, max_dims)
    requested = _specs("specs", mesh, shape, some, kinds, ranks, max_axes, dims, max_size)
    requested = replace(requested, orders=orders)
    return st.composite(requested.spec)()


def drawn(
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    *,
    patterns: Sequence[str] = USUAL,
    dtypes: Sequence[torch.dtype] = DTYPES,
    requires_grad: bool = False,
    min_dims: int = 0,
    max_dims: int = 3,
    max_size: int = 8,
) -> st.SearchStrategy[Drawn]:
    """A tensor as `Drawn(shape, dtype, pattern, seed)`, for a test that makes it several times; see `tensors`.

    >>> from hypothesis import find
    >>> find(drawn(dtype=torch.int64), lambda x: bool((x.tensor() > 0).any()))
    Drawn((), torch.int64, 'ones', 0)
    """
    of = _shapes("drawn", shape, (min_dims, max_dims), max_size)
    wanted = (dtype,) if dtype is not None else tuple(dtypes)
    values.check_dtypes("drawn", wanted)
    values.check_names("drawn", "patterns", patterns, tuple(PATTERNS))
    if requires_grad:
        wanted = tuple(d for d in wanted if d.is_floating_point or d.is_complex) or no_gradient("drawn", wanted[0])
    names = tuple(patterns)

    @st.composite
    def made(draw: search.Draw) -> Drawn:
        size = of.of(draw, of.ndim(draw))
        kind, pattern, seed = draw(search.one_of(wanted)), draw(search.one_of(names)), draw(search.SEEDS)
        return Drawn(size, kind, pattern, seed, requires_grad)

    return made()


def tensors(
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    *,
    patterns: Sequence[str] = USUAL,
    dtypes: Sequence[torch.dtype] = DTYPES,
    requires_grad: bool = False,
    min_dims: int = 0,
    max_dims: int = 3,
    max_size: int = 8,
) -> st.SearchStrategy[Tensor]:
    """A tensor on the CPU, fresh each time.  In a failing example a small one is shown as torch shows it, and a
    larger one as `tensor_of(Drawn(...))`, which makes it again.

    | pattern                         | values                                                                      |
    |---------------------------------|-----------------------------------------------------------------------------|
    | zeros, ones                     | one value                                                                   |
    | arange                          | 0, 1, 2 ... row by row; again from 0 where the dtype has few digits         |
    | small, alternating, ties        | integers up to 4; with the sign changing from place to place; two values    |
    | normal                          | normally distributed, rounded so that sums are exact                        |
    | one_big                         | small, and one element that is much larger                                  |
    | extremes                        | the ends of the dtype, the least number that is not zero, small ones        |
    | rough, nan, inf (on request)    | normal with all digits, so that sums round; normal with NaN, or infinities  |

    Where the dtype has no sign, values have none.  With `requires_grad`, of floating and complex dtypes only.

    >>> from hypothesis import find
    >>> find(tensors((2, 2), torch.float32), lambda x: bool(x.sum() > 4))
    tensor([[0., 1.],
            [2., 3.]])
    """
    sizes = {"min_dims": min_dims, "max_dims": max_dims, "max_size": max_size}
    values = drawn(shape, dtype, patterns=patterns, dtypes=dtypes, requires_grad=requires_grad, **sizes)
    return values.map(tensor_of)


def tensor_of(drawn: Drawn) -> Tensor:
    """The tensor; the repr of a failing example calls this."""
    return drawn.tensor()


def sharded(
    spec: Spec | str | st.SearchStrategy[Spec] | None = None, *, patterns: Sequence[str] = USUAL, **options: Any
) -> st.SearchStrategy[Sharded]:
    """A whole tensor, its spec, and each rank's piece: a `Sharded`; its law: `assemble(x.pieces, x.spec) == x.whole`.

    `spec` is a spec, its text, or a strategy; without one, `placement_options` are those of `specs`.  Partial values
    are made to expose errors: they cancel, change their sign, tie, and are zero where the total is not; the seed
    decides which, and on which rank.  `patterns` are those of `tensors`, except that extremes are not drawn where an
    average is pending: no numbers of the dtype have them as their average.

    >>> from hypothesis import find
    >>> find(sharded("i64[2] @ dp=2:P(sum)"), lambda x: x.whole[1] == 1 and x.pieces[0][1] < 0)
    Sharded.of('i64[2] @ dp=2:P(sum)', 'ones', 0)
    >>> find(sharded(kinds=("S",), min_ranks=2), lambda x: x.whole.ndim == 2)
    Sharded.of('f32[1,1] @ a=2:S(0)', 'zeros', 0)
    """
    values.check_names("sharded", "patterns", patterns, tuple(PATTERNS))
    if spec is not None and options:
        problem = f"beside {', '.join(options)} it leaves nothing to draw"
        raise BadDraw("sharded", "spec", spec, problem, "Pass a spec, or what specs takes.")
    spec = read_spec(spec) if isinstance(spec, str) else specs(**options) if spec is None else spec
    if not isinstance(spec, Spec | st.SearchStrategy):
        raise BadDraw("sharded", "spec", spec, "it is no spec", "Pass one, its text, or a strategy such as specs().")
    drawn_specs, names = st.just(spec) if isinstance(spec, Spec) else spec, tuple(patterns)

    @st.composite
    def made(draw: search.Draw) -> Sharded:
        drawn_spec = draw(drawn_specs)
        pattern = draw(search.one_of(search.representable_patterns(names, drawn_spec)))
        return Sharded(drawn_spec, pattern, draw(search.SEEDS))

    return made()


def op_calls(
    names: Sequence[str] | None = None, *, dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> st.SearchStrategy[OpCall]:
    """A call of one of torch's ops, with arguments of torch's own tests: an `OpCall` with op, args, kwargs.

    `names` are those of torch's OpInfo database, as "add" or "nn.functional.linear"; "div" is all variants of it,
    "div.floor_rounding" one; None is all of them.  The database is opened on first use, which takes seconds: only
    then are unknown names refused.  The same name, dtype, number and seed are the same call in any process.

    >>> from hypothesis import given
    >>> @given(call=op_calls(["add", "mul"]))  # doctest: +SKIP
    ... def test_it_does_not_change_its_arguments(call): ...
    """
    values.check_dtypes("op_calls", dtypes)
    wanted = tuple(dtypes)
    if names is not None:
        values.check_words("op_calls", "names", names)
    chosen = None if names is None else tuple(names)
    return st.deferred(lambda: search.op_calls(chosen, wanted))


def schedules() -> st.SearchStrategy[str]:
    """A text that `localtensor.run(..., schedule=)` takes: round_robin, shuffled:SEED, pct:SEED:DEPTH.

    It shrinks to `round_robin`.

    >>> from hypothesis import find
    >>> find(schedules(), lambda text: True), find(schedules(), lambda text: text.startswith("pct"))
    ('round_robin', 'pct:0:1')
    """
    return st.composite(search.schedule)()


def _meshes(
    call: str, ranks: tuple[int, int], axes: tuple[int, int], names: Sequence[str] | None
) -> search.MeshOptions:
    for argument, value in zip(("min_ranks", "max_ranks", "min_axes", "max_axes"), (*ranks, *axes), strict=True):
        values.check_count(call, argument, value, 1)
    values.check_range(call, "min_ranks", ranks[0], "max_ranks", ranks[1])
    values.check_range(call, "min_axes", axes[0], "max_axes", axes[1])
    values.check_axis_names(call, tuple(AXES) if names is None else names, axes[1])
    return search.MeshOptions(ranks, axes, tuple(AXES if names is None else names))


def _shapes(call: str, shape: Sequence[int] | None, dims: tuple[int, int], largest: int) -> search.ShapeOptions:
    values.check_shape(call, shape)
    for argument, value in (("min_dims", dims[0]), ("max_dims", dims[1]), ("max_size", largest)):
        values.check_count(call, argument, value, 0)
    values.check_range(call, "min_dims", dims[0], "max_dims", dims[1])
    return search.ShapeOptions(None if shape is None else tuple(shape), dims, largest)


def _kinds(call: str, kinds: Sequence[str]) -> tuple[str, ...]:
    values.check_names(call, "kinds", kinds, KINDS)
    return tuple(kinds)


def _left(call: str, ndim: int, dtype: torch.dtype | None, kinds: tuple[str, ...]) -> Layout:
    found = placement_options(ndim, dtype, kinds)
    if not found:
        of = f"a tensor of {ndim} dims" + ("" if dtype is None else f" and {dtype}")
        raise BadDraw(call, "kinds", kinds, f"{of} can have none of them", 'Add "R" to the kinds.')
    return found


def _specs(
    call: str, mesh: Mesh | None, shape: Sequence[int] | None, dtypes: Sequence[torch.dtype], kinds: Sequence[str],
    ranks: tuple[int, int], axes: int, dims: tuple[int, int], largest: int,
) -> search.SpecOptions:  # fmt: skip
    of = _shapes(call, shape, dims, largest)
    wanted, most = _kinds(call, kinds), dims[1] if shape is None else len(shape)
    values.check_dtypes(call, dtypes)
    usable = tuple(dtype for dtype in dtypes if placement_options(most, dtype, wanted))
    if not usable:
        _left(call, most, dtypes[0], wanted)
    if mesh is not None:
        values.check_mesh(call, mesh)
    return search.SpecOptions(mesh if mesh is not None else _meshes(call, ranks, (1, axes), None), of, usable, wanted)

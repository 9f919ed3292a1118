"""Ops without a rule by way of what they are made of: right on the pieces, and nothing where the pieces are another op."""

import ast
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec
from strategies.model.rule import LEAVES, Leaf
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.semantics.local_call import MissingRuleError, local_calls_by_rank
from strategies.ops.semantics.rule_registry import Meta, PlacementRule, query_of, rules
from strategies.propagation import decomposition as decomposed
from strategies.propagation.decomposition import decomposition
from strategies.propagation.propagator import Propagator
from tests.strategies.little_book import BOOK, MESHES, afresh, assert_right, numbers, spec_of, together, whole
from tests.strategies.propagation.combinations import every_combination


def group_norm(x, rows=None):
    given = x.shape[0] if rows is None else rows
    return torch.ops.aten.native_group_norm.default(x * x, None, None, given, 2, 3, 2, 1e-5)[0]


MADE_OF = {
    "twice(Tensor x) -> Tensor": lambda x: torch.ops.aten.add.Tensor(x, x),
    "rows_mean(Tensor x) -> Tensor": lambda x: torch.ops.aten.sum.dim_IntList(x, [0]).div(x.shape[0]),
    "columns_mean(Tensor x) -> Tensor": lambda x: torch.ops.aten.sum.dim_IntList(x, [1]).div(x.shape[1]),
    "flat(Tensor x) -> Tensor": lambda x: torch.ops.aten.view.default(x, [x.numel()]),
    "flat_of_twelve(Tensor x) -> Tensor": lambda x: torch.ops.aten.view.default(x, [12]),
    "two(Tensor x) -> (Tensor, Tensor)": lambda x: (x * x, torch.ops.aten.sum.dim_IntList(x, [0])),
    "nested(Tensor x, Tensor y) -> Tensor": lambda x, y: torch.ops.aten.matmul.default(x * x, y),
    "writes(Tensor x) -> Tensor": lambda x: torch.ops.aten.clone.default(x).add_(x),
    "squeezed(Tensor x) -> Tensor": lambda x: torch.ops.aten.squeeze.default(x * x),
    "normed(Tensor x) -> Tensor": group_norm,
    "normed_by_four(Tensor x) -> Tensor": lambda x: group_norm(x, 4),
    "larger_where_long(Tensor x) -> Tensor": lambda x: x * x if x.shape[0] > 3 else x + x,
}  # fmt: skip
LIB = torch.library.Library("made_of", "DEF")
for schema, function in MADE_OF.items():
    LIB.define(schema)
    LIB.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")

DIV = rules("pointwise", "by one number", ["aten.div.Scalar", "aten.div.Tensor"], lambda ask: [
    *(PlacementRule((Shard(d),), (Shard(d),)) for d in range(ask.tensors[0].ndim)), PlacementRule((Partial(),), (Partial(),)),
] if len(ask.tensors) == 1 else together(ask))  # fmt: skip
OWN = [OUR_RULES.get(op) for op in ("aten.squeeze.default", "aten.native_group_norm.default")]
ALL = BOOK | type(BOOK).of(*DIV, *OWN)


def lines_of(op, *shapes, ranks=2):
    metas = [spec_of(Mesh.of(2), "R", shape) for shape in shapes]
    ask = query_of(op, tuple(Leaf(i) for i in range(len(shapes))), {}, [_meta(m) for m in metas])
    offer = decomposition(ALL, ask)
    return offer if isinstance(offer, str) else [str(line) for line in offer(ask, ranks)]


def _meta(spec):
    from strategies.ops.semantics.rule_registry import Meta

    return Meta(spec.shape, spec.dtype)


@pytest.mark.parametrize(("op", "shapes", "want"), [
    ("made_of.twice.default", [(3, 2)], ["R -> R", "S(0) -> S(0)", "S(1) -> S(1)", "P(sum) -> P(sum)", "P(avg) -> P(avg)"]),
    ("made_of.rows_mean.default", [(4, 3)], ["R -> R", "P(sum) -> P(sum)", "S(1) -> S(0)"]),  # the rows are counted
    ("made_of.columns_mean.default", [(4, 3)], ["R -> R", "P(sum) -> P(sum)", "S(0) -> S(0)"]),
    ("made_of.flat.default", [(4, 3)], ["R -> R", "S(0) -> S(0)", "P(sum) -> P(sum)"]),
    ("made_of.flat.default", [(3, 4)], ["R -> R", "P(sum) -> P(sum)"]),  # three rows are not even
    ("made_of.flat_of_twelve.default", [(4, 3)], ["R -> R", "P(sum) -> P(sum)"]),  # six elements are not twelve
    ("made_of.two.default", [(4, 3)], ["R -> R, R", "S(0) -> S(0), P(sum)", "S(1) -> S(1), S(0)"]),
    ("made_of.larger_where_long.default", [(4, 3)], ["R -> R", "S(1) -> S(1)"]),  # pieces of two rows take another way
    ("aten.matmul.default", [(4, 3), (3, 2)], ["R, R -> R", "S(0), R -> S(0)", "R, S(1) -> S(1)", "S(1), S(0) -> P(sum)",
                                               "P(sum), R -> P(sum)", "R, P(sum) -> P(sum)"]),
])  # fmt: skip
def test_the_lines_that_come_of_it(op, shapes, want):
    assert sorted(lines_of(op, *shapes)) == sorted(want)


@pytest.mark.parametrize(("op", "shapes", "why"), [
    ("made_of.writes.default", [(4, 3)], "it writes to a tensor by aten.add_.Tensor"),
    ("aten.kthvalue.default", [], "it has none"),
    ("aten.linalg_diagonal.default", [(4, 4)], "no rule for aten.as_strided.default"),
])  # fmt: skip
def test_why_there_are_none(op, shapes, why):
    if not shapes:
        ask = query_of(op, (Leaf(0), 1), {}, [_meta(spec_of(Mesh.of(2), "R", (4,)))])
        assert decomposition(ALL, ask) == why
    else:
        assert lines_of(op, *shapes) == why


@pytest.mark.few(16)
@pytest.mark.parametrize("op", ["twice", "rows_mean", "columns_mean", "flat", "two", "nested", "larger_where_long"])
@pytest.mark.parametrize("sizes", MESHES[:2], ids=str)
@pytest.mark.parametrize("shape", [(4, 3), (5, 2), (1, 6)], ids=str)
def test_every_combination_is_right_on_the_pieces(op, sizes, shape):
    mesh = Mesh.of(*sizes)
    shapes = [shape, (shape[1], 2)] if op == "nested" else [shape]
    specs = [whole(mesh, one) for one in shapes]
    problem, source = afresh(ALL, decompose=decomposition).problem(
        f"made_of.{op}.default", specs, LEAVES[: len(specs)], {}, mesh
    )
    assert source == "the rules of its decomposition"
    count = 0
    for beginning in every_combination(problem):
        made, whose = local_calls_by_rank(problem.whole, beginning.lines, sizes, problem.own)
        rows = [*zip(beginning.inputs, problem.whole.query.tensors, strict=True)]
        outs = [*zip(beginning.outputs, problem.whole.query.outputs, strict=True)]
        inputs, outputs = ([Spec(mesh, row, m.shape, m.dtype) for row, m in both] for both in (rows, outs))
        calls = [made[i].call for i in whose]
        assert_right(problem.whole.call, calls, [numbers(one, 3) for one in shapes], inputs, outputs)
        count += 1
    assert count > 1


def test_a_propagator_goes_by_it_and_says_so():
    mesh = Mesh.of(2)
    specs = [spec_of(mesh, "S(0)", (4, 3))]
    found = Propagator(ALL).propagate("made_of.two.default", specs)
    assert [spec.placements for spec in found.outputs] == [(Shard(0),), (Partial(),)]
    assert "by the rules of its decomposition" in str(found)
    with pytest.raises(MissingRuleError, match=r"decomposition: it writes to a tensor by aten\.add_\.Tensor"):
        Propagator(ALL).propagate("made_of.writes.default", specs)
    kept = Propagator(ALL, replicate_all=True).propagate("made_of.writes.default", specs)
    assert kept.inputs[0].placements == (Replicate(),)


def test_threads_trace_side_by_side():
    ready = threading.Barrier(6)

    def trace(_):
        ready.wait(60)
        return [lines_of("made_of.nested.default", (4, rows), (rows, 2)) for rows in range(1, 6)]

    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(trace, range(6)))
    assert got == [got[0]] * 6
    assert all(len(lines) >= 3 for lines in got[0])


def test_each_private_part_of_torch_is_in_the_table_and_in_this_torch():
    tree = ast.parse(Path(decomposed.__file__).read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "torch" in str(node.module) and "._" in str(node.module)
        for alias in node.names
    }
    assert imported == {"decomposition_table", "TorchDispatchMode"}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {"_can_decompose", "decompose"}
    assert used == {"_can_decompose", "decompose"}
    assert all(name in decomposed.__doc__ for name in imported | used)
    assert torch.ops.aten.matmul.default._can_decompose()


@pytest.mark.parametrize(("op", "shape", "ranks", "cut"), [
    ("squeezed", (4, 1, 3), 2, True),
    ("squeezed", (2, 1, 3), 2, False),  # the op itself runs on a piece of one row, and that loses the dim
    ("normed", (4, 2, 3), 2, True), ("normed", (5, 2, 3), 4, True),
    ("normed_by_four", (4, 2, 3), 2, False),  # each rank would be told four rows, and has two
])  # fmt: skip
def test_an_inner_call_must_be_the_one_that_each_rank_would_make(op, shape, ranks, cut):
    assert ("S(0) -> S(0)" in lines_of(f"made_of.{op}.default", shape, ranks=ranks)) is cut


def test_the_rule_of_an_inner_op_is_asked_about_the_call_that_is_made_in_its_place():
    def of_dims(ask):
        if ask.op == "aten.squeeze.dims":
            yield PlacementRule((Shard(0),), (Shard(0),))

    inner = replace(OUR_RULES.get("aten.squeeze.default"), lines=of_dims)
    book = ALL | type(BOOK).of(inner)
    ask = query_of("made_of.squeezed.default", (Leaf(0),), {}, [Meta((4, 1, 3), torch.float32)])
    assert [str(line) for line in decomposition(book, ask)(ask, 2)] == ["R -> R", "S(0) -> S(0)"]

"""Lines of one axis on whole meshes: what is offered is right on the pieces, what would be wrong is not offered."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.layout.mesh import Mesh
from localtensor.layout.reductions import fold_partials as fold
from localtensor.layout.shards import split
from localtensor.layout.spec import Spec, parse
from strategies.model.rule import Leaf
from strategies.ops.semantics.local_call import local_calls_by_rank
from strategies.ops.semantics.rule_registry import PlacementRule, RuleRegistry, rules
from strategies.propagation.mesh_expansion import expand
from tests.strategies.little_book import BOOK, MESHES, assert_right, numbers, problem_of, run_on_pieces, spec_of, whole
from tests.strategies.propagation.combinations import every_combination

CASES = {
    "mul of matrices": ("aten.mul.Tensor", [(5, 4), (5, 4)], None),
    "mul with a row": ("aten.mul.Tensor", [(3, 7), (7,)], None),
    "add of few rows": ("aten.add.Tensor", [(2, 3), (2, 3)], None),
    "mm": ("aten.mm.default", [(5, 3), (3, 4)], None),
    "mm of a single row": ("aten.mm.default", [(1, 6), (6, 5)], None),
    "sum": ("aten.sum.dim_IntList", [(5, 7)], (Leaf(0), [0])),
    "sum of all": ("aten.sum.dim_IntList", [(3, 4)], (Leaf(0), [0, 1])),
    "amax": ("aten.amax.default", [(4, 8)], (Leaf(0), [0])),
    "amax of all": ("aten.amax.default", [(8, 6)], (Leaf(0), [0, 1])),
    "view, dims made one": ("aten.view.default", [(12, 2)], (Leaf(0), [24])),
    "view, dim taken apart": ("aten.view.default", [(24,)], (Leaf(0), [4, 6])),
    "view, last dim kept": ("aten.view.default", [(2, 3, 5)], (Leaf(0), [6, 5])),
    "clone": ("aten.clone.default", [(4, 3)], None),
}


def specs_of(beginning, problem, mesh):
    metas = problem.whole.query
    inputs = [Spec(mesh, row, m.shape, m.dtype) for row, m in zip(beginning.inputs, metas.tensors, strict=True)]
    outputs = [Spec(mesh, row, m.shape, m.dtype) for row, m in zip(beginning.outputs, metas.outputs, strict=True)]
    return inputs, outputs


def check_all(op, shapes, args, mesh, seed, book=BOOK):
    """Every combination that is offered, on its pieces; how many there were."""
    problem = problem_of(op, [whole(mesh, shape) for shape in shapes], args, book)
    tensors = [numbers(shape, seed + i) for i, shape in enumerate(shapes)]
    count = 0
    for beginning in every_combination(problem):
        inputs, outputs = specs_of(beginning, problem, mesh)
        made, whose = local_calls_by_rank(problem.whole, beginning.lines, mesh.sizes, problem.own)
        assert_right(problem.whole.call, [made[i].call for i in whose], tensors, inputs, outputs, seed)
        count += 1
    return count


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sizes", MESHES[:3], ids=str)
def test_every_combination_that_is_offered_is_right_on_the_pieces(case, sizes):
    assert check_all(*CASES[case], Mesh.of(*sizes), seed=1) > 1


@pytest.mark.parametrize("case", ["mul with a row", "sum", "amax", "view, dims made one", "view, dim taken apart"])
def test_on_three_axes_too(case):
    assert check_all(*CASES[case], Mesh.of(2, 2, 2), seed=2) > 1


@settings(deadline=None, max_examples=60)
@given(data=st.data(), sizes=st.sampled_from(MESHES[:3]), rows=st.integers(0, 7), columns=st.integers(1, 6))
def test_any_sizes_are_right_uneven_and_empty_ones_too(data, sizes, rows, columns):
    op, shapes, args = data.draw(
        st.sampled_from(
            [
                ("aten.mul.Tensor", [(rows, columns), (columns,)], None),
                ("aten.mm.default", [(rows, columns), (columns, 3)], None),
                ("aten.sum.dim_IntList", [(rows, columns)], (Leaf(0), [0])),
                ("aten.amax.default", [(columns, rows)], (Leaf(0), [0])),
                ("aten.view.default", [(rows, columns)], (Leaf(0), [rows * columns])),
                ("aten.view.default", [(rows * columns,)], (Leaf(0), [rows, columns])),
                ("aten.view.default", [(rows, columns, 2)], (Leaf(0), [rows * columns, 2])),
            ]
        )
    )
    assert check_all(op, shapes, args, Mesh.of(*sizes), seed=rows)


def grids(problem):
    return {(b.inputs, b.outputs) for b in every_combination(problem)}


@pytest.mark.parametrize(("op", "shape", "args", "sizes", "inputs", "output"), [
    ("aten.amax.default", (4,), (Leaf(0), [0]), (2, 2, 2), "S(0) S(0) S(0)", "P(max) P(max) P(max)"),  # the third leaves 0 rows
    ("aten.amax.default", (5,), (Leaf(0), [0]), (2, 3), "S(0) S(0)", "P(max) P(max)"),  # 3 and 2 rows on three ranks
    ("aten.view.default", (6, 2), (Leaf(0), [12]), (2, 2), "S(0) S(0)", "S(0) S(0)"),  # 6 is even on 2 ranks, 3 is not
    ("aten.view.default", (12,), (Leaf(0), [2, 6]), (2, 2), "S(0) S(0)", "S(0) S(0)"),  # one row on two ranks
])  # fmt: skip
def test_a_line_that_each_axis_alone_may_have_is_left_out_where_the_piece_may_not(
    op, shape, args, sizes, inputs, output
):
    mesh = Mesh.of(*sizes)
    problem = problem_of(op, [whole(mesh, shape)], args)
    inputs, output = tuple(map(parse, inputs.split())), tuple(map(parse, output.split()))
    lines = {(line.inputs, line.outputs): line for line in problem.offer(problem.whole.query, 2)}
    for axis, size in enumerate(sizes):  # each alone
        one = Mesh.of(size)
        alone = grids(problem_of(op, [whole(one, shape)], args))
        assert (((inputs[axis],),), ((output[axis],),)) in alone
    assert ((inputs,), (output,)) not in grids(problem)
    chosen = [lines[(i,), (o,)] for i, o in zip(inputs, output, strict=True)]
    made, whose = local_calls_by_rank(problem.whole, chosen, sizes, problem.own)
    specs = Spec(mesh, inputs, shape, torch.float64), problem.whole.query.outputs[0].shape
    with pytest.raises((AssertionError, RuntimeError, IndexError)):  # and it would be wrong
        assert_right(
            problem.whole.call, [made[i].call for i in whose], [numbers(shape, 3)], [specs[0]],
            [Spec(mesh, output, specs[1], torch.float64)],
        )  # fmt: skip


def test_the_why_of_what_was_left_out_is_reported():
    found = expand(problem_of("aten.amax.default", [spec_of(Mesh.of(2, 3), "S(0) S(0)", (5,))], (Leaf(0), [0])))
    reasons = {str(other) for other in found.others}
    assert "(S(0), S(0)) -> (P(max), P(max)): 3 rows on 3 ranks are not even" not in reasons
    assert "(S(0), S(0)) -> (P(max), P(max)): 2 rows on 3 ranks leave one without any" in reasons


def test_two_reductions_that_do_not_commute_are_never_on_one_tensor():
    mesh = Mesh.of(2, 2)
    offered = grids(problem_of("aten.clone.default", [whole(mesh, (4, 3))]))
    both = [tuple(p.reduce_op for p in row) for (row,), _ in offered if all(isinstance(p, Partial) for p in row)]
    assert sorted(both) == sorted(
        [(kind, kind) for kind in ("sum", "avg", "max", "min", "product")] + [("sum", "avg"), ("avg", "sum")]
    )


def test_sums_of_maxima_depend_on_the_order_and_sums_of_averages_do_not():
    """Why: on pieces, the last axis folded first is right for both, and the first axis first for averages alone."""
    mesh, x = Mesh.of(2, 2), numbers((4, 3), 5)
    for placements, either in (("P(sum) P(max)", False), ("P(sum) P(avg)", True)):
        one, two = (parse(p).reduce_op for p in placements.split())
        held = torch.stack(split(x, spec_of(mesh, placements, (4, 3)), torch.Generator().manual_seed(0)))
        held = held.reshape(2, 2, 4, 3)
        torch.testing.assert_close(fold(fold(held.transpose(0, 1), two), one), x)
        assert torch.allclose(fold(fold(held, one), two), x) == either


@pytest.mark.parametrize("seed", range(6))
def test_the_first_that_is_found_is_the_cheapest_of_all(seed):
    rng = torch.Generator().manual_seed(seed)
    choices = ["R", "S(0)", "S(1)", "P(sum)", "P(max)"]
    mesh = Mesh.of(2, 3)
    for op, shapes in (("aten.mm.default", [(5, 4), (4, 7)]), ("aten.add.Tensor", [(5, 4), (5, 4)])):
        drawn = [" ".join(choices[int(i)] for i in torch.randint(5, (2,), generator=rng)) for _ in shapes]
        problem = problem_of(op, [spec_of(mesh, p, shape) for p, shape in zip(drawn, shapes, strict=True)])
        best = expand(problem).best
        assert best.order == min(beginning.order for beginning in every_combination(problem))


def test_the_order_of_a_rules_lines_does_not_change_the_choice():
    mesh = Mesh.of(2, 2)

    def backwards(ask):
        return list(BOOK.get("aten.mm.default").lines(ask))[::-1]

    other = RuleRegistry.of(*rules("matmul", "rows by columns", ["aten.mm.default"], backwards))
    for left, right in itertools.product(["S(0) R", "P(sum) S(1)", "R R"], repeat=2):
        specs = [spec_of(mesh, left, (4, 4)), spec_of(mesh, right, (4, 4))]
        ours, theirs = (expand(problem_of("aten.mm.default", specs, None, book)).best for book in (BOOK, other))
        assert (ours.inputs, ours.outputs, ours.seconds) == (theirs.inputs, theirs.outputs, theirs.seconds)


def test_a_search_that_is_cut_short_says_so_and_is_right_all_the_same():
    mesh = Mesh.of(2, 2, 2)
    specs = [spec_of(mesh, "S(0) S(1) P(sum)", (5, 4)), spec_of(mesh, "P(sum) S(0) S(0)", (5, 4))]
    problem = problem_of("aten.add.Tensor", specs)
    all_of_it, short = expand(problem), expand(problem, limit=2)
    assert not all_of_it.unseen
    assert short.unseen == "not all was looked at: 2 beginnings were (limit=2); another may cost less"
    assert short.best.seconds >= all_of_it.best.seconds
    inputs, outputs = specs_of(short.best, problem, mesh)
    assert_right(problem.whole.call, [problem.whole.call] * 8, [numbers((5, 4), i) for i in (0, 1)], inputs, outputs)


def test_a_tensor_that_is_written_to_stays_where_it_is():
    mesh = Mesh.of(2, 2)
    specs = [spec_of(mesh, "S(0) R", (4, 4)), spec_of(mesh, "R S(1)", (4, 4))]
    found = expand(problem_of("aten.add_.Tensor", specs)).best
    assert found.inputs[0] == specs[0].placements
    assert found.outputs == (specs[0].placements,)
    assert expand(problem_of("aten.add.Tensor", specs)).best.inputs[0] != specs[0].placements


def test_a_line_is_asked_for_again_for_every_piece():
    """A rule that speaks of sizes: offered for the whole call, and not for a piece of one row."""

    def two_rows(ask):
        if ask.tensors[0].shape[0] >= 2:
            yield PlacementRule((Shard(0),), (Shard(0),))

    book = RuleRegistry.of(*rules("copy", "not with one row", ["aten.clone.default"], two_rows))
    offered = grids(problem_of("aten.clone.default", [whole(Mesh.of(2, 2), (3,))], None, book))
    cut, kept = Shard(0), Replicate()
    assert offered == {
        (((kept, kept),), ((kept, kept),)),
        (((cut, kept),), ((cut, kept),)),
        (((kept, cut),), ((kept, cut),)),
    }


def test_pieces_of_many_ranks_are_few():
    mesh = Mesh.of(256, 4)
    problem = problem_of("aten.clone.default", [spec_of(mesh, "S(0) S(0)", (1000,))])
    best = expand(problem).best
    made, whose = local_calls_by_rank(problem.whole, best.lines, mesh.sizes, problem.own)
    assert len(whose) == 1024
    assert len(made) == 2  # one row, or none
    assert best.inputs == ((Shard(0), Shard(0)),)


def test_what_ranks_hold_is_distinguished_by_their_own_call():
    """The checker itself: a wrong output placement does not pass."""
    mesh = Mesh.of(2, 2)
    problem = problem_of("aten.mul.Tensor", [whole(mesh, (4, 4))] * 2)
    call, tensors = problem.whole.call, [numbers((4, 4), 0), numbers((4, 4), 1)]
    partial = spec_of(mesh, "P(sum) R", (4, 4))
    assert len(run_on_pieces([call] * 4, tensors, [partial, partial])) == 4
    with pytest.raises(AssertionError):
        assert_right(call, [call] * 4, tensors, [partial, partial], [partial])


def test_what_lies_right_already_is_found_at_once():
    problem = problem_of("aten.mm.default", [whole(Mesh.of(2, 2, 2), (4, 4))] * 2)
    found = expand(problem, limit=5)  # one beginning for each axis, and nothing else
    assert not found.unseen
    assert found.best.steps == ((), ())

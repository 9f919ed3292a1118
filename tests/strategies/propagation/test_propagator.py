"""The propagator: right answers, remembered once for all threads, and refusals that say what to do."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from localtensor.concurrency import clear_all
from localtensor.concurrency.sync import ThreadSync
from localtensor.errors import BadMesh
from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, StridedShard, parse
from strategies.model.rule import LEAVES, Call, Leaf
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.semantics.local_call import InvalidCall, MissingRuleError, NoMetadata, WouldMoveWritten
from strategies.ops.semantics.rule_registry import PlacementRule, RuleRegistry, rules
from strategies.propagation.propagator import STORE_ONE_OF, Propagator, _lasting
from tests.strategies.little_book import BOOK, assert_right, multiplied, numbers, spec_of, whole

MESH = Mesh.of(dp=2, tp=3)
MM = "aten.mm.default"


def mm(left="S(0) R", right="R S(1)", mesh=MESH):
    return [spec_of(mesh, left, (5, 4)), spec_of(mesh, right, (4, 7))]


@pytest.fixture
def ours():
    return Propagator(BOOK)


def check(propagator, op, specs, args=None):
    found = propagator.propagate(op, specs, args)
    tensors = [numbers(spec.shape, i) for i, spec in enumerate(specs)]
    calls = [found.local_call(rank) for rank in range(found.mesh.ranks)]
    assert_right(found.call, calls, tensors, found.inputs, found.outputs)
    return found


# -- answers


@pytest.mark.parametrize(("left", "right", "wanted", "output"), [
    ("S(0) R", "R S(1)", ("S(0) R", "R S(1)"), "S(0) S(1)"),
    ("S(0) S(1)", "R S(0)", ("S(0) S(1)", "R S(0)"), "S(0) P(sum)"),
    ("P(sum) R", "R R", ("P(sum) R", "R R"), "P(sum) R"),
    ("R R", "R R", ("R R", "R R"), "R R"),
    ("P(max) R", "R R", ("S(0) R", "R R"), "S(0) R"),  # no line speaks of a maximum
    ("SS(0,2) R", "R R", ("R R", "R R"), "R R"),  # nor of a strided shard
])  # fmt: skip
def test_what_is_wanted_and_what_comes_out(ours, left, right, wanted, output):
    found = check(ours, MM, mm(left, right))
    assert found.inputs == tuple(mm(*wanted))
    assert found.outputs == (spec_of(MESH, output, (5, 7)),)
    assert found.redistributes == tuple(i for i, p in enumerate((left, right)) if p != wanted[i])


def test_each_rank_has_its_own_sizes_where_a_size_is_an_argument(ours):
    mesh = Mesh.of(2, 2)
    found = check(ours, "aten.view.default", [spec_of(mesh, "S(0) S(2)", (4, 3, 5))], (Leaf(0), [-1, 5]))
    assert [found.local_call(rank).args[1] for rank in range(4)] == [(6, 3), (6, 2), (6, 3), (6, 2)]
    assert found.local_shapes() == ((6, 3), (6, 2), (6, 3), (6, 2))
    assert len(found.calls) == 2
    assert found.call.args == (Leaf(0), (-1, 5))


def test_an_uneven_piece_is_gathered_where_the_rule_needs_even_ones(ours):
    found = check(ours, "aten.view.default", [spec_of(Mesh.of(2), "S(0)", (3, 4))], (Leaf(0), [12]))
    assert found.inputs[0].placements == (Replicate(),)
    assert "3 rows on 2 ranks are not even" in str(found)


def test_an_overload_is_as_good_as_its_name(ours):
    assert ours.propagate(torch.ops.aten.mm.default, mm()) is ours.propagate(MM, mm())
    assert ours.propagate(torch.ops.aten.mm.default, mm()) is ours.propagate(MM, mm(), (Leaf(0), Leaf(1)))


def test_a_call_without_a_tensor_needs_a_mesh():
    book = RuleRegistry.of(*rules("factory", "the same on every rank", ["aten.ones.default"],
                          lambda ask: [PlacementRule((), (Shard(0),))], shapes=["size"]))  # fmt: skip
    propagator = Propagator(book)
    found = propagator.propagate("aten.ones.default", [], ([5, 2],), mesh=MESH)
    assert found.outputs == (Spec(MESH, (Shard(0), Shard(0)), (5, 2), torch.float32),)
    assert [found.local_call(r).args[0] for r in (0, 2, 5)] == [(1, 2), (1, 2), (0, 2)]
    assert len(propagator.propagate("aten.ones.default", [], ([5, 2],), mesh=Mesh.of(4)).whose) == 4
    shape = ([5, 2],)
    assert propagator.explain_miss("aten.ones.default", [], shape, mesh=Mesh.of(other=4)) == "kept"
    assert propagator.explain_miss("aten.ones.default", [], shape, mesh=Mesh.of(8)).endswith(
        "settings=('mesh', (8,)) vs ('mesh', (2, 3))"
    )
    with pytest.raises(InvalidCall, match="the call has no tensor that determines its mesh"):
        propagator.propagate("aten.ones.default", [], ([5, 2],))


def test_the_answer_explains_itself(ours):
    found = ours.propagate(MM, mm("S(0) P(max)", "R S(0)"))
    assert str(found).splitlines()[:7] == [
        f"aten.mm.default on Mesh(dp=2, tp=3), 10.0 us, by the rule of matmul (rows by columns) at {BOOK.get(MM).where}",
        "  input 0: f64[5,4] @ dp:S(0), tp:P(max), wanted dp:S(0), tp:S(1)",
        "    tp: P(max) -> S(1) by reduce_scatter of 96 bytes",
        "  input 1: f64[4,7] @ dp:R, tp:S(0)",
        "  output 0: f64[5,7] @ dp:S(0), tp:P(sum)",
        "  not chosen:",
        "    (R, S(1)), (R, S(0)) -> (R, P(sum)): 15.0 us",
    ]
    assert found.explain(others=0).endswith("tp:P(sum)\n    and 25 more")


def test_an_answer_cannot_be_changed(ours):
    sizes = [12]
    found = ours.propagate("aten.view.default", [whole(MESH, (3, 4))], (Leaf(0), sizes))
    sizes[0] = 99
    assert found.call.args == (Leaf(0), (12,))
    with pytest.raises(FrozenInstanceError):
        found.seconds = 1.0
    with pytest.raises(BadMesh):
        found.local_call(6)


# -- the cache


def test_a_call_is_computed_once_and_what_differs_is_another(ours):
    specs = mm()
    first = ours.propagate(MM, specs)
    assert ours.propagate(MM, specs) is first
    assert ours.propagate(MM, mm()) is first  # other objects, the same values
    assert ours.propagate(MM, mm("S(0) S(1)", "R S(0)")) is not first
    assert ours.stats().misses == 2
    assert ours.explain_miss(MM, mm("S(0) S(1)", "R S(1)")) == (
        "same op, shapes, dtypes and mesh; differs in: placements=(S(0), S(1)), (R, S(1)) vs (S(0), R), (R, S(1))"
    )


def test_axes_of_other_names_share_the_work_and_have_their_own_names(ours):
    first = ours.propagate(MM, mm())
    other = Mesh.of(left=2, right=3)
    second = ours.propagate(MM, mm(mesh=other))
    assert second.mesh == other and {spec.mesh for spec in (*second.inputs, *second.outputs, *second.given)} == {other}
    assert second.calls == first.calls and second.others is first.others
    assert ours.propagate(MM, mm()).mesh == MESH
    assert ours.propagate(MM, mm(mesh=other)) is second
    assert ours.propagate(MM, mm(mesh=Mesh.of(left=2, right=3))) is second


def test_one_and_true_and_a_float_are_three_questions():
    asked = []

    def rule(ask):
        asked.append((ask["other"], type(ask["other"])))
        return []

    propagator = Propagator(RuleRegistry.of(*rules("f", "r", ["aten.mul.Scalar"], rule)))
    for value in (1, True, 1.0):
        propagator.propagate("aten.mul.Scalar", [whole(Mesh.of(2), (4,))], (Leaf(0), value))
    assert asked == [(1, int), (True, bool), (1.0, float)]


def test_the_default_dtype_is_part_of_the_question(ours):
    propagator = Propagator(RuleRegistry.of(), replicate_all=True, decompose=None)
    specs = [whole(Mesh.of(2), (4,), torch.int64)] * 2
    before = torch.get_default_dtype()
    try:
        dtypes = []
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            dtypes.append(propagator.propagate("aten.div.Tensor", specs).outputs[0].dtype)
    finally:
        torch.set_default_dtype(before)
    assert dtypes == [torch.float32, torch.float64]


def test_each_question_is_computed_once_whatever_the_number_of_threads():
    asked = []

    def counted(ask):
        if ask.tensors[0].shape[1] == 4:
            asked.append(ask.tensors)
        return multiplied(ask)

    propagator = Propagator(RuleRegistry.of(*rules("matmul", "rows by columns", [MM], counted)))
    kinds = [mm(left, right, Mesh.of(2)) for left in ("R", "S(0)", "S(1)") for right in ("R", "S(0)", "S(1)")]
    ready = threading.Barrier(8)

    def ask(start):
        ready.wait(60)
        return [propagator.propagate(MM, kinds[(start + i) % len(kinds)]) for i in range(len(kinds))]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert propagator.stats().misses == len(kinds) == len(asked)
    assert len({id(answer) for row in answers for answer in row}) == len(kinds)


def test_a_failure_is_not_remembered():
    fail = [True]

    def rule(ask):
        if fail:
            raise RuntimeError("not yet")
        return []

    propagator = Propagator(RuleRegistry.of(*rules("f", "r", [MM], rule)))
    with pytest.raises(Exception, match="not yet"):
        propagator.propagate(MM, mm())
    fail.clear()
    assert propagator.propagate(MM, mm()).inputs == tuple(mm("R R", "R R"))


def test_steps_are_taken_off_the_hit_path_only():
    class Counted(ThreadSync):
        def __init__(self):
            self.seen = []

        def step(self, what):
            self.seen.append(what)

    sync = Counted()
    propagator = Propagator(BOOK, sync=sync)
    propagator.propagate(MM, mm())
    named = [what for what in sync.seen if what.startswith("propagate: ")]
    assert named == [f"propagate: {what}" for what in ("metadata", "rule", "lines", "chosen")]
    before = len(sync.seen)
    propagator.propagate(MM, mm())
    assert len(sync.seen) == before


def test_an_argument_that_no_key_can_hold_is_answered_all_the_same():
    class Odd(float):
        pass

    propagator = Propagator(RuleRegistry.of(), replicate_all=True, decompose=None)
    found = [propagator.propagate("aten.mul.Scalar", [whole(Mesh.of(2), (4,))], (Leaf(0), Odd(2))) for _ in range(2)]
    assert found[0] == found[1] and found[0] is not found[1]


def test_clearing_forgets(ours):
    first = ours.propagate(MM, mm())
    ours.clear()
    again = ours.propagate(MM, mm())
    assert again is not first and again == first


def test_what_becomes_of_the_book_later_changes_nothing():
    entries = dict(BOOK.entries)
    propagator = Propagator(RuleRegistry(entries))
    entries.clear()
    assert propagator.propagate(MM, mm()).redistributes == ()


# -- refusals


class Unheard(Placement):
    pass


@pytest.mark.parametrize(("op", "specs", "args", "problem"), [
    ("aten.mm", mm(), None, "this torch has no such overload"),
    ("aten.mmm.default", mm(), None, "this torch has no such overload"),
    (MM, mm()[:1], None, "the op refuses them"),
    (MM, [*mm(), *mm()], None, "the op refuses them"),
    (MM, mm(), (Leaf(0), Leaf(0)), "2 specs, leaves [0, 0]: each spec needs its place"),
    (MM, mm(), (Leaf(0), Leaf(2)), "2 specs, leaves [0, 2]"),
    (MM, [mm()[0], mm(mesh=Mesh.of(dp=3, tp=2))[1]], None, "its mesh is Mesh(dp=3, tp=2), that before it Mesh(dp=2, tp=3)"),
    (MM, [mm()[0], mm(mesh=Mesh.of(a=2, b=3))[1]], None, "its mesh is Mesh(a=2, b=3)"),
    (MM, [mm()[0], spec_of(MESH, "R R", (3, 7))], None, "the op refuses them on meta tensors: a and b must have same reduction dim"),
    (MM, [mm()[0], Spec(MESH, (Unheard(), Shard(0)), (4, 7), torch.float64)], None, "Unheard is no placement whose meaning"),
    (MM, [mm()[0], Spec(MESH, (Partial("avg"), Shard(0)), (4, 7), torch.uint8)], None, "P(avg) of torch.uint8 means nothing"),
    (MM, [mm()[0], "R R"], None, "it is no Spec"),
])  # fmt: skip
def test_a_call_that_cannot_be_is_refused(ours, op, specs, args, problem):
    ours.propagate(MM, mm())
    for _ in range(2):
        with pytest.raises(InvalidCall) as raised:
            ours.propagate(op, specs, args)
        assert problem in str(raised.value)
        assert str(raised.value).startswith(f"propagate {op}: ") and str(raised.value).endswith(".")


def test_an_op_without_a_rule_is_refused_with_what_was_tried():
    with pytest.raises(MissingRuleError) as raised:
        Propagator(BOOK, decompose=None).propagate("aten.cumsum.default", [whole(MESH, (4,))], (Leaf(0), 0))
    assert str(raised.value) == (
        "propagate aten.cumsum.default: op: f64[4] @ dp:R, tp:R: there is no rule for it; tried: rule: none among 9; "
        "decomposition: not tried; all replicated: not allowed. "
        "Add an entry to the book, or allow Propagator(replicate_all=True)."
    )
    with pytest.raises(MissingRuleError, match="decomposition: it has none; all replicated: not allowed"):
        Propagator(BOOK).propagate("aten.kthvalue.default", [whole(MESH, (4,))], (Leaf(0), 1))
    with pytest.raises(MissingRuleError, match=r"decomposition: no rule for aten\.as_strided\.default"):
        Propagator(BOOK).propagate("aten.linalg_diagonal.default", [whole(MESH, (4, 4))], (Leaf(0),))


def test_with_the_fallback_everything_is_replicated():
    propagator = Propagator(BOOK, replicate_all=True)
    found = check(propagator, "aten.cumsum.default", [spec_of(MESH, "S(0) P(sum)", (4,))], (Leaf(0), 0))
    assert found.inputs[0].placements == found.outputs[0].placements == (Replicate(), Replicate())
    assert found.source == "the fallback: all replicated"


def test_shapes_that_depend_on_values_are_refused():
    with pytest.raises(NoMetadata, match="depend on the values"):
        Propagator(BOOK, replicate_all=True).propagate("aten.nonzero.default", [whole(MESH, (4,))])


def test_a_shard_order_is_moved_as_the_strided_shards_under_which_it_lies_alike(ours):
    mesh, order = Mesh.of(2, 3), ((0, (1, 0)),)
    placements = (Shard(0), Shard(0))
    turned = Spec(mesh, placements, (12, 4), torch.float64, order)
    other = spec_of(mesh, "R S(1)", (4, 7))
    found = check(ours, MM, [turned, other])
    as_strided = ours.propagate(MM, [Spec(mesh, (parse("SS(0,3)"), Shard(0)), (12, 4), torch.float64), other])
    assert found.given == (turned, other) and (found.inputs, found.steps) == (as_strided.inputs, as_strided.steps)
    plain = Spec(mesh, placements, (12, 4), torch.float64)
    assert ours.propagate(MM, [plain, other]).given == (plain, other)  # and it is not taken for the other one


def test_a_shard_order_that_no_strided_shards_make_is_refused(ours):
    uneven = Spec(Mesh.of(3, 2), (Shard(0), Shard(0)), (7, 4), torch.float64, ((0, (1, 0)),))
    with pytest.raises(InvalidCall) as refused:
        ours.propagate(MM, [uneven, spec_of(uneven.mesh, "R R", (4, 7))])
    assert str(refused.value).startswith(
        "propagate aten.mm.default: specs[0]: f64[7,4] @ a:S(0)[1], b:S(0)[0]: its axes do not cut from left to right, "
        "nor in strided shards: orders.strided: ")  # fmt: skip
    assert str(refused.value).endswith(
        ", or keep the shard order. Redistribute it to a spec without a shard order first."
    )


@pytest.mark.parametrize(("op", "args", "shapes"), [
    ("aten.add_.Tensor", None, [(4, 4), (4, 4)]),
    ("aten.mul_.Tensor", None, [(4, 4), (4,)]),
])  # fmt: skip
def test_a_tensor_that_is_written_to_is_never_moved(ours, op, args, shapes):
    mesh = Mesh.of(2, 2)
    specs = [spec_of(mesh, "S(0) R", shapes[0]), spec_of(mesh, "R R", shapes[1])]
    found = check(ours, op, specs, args)
    assert found.inputs[0] == found.outputs[0] == specs[0]
    odd = Spec(mesh, (StridedShard(0, split_factor=2), Partial("max")), shapes[0], torch.float64)
    with pytest.raises(WouldMoveWritten) as raised:
        ours.propagate(op, [odd, specs[1]], args)
    assert str(raised.value).startswith(f"propagate {op}: self: f64[4,4] @ a:SS(0,2), b:P(max): the op writes to it")
    told = str(raised.value).partition("Redistribute it to ")[2].partition(" before the call")[0]
    moved = Spec(mesh, tuple(map(parse, told[1:-1].split(", "))), shapes[0], torch.float64)
    assert ours.propagate(op, [moved, specs[1]], args).inputs[0] == moved  # the remedy is one


def test_out_is_not_moved_either():
    book = RuleRegistry.of(*rules("pointwise", "each element goes by itself", ["aten.neg.out"],
                          lambda ask: [PlacementRule((Shard(0), Shard(0)), (Shard(0),))]))  # fmt: skip
    propagator, mesh = Propagator(book), Mesh.of(2)
    given = {"out": Leaf(1)}
    specs = [spec_of(mesh, "S(0)", (4,)), spec_of(mesh, "R", (4,))]
    assert propagator.propagate("aten.neg.out", specs, (Leaf(0),), given).inputs[0].placements == (Replicate(),)
    with pytest.raises(WouldMoveWritten, match="out: f64"):
        propagator.propagate("aten.neg.out", [specs[0], spec_of(mesh, "P(max)", (4,))], (Leaf(0),), given)


# -- the calls that are known by the identity of their specs


def asked_by(op, argument):
    asked = []

    def rule(ask):
        asked.append(ask[argument])
        return []

    return asked, Propagator(RuleRegistry.of(*rules("f", "r", [op], rule)))


def test_what_is_in_a_list_counts_with_its_type():
    asked, propagator = asked_by("aten._foreach_mul.ScalarList", "scalars")
    spec = whole(Mesh.of(2), (4,))
    for _ in range(3):
        for value in (1, True, 1.0, 2, 1.0, 300):
            propagator.propagate("aten._foreach_mul.ScalarList", [spec], ([LEAVES[0]], [value]))
    assert [(type(value), value) for [value] in asked] == [(int, 1), (bool, True), (float, 1.0), (int, 2), (int, 300)]
    assert propagator.stats().misses == 5 and propagator.stats().hits == 13


def test_a_list_that_is_changed_after_the_call_is_another_question():
    asked, propagator = asked_by("aten.sum.dim_IntList", "dim")
    spec, dims = whole(Mesh.of(2), (4, 4)), [0]
    for change in (0, 0, 1, 1, 0):
        dims[0] = change
        propagator.propagate("aten.sum.dim_IntList", [spec], (LEAVES[0], dims))
    assert asked == [[0], [1]]


def test_keywords_count_by_name_and_value():
    asked, propagator = asked_by("aten.sum.dim_IntList", "keepdim")
    spec = whole(Mesh.of(2), (4, 4))
    for _ in range(3):
        for kwargs in ({}, {"keepdim": True}, {"keepdim": False}, {"dtype": torch.float32}):
            propagator.propagate("aten.sum.dim_IntList", [spec], (LEAVES[0], [1]), kwargs)
    assert asked == [False, True, False, False]
    assert propagator.stats().hits == 8


def test_a_call_that_is_asked_again_with_the_same_objects_makes_no_key(ours, monkeypatch):
    specs = mm()
    first = ours.propagate(MM, specs)
    assert ours.propagate(MM, mm()) is first
    monkeypatch.setattr("strategies.propagation.cache.CallKeyFactory.of", None)
    assert ours.propagate(MM, specs) is first
    assert ours.propagate(MM, list(specs), LEAVES[:2]) is first
    with pytest.raises(TypeError):
        ours.propagate(MM, mm("R R", "R R"))


def test_arguments_that_are_new_each_time_are_not_kept_by_identity(ours):
    spec, long = whole(Mesh.of(2), (4, 4)), whole(Mesh.of(2), (1000,))
    for turn in range(40):
        ours.propagate("aten.sum.dim_IntList", [spec], (Leaf(0), [1]))
        Propagator(RuleRegistry.of(), replicate_all=True).propagate("aten.mul.Scalar", [spec], (LEAVES[0], 1000 + turn))
        ours.propagate("aten.view.default", [spec], (LEAVES[0], [int("16")]))
        ours.propagate("aten.view.default", [long], (LEAVES[0], [int("1000")]))
    assert len(ours._same) == 1  # the first view
    assert ours.stats().misses == 3


@pytest.mark.parametrize(("value", "lasts"), [
    ([1], True), ([LEAVES[3], None], True), ([[1]], False), ([1000], False), ([1.0], False), (-5, True), (-6, False), (256, True),
    (257, False), (True, True), ((1,), False), (LEAVES[0], True), (Leaf(0), False), (Leaf(-1), False), (Leaf(10_000), False),
])  # fmt: skip
def test_only_what_is_one_object_is_known_by_identity(value, lasts):
    assert _lasting([0, value]) is lasts and _lasting([value, 0]) is lasts


def test_specs_that_equal_known_ones_make_no_key_and_fill_no_table(ours, monkeypatch):
    first = ours.propagate(MM, mm())
    monkeypatch.setattr("strategies.propagation.cache.CallKeyFactory.of", None)
    for _ in range(4 * STORE_ONE_OF):
        assert ours.propagate(MM, mm()) is first
    assert len(ours._same) <= 1 + 4
    assert ours.stats().hits == 4 * STORE_ONE_OF


def test_specs_that_are_kept_are_known_by_their_own_identity_before_long(ours, monkeypatch):
    ours.propagate(MM, mm())
    kept = mm()
    found = [ours.propagate(MM, kept) for _ in range(STORE_ONE_OF + 1)]
    monkeypatch.setattr("strategies.propagation.cache.SpecInterner.of", None)
    assert ours.propagate(MM, kept) is found[0] is found[-1]
    with pytest.raises(TypeError):
        ours.propagate(MM, mm())


def test_equal_specs_on_a_mesh_of_other_names_have_their_own_answer(ours):
    named, other = Mesh.of(dp=2, tp=3), Mesh.of(x=2, y=3)
    for mesh in (named, other, named, other):
        assert ours.propagate(MM, mm(mesh=mesh)).mesh == mesh


def test_a_list_may_stand_at_one_place_and_then_at_another():
    asked, propagator = asked_by("aten.sum.dim_IntList", "dim")
    spec, dims = whole(Mesh.of(2), (4, 4)), [0]
    for _ in range(3):
        for change in (0, 1):
            dims[0] = change
            propagator.propagate("aten.sum.dim_IntList", [spec], (LEAVES[0], dims))
            propagator.propagate("aten.sum.dim_IntList", [spec], (LEAVES[0],), {"dim": dims})
            propagator.propagate("aten.sum.dim_IntList", [spec], (LEAVES[0], dims, True))
            propagator.propagate("aten.sum.dim_IntList", [spec], (LEAVES[0], (change,)))
    assert asked == [[0], [0], [0], (0,), [1], [1], [1], (1,)]


def test_a_list_of_one_is_not_that_one():
    asked, propagator = asked_by("aten.sum.dim_IntList", "dim")
    spec = whole(Mesh.of(2), (4, 4))
    dims = [[1], 1, [1], 1, [1]]
    found = [propagator.propagate("aten.sum.dim_IntList", [spec], (LEAVES[0], dim)) for dim in dims]
    assert asked == [[1], 1] and [one.call.args[1] for one in found] == [(1,), 1, (1,), 1, (1,)]


def test_two_lists_in_one_call_both_count():
    asked, propagator = asked_by("aten.roll.default", "dims")
    spec, shifts, dims = whole(Mesh.of(2), (4, 4)), [1], [0]
    propagator.propagate("aten.roll.default", [spec], (LEAVES[0], shifts))
    for change in (0, 1, 0, 1):
        dims[0] = change
        propagator.propagate("aten.roll.default", [spec], (LEAVES[0], shifts, dims))
    assert asked == [[], [0], [1]]


def test_a_thread_that_asks_late_does_not_move_the_list_of_answers_that_are_kept(monkeypatch):
    """One thread asks and is overtaken by another, whose call has its list at another place, twice."""
    pool, spec = "aten.avg_pool2d.default", whole(Mesh.of(2), (2, 3, 9, 9))
    late, other = (LEAVES[0], 2, [3, 3]), (LEAVES[0], [3, 3], 2)
    propagator, look_up = Propagator(OUR_RULES), Propagator._looked_up

    def overtaken(self, *asked):
        found = look_up(self, *asked)
        if asked[2] is late:
            monkeypatch.setattr(Propagator, "_looked_up", look_up)
            for _ in range(2):
                self.propagate(pool, [spec], other)
        return found

    monkeypatch.setattr(Propagator, "_looked_up", overtaken)
    found = [propagator.propagate(pool, [spec], args).call.args[1:3] for args in (late, late, other)]
    assert found == [(2, (3, 3)), (2, (3, 3)), ((3, 3), 2)]


def test_no_identity_is_used_twice():
    """Specs that die would leave their ids to others: they are held."""
    propagator = Propagator(BOOK)
    for rows in range(1, 60):
        found = propagator.propagate("aten.clone.default", [whole(Mesh.of(2), (rows,))])
        assert found.outputs[0].shape == (rows,)


def test_the_ambient_mode_of_the_caller_changes_nothing_but_the_default_dtype(ours):
    specs = [whole(Mesh.of(2), (4,), torch.int64)] * 2
    propagator = Propagator(RuleRegistry.of(), replicate_all=True, decompose=None)
    before = propagator.propagate("aten.div.Tensor", specs)
    with torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"):
        again = Propagator(RuleRegistry.of(), replicate_all=True, decompose=None).propagate("aten.div.Tensor", specs)
        assert propagator.propagate("aten.div.Tensor", specs) is before
    assert again.outputs == before.outputs


def test_all_caches_are_cleared_at_once(ours):
    specs = mm()
    first = ours.propagate(MM, specs)
    clear_all()
    again = ours.propagate(MM, specs)
    assert again is not first and again == first


# -- calls of each rank's own


NORM = "aten.native_group_norm.default"


@pytest.mark.parametrize("mesh", [Mesh.of(3), Mesh.of(2, 2)], ids=str)
def test_each_rank_gets_its_own_number_of_rows(mesh):
    cut = " ".join(["S(0)"] * len(mesh.sizes))
    specs = [spec_of(mesh, cut, (5, 6, 4)), whole(mesh, (6,)), whole(mesh, (6,))]
    found = check(Propagator(OUR_RULES), NORM, specs, (*LEAVES[:3], 5, 6, 4, 3, 1e-5))
    assert found.inputs == tuple(specs)
    rows = [shape[0] for shape in found.local_shapes()]
    assert [found.local_call(rank).args[3] for rank in range(mesh.ranks)] == rows and len(set(rows)) > 1


SQUEEZED = [("aten.squeeze.default", (), (1,)), ("aten.squeeze.dim", (0,), ()), ("aten.squeeze_.dims", ((0,),), ()),
            ("aten.squeeze.dims", ((0, 1),), (1,))]  # fmt: skip


@pytest.mark.parametrize(("op", "args", "dims"), SQUEEZED)
def test_every_rank_makes_another_call_in_place_of_one_that_means_something_else_for_a_piece(op, args, dims):
    spec = spec_of(Mesh.of(2, 2), "S(0) S(2)", (2, 1, 3))
    found = check(Propagator(OUR_RULES), op, [spec], (Leaf(0), *args))
    assert found.inputs == (spec,)
    assert found.calls == (Call(op.rpartition(".")[0] + ".dims", (Leaf(0), dims)),) == (found.call,)


def test_a_piece_of_a_piece_is_asked_about_as_the_call_that_is_made():
    """A whole of two rows, cut along two axes: the second axis sees one row, which does not go."""
    spec = spec_of(Mesh.of(2, 2), "S(0) S(0)", (2, 3))
    found = check(Propagator(OUR_RULES), "aten.squeeze.default", [spec])
    assert found.inputs == (spec,) and found.local_shapes() == ((1, 3), (0, 3), (1, 3), (0, 3))


# -- symbolic sizes


def symbol(rows=8):
    """A symbolic size with this example, and where its guards are."""
    shapes = ShapeEnv()
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    made = FakeTensorMode(shape_env=shapes).from_tensor(
        torch.ones(rows), symbolic_context=context, source=ConstantSource("x")
    )
    return made.shape[0], shapes


@pytest.mark.parametrize(
    ("op", "more"), [("aten.mul.Tensor", [2.0]), ("aten.mm.default", [Leaf(1)]), ("aten.view.default", [[-1, 2, 2]])]
)
def test_symbolic_sizes_are_answered_once_for_all_sizes_of_these_answers(op, more):
    rows, shapes = symbol()
    mesh, propagator = Mesh.of(dp=4), Propagator(OUR_RULES)

    def asked(size):
        specs = [Spec(mesh, (Shard(0),), (size, 4), torch.float32)]
        if more == [Leaf(1)]:
            specs.append(Spec(mesh, (Replicate(),), (4, 6), torch.float32))
        return propagator.propagate(op, specs, [Leaf(0), *more])

    found, wanted = asked(rows), asked(8)
    assert [spec.placements for spec in found.inputs] == [spec.placements for spec in wanted.inputs]
    assert found.outputs[0].placements == wanted.outputs[0].placements
    assert str(found.outputs[0].shape[0]) == str(rows) and found.seconds == wanted.seconds
    guards = " ".join(str(guard.expr) for guard in shapes.guards)
    assert f"Eq(Mod({rows}, 4), 0)" in guards and f"Eq({rows}, 8)" not in guards


def test_a_rule_that_needs_a_number_answers_for_the_example_and_the_log_says_why(caplog):
    def lines(query):
        assert query.tensors[0].shape[0] / 2 > 1
        yield PlacementRule((Shard(0),), (Shard(0),))

    rows, shapes = symbol()
    name = str(rows)  # the guard makes it a number
    book = RuleRegistry.of(*rules("pointwise", "each by itself", ["aten.exp.default"], lines))
    with caplog.at_level("INFO", "localtensor.propagation"):
        found = Propagator(book).propagate(
            "aten.exp.default", [Spec(Mesh.of(dp=4), (Shard(0),), (rows,), torch.float32)]
        )
    assert found.outputs[0].shape == (8,) and [str(guard.expr) for guard in shapes.guards] == [f"Eq({name}, 8)"]
    assert "aten.exp.default is planned for these sizes alone" in caplog.text and "TypeError" in caplog.text

"""The strategies: what they draw, in which order it shrinks, how it prints, how fast it comes, what they refuse."""

import time

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from localtensor.concurrency.schedule import replay
from localtensor.errors import LocalTensorError
from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, StridedShard, parse
from localtensor.testing import draws
from localtensor.testing.hypothesis_strategies.search import shard_order

SEARCH = settings(max_examples=1000, derandomize=True, database=None, deadline=None)
FAST = 40  # examples a second of processor time; an idle machine does hundreds, and this finds what is slower by far


def minimal(strategy, condition):
    return find(strategy, condition, settings=SEARCH)


def examples(strategy, count=300):
    found = []

    @settings(max_examples=count, derandomize=True, database=None, deadline=None)
    @given(strategy)
    def collect(value):
        found.append(value)

    collect()
    return found


def failing(strategy, condition):
    """What Hypothesis prints of the value in a failing example."""

    @settings(SEARCH, print_blob=False)
    @given(value=strategy)
    def fails(value):
        assert not condition(value)

    with pytest.raises(AssertionError) as error:
        fails()
    text = "\n".join(error.value.__notes__)
    return text.partition("value=")[2].rpartition(",\n)")[0]


# -- what comes


@pytest.mark.slow
def test_every_mesh_of_up_to_six_ranks_comes():
    meshes = {mesh.sizes for mesh in examples(draws.meshes(6, 2), 800)}
    want = {(n,) for n in range(1, 7)} | {(n, m) for n in range(1, 7) for m in range(1, 7) if n * m <= 6}
    assert meshes == want


def test_axes_have_the_names_that_are_asked_for():
    names = {mesh.names for mesh in examples(draws.meshes(names=("dp", "tp", "pp")), 100)}
    assert names == {("dp",), ("dp", "tp"), ("dp", "tp", "pp")}


def test_every_placement_that_means_something_comes():
    asked = draws.placements(2, kinds=draws.KINDS, dtype=torch.complex64)
    want = ["R", "S(0)", "S(1)", "P(sum)", "P(avg)", "P(product)", *(f"SS({d},{f})" for d in (0, 1) for f in (2, 3))]
    assert {repr(placement) for placement in examples(asked)} == {repr(parse(text)) for text in want}


def test_specs_have_uneven_and_empty_shards_nested_ones_and_dims_of_one_and_none():
    specs = examples(draws.specs(kinds=("R", "S"), min_ranks=2), 400)
    rows = [(spec.shape[p.dim], n) for spec in specs for p, n in zip(spec.placements, spec.mesh.sizes, strict=True)
            if isinstance(p, Shard)]  # fmt: skip
    assert any(size % ranks for size, ranks in rows if size > ranks)
    assert any(0 < size < ranks for size, ranks in rows)
    assert any(len(set(spec.placements)) < len(spec.placements) for spec in specs if Replicate() not in spec.placements)
    assert {0, 1} < {size for spec in specs for size in spec.shape}
    assert () in {spec.shape for spec in specs}


def test_shards_alone_are_of_tensors_that_have_a_dim():
    assert {len(spec.shape) for spec in examples(draws.specs(kinds=("S",)), 60)} == {1, 2, 3}


@pytest.mark.slow
def test_every_dtype_pattern_and_kind_comes():
    found = examples(draws.sharded(kinds=draws.KINDS), 400)
    assert {x.spec.dtype for x in found} == set(draws.DTYPES)
    assert {x.pattern for x in found} == set(draws.USUAL)
    assert {type(p) for x in found for p in x.spec.placements} == {Replicate, Shard, StridedShard, Partial}


def test_partials_are_mixed_only_where_their_order_does_not_matter():
    layouts = examples(draws.layouts(Mesh.of(2, 2, 2), (2,), kinds=("P",)), 400)
    mixed = {frozenset(p.reduce_op for p in layout) for layout in layouts}
    assert {kinds for kinds in mixed if len(kinds) > 1} == {frozenset({"sum", "avg"})}
    assert len(mixed) == 6


def test_a_dim_is_cut_in_other_orders_than_from_left_to_right():
    layouts = set(examples(draws.layouts(Mesh.of(2, 4), (16,), kinds=("S", "SS")), 200))
    assert (StridedShard(0, split_factor=4), Shard(0)) in layouts and (Shard(0), Shard(0)) in layouts


@pytest.mark.slow
def test_shard_orders_come_where_they_are_asked_for_alone():
    asked = {"kinds": ("R", "S", "SS", "P"), "min_dims": 1, "max_axes": 4}
    found = examples(draws.specs(orders=True, **asked), 120)
    assert {len(axes) for spec in found for _, axes in spec.shard_order} >= {2, 3}
    assert all(draws.read_spec(draws.spec_text(spec)) == spec for spec in found)
    assert not any(spec.shard_order for spec in examples(draws.specs(**asked), 60))


def test_a_dim_that_a_strided_shard_cuts_keeps_the_order_that_this_encodes():
    def orders(*placed):
        return set(examples(st.composite(lambda draw: shard_order(draw, placed))(), 30))

    blocks = StridedShard(0, split_factor=2)
    assert orders(blocks, Shard(0), Shard(0)) == {()}
    assert orders(Replicate(), Shard(0), Shard(0)) == {(), ((0, (2, 1)),)}


@pytest.mark.slow
def test_a_shard_order_shrinks_to_none_or_to_two_axes():
    long = minimal(draws.specs(orders=True), lambda spec: spec.shape and spec.shape[0] > 2)
    assert draws.spec_text(long) == "f32[3] @ a=1:R"
    turned = minimal(draws.specs(orders=True), lambda spec: spec.shard_order)
    assert draws.spec_text(turned) == "f32[1] @ a=1:S(0)[1], b=1:S(0)[0]"


def test_tensors_have_the_shape_and_dtype_asked_for_and_a_gradient_if_wanted():
    for dtype in draws.DTYPES:
        for x in examples(draws.tensors((3, 0, 2), dtype), 10):
            assert x.shape == (3, 0, 2) and x.dtype == dtype and not x.requires_grad
    assert all(x.requires_grad and x.is_leaf for x in examples(draws.tensors(requires_grad=True), 50))


def test_nan_and_infinities_come_where_they_are_asked_for_alone():
    floats = (torch.float32, torch.bfloat16)
    asked = examples(draws.tensors((3,), dtypes=floats, patterns=["nan", "inf"]), 50)
    assert all((~x.isfinite()).any() for x in asked)
    assert all(x.isfinite().all() for x in examples(draws.tensors(dtypes=floats), 200))


def test_extremes_do_not_wait_for_an_average():
    found = examples(draws.sharded("f32[2] @ a=2:P(avg)"), 100) + examples(draws.sharded("f32[2] @ a=2:P(sum)"), 100)
    assert {x.spec.placements[0].reduce_op for x in found if x.pattern == "extremes"} == {"sum"}


@pytest.mark.parametrize("policy", ["round_robin", "shuffled", "pct"])
def test_schedules_are_texts_that_replay(policy):
    texts = [text for text in examples(draws.schedules(), 100) if text.startswith(policy)]
    assert texts
    assert all(replay(text).text.startswith(policy) for text in texts)


def test_the_same_is_drawn_again_if_derandomized():
    asked = draws.sharded(kinds=draws.KINDS)
    first = examples(asked, 100)
    assert first == examples(draws.sharded(kinds=draws.KINDS), 100)
    assert len(set(first)) > 70


# -- in which order they shrink


@pytest.mark.slow
def test_meshes_shrink_to_fewer_ranks_then_to_fewer_axes():
    assert minimal(draws.meshes(), lambda mesh: True) == Mesh.of(1)
    assert minimal(draws.meshes(), lambda mesh: mesh.ranks >= 3) == Mesh.of(3)
    assert minimal(draws.meshes(), lambda mesh: len(mesh.sizes) == 2) == Mesh.of(1, 1)
    assert minimal(draws.meshes(), lambda mesh: len(mesh.sizes) > 1 and min(mesh.sizes) > 1) == Mesh.of(2, 2)
    assert minimal(draws.meshes(), lambda mesh: mesh.ranks > 5 and min(mesh.sizes) > 1) == Mesh.of(6)
    assert minimal(draws.meshes(min_ranks=3, min_axes=2), lambda mesh: True) == Mesh.of(1, 3)


def test_placements_shrink_to_replicate_then_to_the_first_dims():
    asked = draws.placements(3, kinds=draws.KINDS)
    assert minimal(asked, lambda placement: True) == Replicate()
    assert minimal(asked, lambda placement: placement != Replicate()) == Shard(0)
    assert minimal(asked, lambda placement: getattr(placement, "dim", 0) == 2) == Shard(2)
    assert minimal(asked, lambda placement: isinstance(placement, Partial | StridedShard)) == Partial("sum")


def test_layouts_shrink_axis_by_axis():
    asked = draws.layouts(Mesh.of(2, 2, 2), (4, 4), kinds=draws.KINDS)
    assert minimal(asked, lambda layout: Shard(1) in layout) == (Replicate(), Replicate(), Shard(1))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("condition", "text"),
    [
        (lambda spec: True, "f32[] @ a=1:R"),
        (lambda spec: spec.mesh.ranks > 2, "f32[] @ a=3:R"),
        (lambda spec: Shard(0) in spec.placements, "f32[1] @ a=1:S(0)"),
        (lambda spec: Shard(0) in spec.placements and spec.shape[0] % spec.mesh.sizes[0], "f32[1] @ a=2:S(0)"),
        (lambda spec: sum(p == Shard(0) for p in spec.placements) > 1, "f32[1] @ a=1:S(0), b=1:S(0)"),
        (lambda spec: spec.mesh.ranks > 1 and isinstance(spec.placements[0], Partial), "f32[] @ a=2:P(sum)"),
        (lambda spec: spec.dtype == torch.bool and len(spec.shape) == 2, "bool[1,1] @ a=1:R"),
        (lambda spec: 0 in spec.shape, "f32[0] @ a=1:R"),
    ],
)  # fmt: skip
def test_specs_shrink_to_the_simplest(condition, text):
    assert draws.spec_text(minimal(draws.specs(), condition)) == text


def test_shapes_shrink_to_fewer_dims_then_to_dims_of_one():
    assert minimal(draws.shapes(), lambda shape: True) == ()
    assert minimal(draws.shapes(), lambda shape: len(shape) > 1) == (1, 1)
    assert minimal(draws.shapes(), lambda shape: sum(shape) > 4) == (5,)


def test_tensors_shrink_to_smaller_shapes_then_to_simpler_values():
    assert minimal(draws.drawn(), lambda x: True) == draws.Drawn((), torch.float32, "zeros")
    assert minimal(draws.drawn(), lambda x: len(x.shape) == 2) == draws.Drawn((1, 1), torch.float32, "zeros")
    assert minimal(draws.drawn(), lambda x: x.tensor().any()) == draws.Drawn((), torch.float32, "ones")
    four = draws.drawn((4,), torch.int64)
    assert minimal(four, lambda x: len(x.tensor().unique()) == 4) == draws.Drawn((4,), torch.int64, "arange")
    assert minimal(four, lambda x: x.pattern == "normal") == draws.Drawn((4,), torch.int64, "normal", 0)


def test_a_wrong_rule_shrinks_to_two_ranks_and_a_scalar():
    def wrong(x):
        held = [piece + 1 for piece in x.pieces]
        return not torch.equal(draws.assemble(held, x.spec), x.whole + 1)

    small = (torch.float32, torch.int64)
    found = minimal(draws.sharded(dtypes=small), wrong)
    assert found == draws.Sharded.of("f32[] @ a=2:P(sum)", "zeros")


def test_schedules_shrink_to_round_robin():
    assert minimal(draws.schedules(), lambda text: True) == "round_robin"
    assert minimal(draws.schedules(), lambda text: text != "round_robin") == "shuffled:0"


# -- how they print


def test_what_fails_is_printed_as_a_call_that_makes_it_again():
    names = {"Sharded": draws.Sharded, "Drawn": draws.Drawn, "tensor_of": draws.tensor_of, "Spec": Spec, "Mesh": Mesh,
             "parse": parse, "torch": torch}  # fmt: skip
    big = draws.tensors((9, 9), patterns=["normal"])
    for strategy, condition, text in [
        (draws.meshes(), lambda mesh: mesh.ranks > 1, "Mesh((2,), ('a',))"),
        (draws.specs(kinds=("P",)), lambda spec: spec.mesh.ranks > 1,
         "Spec(Mesh((2,), ('a',)), (parse('P(sum)'),), (), torch.float32)"),
        (draws.drawn(), lambda x: x.pattern == "ties", "Drawn((), torch.float32, 'ties', 0)"),
        (draws.sharded(), lambda x: x.spec.mesh.ranks > 1, "Sharded.of('f32[] @ a=2:R', 'zeros', 0)"),
        (big, lambda x: x.is_complex(), "tensor_of(Drawn((9, 9), torch.complex64, 'normal', 0))"),
    ]:  # fmt: skip
        printed = failing(strategy, condition)
        assert printed == text
        assert condition(eval(printed, names))


def test_a_small_tensor_is_printed_as_torch_prints_it():
    assert failing(draws.tensors((2,)), lambda x: x.any()) == "tensor([1., 1.])"


# -- how fast they come


@pytest.mark.slow
def test_a_pointwise_property_of_four_ranks_is_tried_many_times_a_second():
    tried = []

    @settings(max_examples=300, derandomize=True, database=None, deadline=None)
    @given(draws.sharded(kinds=("R", "S"), min_ranks=4, max_ranks=4))
    def adding_one_works_shard_by_shard(x):
        tried.append(torch.equal(draws.assemble([piece + 1 for piece in x.pieces], x.spec), x.whole + 1))

    adding_one_works_shard_by_shard()  # caches fill, as in any session
    tried.clear()
    start = time.process_time()  # of this process: whatever else the machine does is not measured
    adding_one_works_shard_by_shard()
    assert tried == [True] * len(tried)
    assert len(tried) / (time.process_time() - start) > FAST


# -- what they refuse


REFUSALS = [
    (lambda: draws.meshes(0), "draws.meshes: max_ranks: max_ranks=0",
     "it is no whole number of at least 1. Pass a whole number from 1 up."),
    (lambda: draws.meshes(4, min_ranks=5), "draws.meshes: min_ranks: min_ranks=5",
     "it is more than max_ranks=4, so nothing is between them. Pass min_ranks <= max_ranks."),
    (lambda: draws.meshes(max_axes=2, names=("dp", "dp")), "draws.meshes: names: names=('dp', 'dp')",
     "these are not 2 different names. Pass a name for each axis, such as ('dp', 'tp')."),
    (lambda: draws.placements(-1), "draws.placements: ndim: ndim=-1",
     "it is no whole number of at least 0. Pass a whole number from 0 up."),
    (lambda: draws.placements(1, kinds=("Q",)), "draws.placements: kinds: kinds=('Q',)",
     "there is no 'Q'. Pass some of 'R', 'S', 'SS', 'P', 'P(sum)', 'P(avg)', 'P(min)', 'P(max)', 'P(product)'."),
    (lambda: draws.placements(0, kinds=("S",)), "draws.placements: kinds: kinds=('S',)",
     'a tensor of 0 dims can have none of them. Add "R" to the kinds.'),
    (lambda: draws.specs(dtype=torch.complex64, kinds=("P(min)",)), "draws.specs: kinds: kinds=('P(min)',)",
     'a tensor of 3 dims and torch.complex64 can have none of them. Add "R" to the kinds.'),
    (lambda: draws.specs(shape=(3, -1)), "draws.specs: shape: shape=(3, -1)",
     "it is no tuple of sizes of 0 or more. Pass a tuple such as (5, 3), () for a scalar, or None for any."),
    (lambda: draws.specs(4), "draws.specs: mesh: mesh=4", "it is no Mesh. Pass one such as Mesh.of(dp=2, tp=4)."),
    (lambda: draws.tensors(dtype="float32"), "draws.drawn: dtype: dtype='float32'",
     f"it is no torch.dtype. Pass one of {', '.join(map(str, draws.DTYPES))}, or None for any."),
    (lambda: draws.tensors(dtype=torch.int64, requires_grad=True), "draws.drawn: requires_grad: requires_grad=True",
     "a tensor of torch.int64 has no gradient. Pass a floating or complex dtype, or requires_grad=False."),
    (lambda: draws.sharded("f32[2]"), "draws.read_spec: text: text='f32[2]'",
     "this is no spec. Write it as 'f32[5,3] @ dp=2:S(0), tp=4:R'."),
    (lambda: draws.sharded("f32[2] @ a=2:R", kinds=("R",)), "draws.sharded: spec: spec='f32[2] @ a=2:R'",
     "beside kinds it leaves nothing to draw. Pass a spec, or what specs takes."),
    (lambda: draws.sharded(4), "draws.sharded: spec: spec=4",
     "it is no spec. Pass one, its text, or a strategy such as specs()."),
    (lambda: draws.op_calls("add"), "draws.op_calls: names: names='add'",
     "it is no tuple of names. Pass names in a tuple, such as ('add',)."),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "what", "why"), REFUSALS)
def test_what_cannot_be_drawn_is_refused_at_once(ask, what, why):
    with pytest.raises(LocalTensorError) as error:
        ask()
    assert str(error.value) == f"{what}: {why}"


@pytest.mark.parametrize("ask", [
    lambda: draws.meshes(True), lambda: draws.meshes(max_axes=9), lambda: draws.meshes(names=("a-b",)),
    lambda: draws.placements(1, kinds="RS"), lambda: draws.placements(1, kinds=()), lambda: draws.specs(dtypes=()),
    lambda: draws.layouts(Mesh.of(2), "abc"), lambda: draws.layouts((2,), (2,)), lambda: draws.specs(max_size=-1),
    lambda: draws.shapes(2, min_dims=3), lambda: draws.tensors(patterns=("random",)), lambda: draws.tensors((1.5,)),
    lambda: draws.tensors(dtype=torch.quint8), lambda: draws.layouts(Mesh.of(2), (2,), None),
    lambda: draws.op_calls(dtypes=("float32",)), lambda: draws.sharded(patterns="normal"),
])  # fmt: skip
def test_other_wrong_arguments_are_refused_too(ask):
    with pytest.raises(draws.BadDraw, match=r"^draws\.\w+: \w+: .+: .+\. .+\.$"):
        ask()


def test_the_package_has_the_names_that_it_promises():
    assert [name for name in draws.__all__ if not hasattr(draws, name)] == []
    assert isinstance(draws.specs(), st.SearchStrategy)

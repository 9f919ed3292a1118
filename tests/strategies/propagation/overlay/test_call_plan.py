"""Plans: what tells calls apart, and rules that say nonsense, refused with the place of the rule."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import localtensor as lt
from localtensor.concurrency import clear_all
from localtensor.layout.mesh import Mesh
from localtensor.layout.shards import split
from localtensor.layout.spec import Spec
from strategies.model.rule import Call, Leaf
from strategies.ops.semantics.local_call import InvalidRule
from strategies.ops.semantics.rule_registry import PlacementRule, RuleRegistry, rules
from strategies.propagation.overlay import call_plan
from strategies.propagation.overlay.call_plan import CallPlanner, TurnedAxes, global_metas, layout_text
from strategies.propagation.overlay.context import overlay_dtensor
from strategies.propagation.propagator import Propagator
from strategies.torch_api.specs import to_torch
from tests.strategies.small_book import RIGHT

X = torch.arange(12.0).reshape(4, 3)


@pytest.fixture
def mesh():
    with lt.LocalTensorMode(2):
        yield init_device_mesh("cpu", (2,))


def raising(ask):
    raise KeyError("no such thing")


NONSENSE = [
    (lambda ask: [PlacementRule((Shard(0),) * 2, (Shard(0),))], "the call has 1 tensors, the line speaks of 2"),
    (lambda ask: [PlacementRule((Shard(0),), ())], "the call has 1 results, the line speaks of 0"),
    (lambda ask: [ask.line({0: Shard(2)}, [Replicate()])], "tensor 0: S(2): there is no dim 2 in f32[4,3]"),
    (lambda ask: [ask.line({0: Shard(0)}, [Shard(-1)])], "result 0: S(-1): there is no dim -1 in f32[4,3]"),
    (
        lambda ask: [ask.line({0: _StridedShard(0, split_factor=2)}, [Shard(0)])],
        "SS(0,2) is not R, S(dim) or one of the five P",
    ),
    (lambda ask: ["S(0)"], "line: 'S(0)': it is no Line. Let it yield Line("),
    (raising, "line: KeyError: 'no such thing': it raised when asked about (f32[4,3],). Let it yield nothing"),
    (lambda ask: None, "line: TypeError"),
]


@pytest.mark.parametrize(("rule", "said"), NONSENSE)
def test_nonsense_is_refused_at_first_use_with_the_place_of_the_rule(mesh, rule, said):
    book = RuleRegistry.of(*rules("bad", "nonsense", ["aten.cumsum.default"], rule))
    with overlay_dtensor(book), pytest.raises(InvalidRule) as caught:
        distribute_tensor(X, mesh, [Shard(0)]).cumsum(0)
    message = str(caught.value)
    place = f"{__file__}:{rule.__code__.co_firstlineno}"
    assert message.startswith(f"rule of aten.cumsum.default at {place}: line: ") and said in message


def test_conditions_on_sizes_are_held_against_the_mesh(mesh):
    def only_even(ask):
        yield ask.line({0: Shard(0)}, [Partial("avg")], "even")

    book = RuleRegistry.of(*rules("mean", "of equal pieces", ["aten.mean.default"], only_even))
    with overlay_dtensor(book):
        even = distribute_tensor(X, mesh, [Shard(0)]).mean()
        uneven = distribute_tensor(X[:3], mesh, [Shard(0)]).mean()
    assert even.placements == (Partial("avg"),) and uneven.placements == (Replicate(),)
    assert even.full_tensor().reconcile() == X.mean() and uneven.full_tensor().reconcile() == X[:3].mean()


def test_a_plan_is_made_once_for_each_call_that_differs(mesh):
    x = distribute_tensor(X, mesh, [Shard(0)])
    with overlay_dtensor(RIGHT) as there:
        counts = []
        for dim in (0, 0, 1, -1, 0):
            x.cumsum(dim)
            counts.append(len(there.plans))
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            x.cumsum(0)
            counts.append(len(there.plans))
        torch.set_default_dtype(torch.float32)
    assert counts == [1, 1, 2, 3, 3, 3, 4]


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (0, False), (2.0, 2 + 0j)])
def test_numbers_that_are_equal_and_mean_different_things_are_distinguished(mesh, one, other):
    book = RuleRegistry.of(*rules("power", "each element by itself", ["aten.pow.Tensor_Scalar"], lambda ask: []))
    x = distribute_tensor(X, mesh, [Shard(0)])
    with overlay_dtensor(book) as there:
        for value in (one, other, one):
            torch.ops.aten.pow.Tensor_Scalar(x, value)
    assert one == other and len(there.plans) == 2


class Odd(float):
    """A number that no key holds: its class may mean anything."""


def test_a_call_that_no_key_can_hold_is_planned_each_time(mesh):
    asked = []

    def counted(ask):
        asked.append(ask)
        return []

    book = RuleRegistry.of(*rules("power", "each element by itself", ["aten.pow.Tensor_Scalar"], counted))
    entry, planner = book.entries["aten.pow.Tensor_Scalar"], CallPlanner()
    spec = distribute_tensor(X, mesh, [Shard(0)])._spec
    for count in (1, 2):
        ready = planner.ready(entry, Call(entry.op, (Leaf(0), Odd(2))), [spec], mesh)
        assert ready.moves == (0,) and ready.outputs[0].placements == (Replicate(),)
        assert (len(asked), len(planner)) == (count, 0)


def test_clearing_all_caches_forgets_plans_too(mesh):
    x = distribute_tensor(X, mesh, [Shard(0)])
    with overlay_dtensor(RIGHT) as there:
        before = x.cumsum(0).full_tensor()
        clear_all()
        assert len(there.plans) == 0
        assert torch.equal(x.cumsum(0).full_tensor().reconcile(), before.reconcile()) and len(there.plans) > 0


def test_strides_of_results_are_those_of_whole_tensors():
    given = TensorMeta(torch.Size((3, 4)), (1, 3), torch.float32)
    (meta,) = global_metas(Call("aten.clone.default", (Leaf(0),)), [given])
    assert meta is not None and (tuple(meta.shape), meta.stride) == ((3, 4), (1, 3))


def test_placements_on_several_axes_stand_in_brackets():
    assert layout_text([Shard(0)]) == "S(0)"
    assert layout_text([Shard(0), Replicate()]) == "(S(0), R)"


def test_fake_mode_has_one_lock_for_overlays_and_propagators(monkeypatch):
    """It keeps state of the process: two locks for it are none."""
    asked = []
    monkeypatch.setattr(call_plan, "on_meta_device", refusing)
    monkeypatch.setattr(call_plan, "output_metas", lambda call, metas, lock: asked.append(lock) or tuple(metas))
    given = [TensorMeta(torch.Size((3, 4)), (1, 3), torch.float32)]
    (meta,) = global_metas(Call("aten.clone.default", (Leaf(0),)), given)
    assert asked == [Propagator(RIGHT)._afresh.lock] and meta.stride == (4, 1)


def refusing(call):
    raise NotImplementedError("no meta kernel")


def turned_and_plain():
    """What an overlay says of a tensor whose axes take other turns, after the same tensor from left to right."""
    mesh = init_device_mesh("cpu", (2, 2))
    spec = Spec(Mesh.of(2, 2), (Shard(0), Shard(0)), (4, 3), torch.float32, ((0, (1, 0)),))
    turned = DTensor(split(X, spec)[dist.get_rank()].clone(), to_torch(spec, mesh), requires_grad=False)
    with overlay_dtensor(RIGHT):
        plain = distribute_tensor(X, mesh, spec.placements).exp()
        try:
            said = str(turned.exp())
        except TurnedAxes as error:
            said = str(error)
        moved = turned.redistribute(placements=[Replicate()] * 2).exp()
    return plain.full_tensor(), said, moved.full_tensor()


def test_a_tensor_whose_axes_take_other_turns_is_refused_and_not_taken_for_one_from_left_to_right():
    for plain, said, moved in lt.run(turned_and_plain, ranks=4).values:
        assert torch.equal(plain, X.exp()) and torch.equal(moved, X.exp())  # the remedy is one
        assert said == (
            "aten.exp.default under overlay_dtensor: tensors: Spec(f32[4, 3](S(0)[1]S(0)[0])): its axes do not cut from left "
            "to right, the order that rules assume. Redistribute it to replicas first: to the same "
            "placements DTensor moves nothing, and the order stays.")  # fmt: skip

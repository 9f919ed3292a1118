"""An op with what follows it, and on several axes: what only a program shows is found, what is right never."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from strategies.model.oracle import run_oracle
from strategies.model.rule import DTYPE_CLASSES, Program, overload
from strategies.model.verdict import Verdict
from strategies.programs import chained, mesh_validation
from strategies.programs import mesh_programs as redistributions
from strategies.programs.chained import (
    REDISTRIBUTIONS_PER_MESH,
    follow_up_programs,
    validate_on_meshes,
    validate_with_follow_ups,
)
from strategies.programs.mesh_validation import MESHES
from strategies.programs.run.follow_ups import BASE_WRITTEN, WRITES
from strategies.torch_api import dtensor
from strategies.validation.finding import OverloadTask
from strategies.validation.overload import KEPT_CANDIDATES
from strategies.validation.sources.dtensor import claims
from tests.strategies.cases import numbers, sample, silent
from tests.strategies.planted_ops import plant, planted
from tests.strategies.users import undone

X = numbers(4, 6)
plant("both_cut(Tensor x) -> Tensor", lambda x: x * (2 if 6 in x.shape else 3), "S")  # wrong where both dims are cut
BOTH = planted("both_cut", numbers(6, 6))
BOTH_CUT = {(Shard(0), Shard(1)), (Shard(1), Shard(0))}


@pytest.fixture
def registries():
    with undone():
        yield


@pytest.fixture(autouse=True)
def _no_public_programs(monkeypatch):
    """They run with a copy, and have tests of their own."""
    monkeypatch.setattr(chained.public_api, "try_public_programs", lambda *_, **__: (0, []))


def task_of(*samples, trial="pairs", mesh=(2,), **more):
    return OverloadTask(samples[0].op, samples, (mesh,), 0, trial, **more)


def only(found):
    """The one unit_result in which something was tried, or went wrong."""
    (unit_result,) = [h for h in found if h.samples or h.skipped or h.crashed]
    return unit_result


def keeps_maxima_times_anything():
    """DTensor's own rule for `x * y` gives way to a wrong one, which only a second op can show."""
    minus = overload("aten.mul.Tensor")
    for table in ("op_single_dim_strategy_funcs", "op_to_schema_info_for_single_dim_strategy"):
        getattr(dtensor.propagator(), table).pop(minus, None)
    register_sharding(minus)(lambda x, y: [([Partial("max")], [Partial("max"), None])])


# With what follows.


def lines_of(one):
    return claims(one, 2, run_oracle(one).outputs[0])


@pytest.mark.slow
@pytest.mark.usefixtures("registries")
def test_a_wrong_rule_is_found_through_what_follows_another_op():
    one = sample("amax.default", X, [0])
    right = only(validate_with_follow_ups(task_of(one), silent))
    keeps_maxima_times_anything()
    many = [
        sample("amax.default", numbers(4 + n, 6), [0]) for n in range(60)
    ]  # follow-up steps take turns over samples
    negated = [one for one in many if any(p.then == "times -1" for p in follow_up_programs(one, lines_of(one), (2,)))]
    wrong = only(validate_with_follow_ups(task_of(*negated[:2]), silent))
    assert right.suspects == {}
    assert "aten.alias.default on (2,): P(max), then times -1" in wrong.suspects
    found = [one for kept in wrong.suspects.values() for one in kept if one.instance.verdict is Verdict.UNSOUND]
    assert {one.program.then for one in found} <= {"times -1", "times 2"}


@pytest.mark.slow
def test_writes_through_views_are_tried_on_a_copy_alone_and_are_one_finding_for_a_layout_and_a_view():
    flat = numbers(1, 4)  # only the sample with most dims to shard is tried
    copy, other = (
        only(validate_with_follow_ups(task_of(sample(op, flat), sample(op, X)), silent))
        for op in ("clone.default", "neg.default")
    )
    rows = ("x[1:]", "x[-1]", "x.chunk(2)[0]", "x[::2]")
    columns, both = ("x.narrow(-1, 0, 1)", "x.split(1, -1)[0]", "x[..., -1]"), "x.diagonal(0, 0, -1)"
    copies = {(0, view) for view in (*rows, both)} | {(1, view) for view in (*columns, both)}
    views = {name for name in copy.suspects if re.search(r"then v = (?!.*of what was reshaped)", name)}
    assert views == {
        f"aten.clone.default on (2,): S({dim}), then v = {view}, {what}"
        for dim, view in copies
        for what in ("v is written", "x.mul_(-2)")
    }  # torch 2.13: a view of a sharded dim is a copy, unless it lists the rows
    writes = {one.program.then.rpartition(", ")[2] for name in views for one in copy.suspects[name]}
    assert writes <= {*WRITES, BASE_WRITTEN}
    assert other.suspects == {}


def programs_of(unit_result):
    return [suspect.program for found in unit_result.suspects.values() for suspect in found]


def test_right_rules_with_what_follows_them_are_not_suspected():
    unit_result = only(
        validate_with_follow_ups(task_of(sample("neg.default", X), sample("neg.default", numbers(5, 3))), silent)
    )
    assert (unit_result.suspects, unit_result.crashed, unit_result.skipped) == ({}, [], {})
    assert unit_result.samples == 2 and unit_result.tried > 10


def test_of_an_empty_result_nothing_is_tried():
    """DTensor looks for a view of an empty tensor for ever (torch 2.13)."""
    unit_result = only(validate_with_follow_ups(task_of(sample("neg.default", numbers(0, 3))), silent))
    assert (unit_result.samples, unit_result.tried, unit_result.skipped, unit_result.crashed) == (1, 0, {}, [])


def test_calls_before_are_those_of_the_same_task(monkeypatch):
    asked = []
    monkeypatch.setattr(chained, "follow_up_programs", lambda *_, before, **__: asked.append(before) or [])
    samples = (sample("neg.default", X), sample("neg.default", numbers(3)))
    validate_with_follow_ups(task_of(*samples), silent)
    assert [[id(one) for one in before] for before in asked] == [[id(one) for one in samples]] * 2


def mislays_where_no_weight_needs_a_gradient():
    """DTensor's own rule for the gradient of a layer norm gives way to one that is wrong without that of the weight."""
    backward = overload("aten.native_layer_norm_backward.default")
    for table in ("op_single_dim_strategy_funcs", "op_to_schema_info_for_single_dim_strategy"):
        getattr(dtensor.propagator(), table).pop(backward, None)

    def rule(gradient, x, shape, mean, rstd, weight, bias, mask):
        first = Replicate() if mask[1] else Partial("sum")
        takes = [p and Replicate() for p in (gradient, x, None, mean, rstd, weight, bias, None)]
        return [([first, Replicate(), Replicate()], takes)]

    register_sharding(backward)(rule)


@pytest.mark.slow
@pytest.mark.usefixtures("registries")
def test_a_gradient_that_is_wrong_where_another_is_not_needed_is_found_by_that_of_one_input_alone():
    norm = [
        sample("native_layer_norm.default", numbers(4, n), [n], numbers(n), numbers(n, seed=1), 1e-5)
        for n in range(5, 13)
    ]
    right = only(validate_with_follow_ups(task_of(*norm), silent))
    mislays_where_no_weight_needs_a_gradient()
    wrong = only(validate_with_follow_ups(task_of(*norm), silent))
    new = set(wrong.suspects) - set(right.suspects)
    assert new and all(name.endswith("alone") for name in new)


# On several axes.


@pytest.fixture(scope="module")
def both_cut():
    """The result for the op that is wrong where both dims are cut; no public programs run with it."""
    return only(validate_on_meshes(task_of(BOTH, trial="meshes", mesh=(2, 2)), silent))


@pytest.mark.slow
def test_a_rule_that_is_wrong_on_two_axes_only_is_found(both_cut):
    unit_result = both_cut
    assert BOTH_CUT & {p.inputs[0] for p in programs_of(unit_result) if p.sample.op == BOTH.op}
    assert (unit_result.samples, unit_result.crashed) == (1, [])


def test_a_right_rule_is_not_suspected_on_two_axes():
    """What a flattened submesh does to redistributions (torch 2.13) is told as that, and not of the op."""
    unit_result = only(
        validate_on_meshes(task_of(sample("neg.default", numbers(6, 6)), trial="meshes", mesh=(2, 2)), silent)
    )
    assert unit_result.tried > 3
    assert all(p.flattened and p.sample.op == "aten.clone.default" for p in programs_of(unit_result))


def test_claims_that_are_wrong_on_one_axis_are_not_put_on_several(monkeypatch):
    given = []
    monkeypatch.setattr(
        chained.mesh_validation, "try_meshes", lambda one, by_size, *_, **__: given.append(by_size) or []
    )
    validate_on_meshes(task_of(sample("cumprod.default", X, -1), trial="meshes", mesh=(2, 3)), silent)
    right = ["aten.cumprod.default: R -> R", "aten.cumprod.default: S(0) -> S(0)"]
    assert {n: sorted(str(c.rule) for c in kept) for n, kept in given[0].items()} == {2: right, 3: right}


def test_redistributions_are_drawn_once_a_mesh_with_the_op_that_does_nothing(monkeypatch):
    drawn = []

    def draw(mesh, *, seed, budget):
        drawn.append((mesh, seed, budget))
        return [Program(sample("clone.default", X), mesh, ((Shard(0), Replicate()),), "to (R, S(1))")]

    reshaped = [Program(sample("clone.default", X), (2, 2), ((Shard(0), Replicate()),), "swapped | transpose")] * 60
    monkeypatch.setattr(redistributions, "draw_redistributions", draw)
    monkeypatch.setattr(redistributions, "every_redistribution", lambda mesh, *, seed: draw(mesh, seed=seed, budget=0))
    monkeypatch.setattr(chained, "reshape_programs", lambda mesh, *, seed: reshaped)
    monkeypatch.setattr(chained.mesh_validation, "try_meshes", lambda *_, **__: [])
    same = sample("clone.default", X)
    notes = []
    unit_result = only(validate_on_meshes(task_of(same, same, trial="meshes", mesh=(2, 2)), notes.append))
    calls = [((2, 2), 0, REDISTRIBUTIONS_PER_MESH), ((2, 2), 0, 0)]
    assert (drawn, unit_result.tried, unit_result.samples) == (calls, 62, 2)
    # A worker whose number stays the same for long is ended: each batch has another, three of reshapes and one of redistributions.
    assert notes[-7:] == [0, 2, 0, 2, 0, 2, 1], notes
    validate_on_meshes(task_of(sample("neg.default", X), trial="meshes", mesh=(2, 2)), silent)
    assert drawn == calls


# Whatever one sample does.


@pytest.mark.parametrize(("trial", "hear", "mesh"), [
    ("pairs", validate_with_follow_ups, (2,)), ("meshes", validate_on_meshes, (2, 2)),
], ids=["pairs", "meshes"])  # fmt: skip
def test_a_crash_and_a_refusal_of_one_sample_cost_that_sample(trial, hear, mesh):
    samples = (planted("trips", numbers(3)), planted("trips", numbers(8)), planted("fussy", numbers(3).abs() + 9))
    unit_result = only(hear(task_of(*samples, trial=trial, mesh=mesh), silent))
    assert [(c.op, c.error) for c in unit_result.crashed] == [("planted.trips.default", "ZeroDivisionError: three")]
    assert unit_result.skipped == {"ValueError: every element must be at most 1": 1}
    assert unit_result.samples == 1 and unit_result.tried > 0


@pytest.mark.parametrize("error", [AttributeError(), NotImplementedError("no\nmore")], ids=repr)
def test_what_dtensor_or_the_op_cannot_do_is_counted_in_one_line(error, monkeypatch):
    def raises(*_, **__):
        raise error

    monkeypatch.setattr(mesh_validation, "claims", raises)
    unit_result = only(validate_with_follow_ups(task_of(sample("neg.default", X)), silent))
    said = str(error).partition("\n")[0] or "-"
    assert (unit_result.skipped, unit_result.samples, unit_result.crashed) == (
        {f"{type(error).__name__}: {said}": 1},
        0,
        [],
    )


# What is kept.


def test_a_suspect_carries_its_program_and_what_was_seen(both_cut):
    unit_result = both_cut
    assert all(0 < len(kept) <= KEPT_CANDIDATES for kept in unit_result.suspects.values())
    (suspect, *_) = [s for kept in unit_result.suspects.values() for s in kept if s.program.inputs[0] in BOTH_CUT]
    instance, last = suspect.instance, suspect.program.inputs[0][-1]
    assert suspect.name in unit_result.suspects
    assert (instance.verdict, instance.ranks, instance.source) == (Verdict.UNSOUND, 4, "simulated")
    assert (instance.rule.op, instance.rule.inputs) == (BOTH.op, (last,))
    assert ", expected " in instance.evidence.reason and instance.evidence.got != instance.evidence.want


def test_every_unit_has_a_result_and_each_step_is_noted():
    noted = []
    one = task_of(sample("neg.default", X), sample("neg.default", torch.tensor([1, 2, 3])))
    found = validate_with_follow_ups(one, noted.append)
    assert [h.unit.dtypes for h in found] == sorted(DTYPE_CLASSES)
    assert {h.unit.dtypes for h in found if h.samples} == {"real", "integer"}
    assert set(noted) == {0, 1}


def test_what_killed_a_worker_is_left_out():
    one = task_of(sample("neg.default", X), sample("neg.default", numbers(5)), skip=frozenset([0]))
    assert only(validate_with_follow_ups(one, silent)).samples == 1


@pytest.mark.slow
def test_the_same_seed_gives_the_same(both_cut):
    again = only(validate_on_meshes(task_of(BOTH, trial="meshes", mesh=(2, 2)), silent))
    assert repr(both_cut) == repr(again)


def test_a_type_error_of_ours_is_a_crash_and_no_refusal(monkeypatch):
    def slips(*_, **__):
        raise TypeError("ours")

    monkeypatch.setattr(chained, "follow_up_programs", slips)
    unit_result = only(validate_with_follow_ups(task_of(sample("neg.default", X)), silent))
    assert ([c.error for c in unit_result.crashed], unit_result.skipped) == (["TypeError: ours"], {})


def test_the_follow_up_steps_that_had_no_turn_are_recorded():
    found = only(validate_with_follow_ups(task_of(sample("neg.default", X)), silent))
    left = found.left_out["steps without a turn"]
    assert left and len(set(left)) == len(left)
    assert set(left) < {name for family in chained._FAMILIES for name in family}
    assert not {"softmax", "clamp"} & set(left), "neg gives no placement of DTensor's own"
    few = task_of(*[sample("neg.default", numbers(4 + i, 6)) for i in range(3)])
    again = only(validate_with_follow_ups(few, silent)).left_out["steps without a turn"]
    assert len(again) < len(left)


INTEGERS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("samples", "tried", "left"),
    [
        ((X, INTEGERS), {"real": 3, "integer": 1}, ["2x2", "2x2x2"]),
        ((INTEGERS,), {"integer": 3}, []),  # an op of integers alone
    ],
    ids=["beside floats", "alone"],
)
def test_integers_beside_floats_are_tried_on_the_mesh_with_the_longest_axis(monkeypatch, samples, tried, left):
    monkeypatch.setattr(chained, "_meshes", play := lambda *_: ([], []))
    task = OverloadTask("aten.neg.default", tuple(sample("neg.default", x) for x in samples), MESHES, 0, "meshes")
    found = chained._each(task, silent, play)
    counts = Counter(result.unit.dtypes for result in found if result.samples)
    assert counts == tried
    assert {r.unit.mesh for r in found if r.samples and r.unit.dtypes == "integer"} == (
        {(2, 3)} if left else set(MESHES)
    )
    assert [one for result in found for one in result.left_out.get("meshes without a turn", [])] == left


def test_samples_of_one_class_take_turns_on_the_meshes(monkeypatch):
    monkeypatch.setattr(chained, "_meshes", play := lambda task, number, oracle, mesh, *_: ([f"{number} {mesh}"], []))
    task = OverloadTask("aten.neg.default", tuple(sample("neg.default", X + n) for n in range(3)), MESHES, 0, "meshes")
    found = chained._each(task, silent, play)
    counts = [(result.unit.mesh, result.samples) for result in found if result.samples]
    assert sorted(counts) == [(mesh, 1) for mesh in sorted(MESHES)]
    two = [result.samples for result in chained._each(replace(task, samples=task.samples[:2]), silent, play)]
    assert sorted(two)[-3:] == [1, 1, 1] and sum(two) == 3, "of fewer samples than meshes, one is tried on several"


def test_public_calls_and_redistributions_are_tried_on_each_mesh_whole_whichever_samples_it_has(monkeypatch):
    asked, moved = [], []
    monkeypatch.setattr(
        chained.public_api, "try_public_programs", lambda meshes, **o: asked.append((meshes, o)) or (0, [])
    )
    monkeypatch.setattr(chained.redistributions, "draw_redistributions", lambda mesh, **_: moved.append(mesh) or [])
    monkeypatch.setattr(chained.redistributions, "every_redistribution", lambda mesh, **_: [])
    monkeypatch.setattr(chained, "reshape_programs", lambda mesh, **_: [])
    monkeypatch.setattr(chained.mesh_validation, "try_meshes", lambda *_, **__: [])
    samples = tuple(sample("clone.default", x) for x in (X, X + 1, INTEGERS, X + 2))
    validate_on_meshes(OverloadTask("aten.clone.default", samples, MESHES, 0, "meshes"), silent)
    parts = {mesh: [(o["share"], o["shares"]) for (one,), o in asked if one == mesh] for mesh in MESHES}
    assert parts == {(2, 2): [(0, 1)], (2, 3): [(0, 2), (1, 2)], (2, 2, 2): [(0, 1)]}
    assert sorted(moved) == sorted(MESHES)


def test_a_resumed_run_tries_integers_on_no_other_mesh(monkeypatch):
    monkeypatch.setattr(chained, "_meshes", play := lambda *_: ([], []))
    samples = tuple(sample("neg.default", x) for x in (X, INTEGERS))
    task = OverloadTask("aten.neg.default", samples, MESHES, 0, "meshes")
    left = frozenset(unit for unit in task.units() if unit.mesh != (2, 3))
    found = chained._each(replace(task, only=left), silent, play)
    assert {result.unit.dtypes for result in found if result.samples} == {"real"}

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from strategies.model.rule import Claim, overload
from strategies.model.verdict import Verdict, WorkUnit, read_unit
from strategies.programs.run.real_run import run_simulated_programs
from strategies.sweep.causes.attribution import AttributionTask, attribution
from strategies.torch_api import rank_runs
from strategies.torch_api.code_places import refusal_text
from strategies.validation import overload as trial
from strategies.validation.finding import OverloadTask, TaskResult, case_of, merge_candidates
from strategies.validation.overload import END_TO_END_SAMPLES, KEPT_CANDIDATES, validate_overload
from strategies.validation.sources import dtensor as claim_sources
from strategies.validation.sources import dtensor as dtensor_source
from strategies.validation.sources.dtensor import PARTIALS
from tests.strategies.cases import numbers, rule, sample, silent
from tests.strategies.planted_ops import planted
from tests.strategies.wrong_here import if_cumprod_is_wrong

X = numbers(4, 6)


def by_unit(*samples, ranks=(2,), seed=0, **options):
    return validate_overload(OverloadTask(samples[0].op, samples, tuple((n,) for n in ranks), seed, **options), silent)


def validated(*samples, **options):
    """The results of all units as one."""
    found = by_unit(*samples, **options)
    return TaskResult(
        found[0].unit, sum(h.samples for h in found), sum(h.tried for h in found), sum(h.combinations for h in found),
        {n for h in found for n in h.sound}, {n for h in found for n in h.by_metadata},
        merge_candidates([h.suspects for h in found], KEPT_CANDIDATES), merge_candidates([h.whole for h in found], END_TO_END_SAMPLES),
        [i for h in found for i in h.missing], {k: v for h in found for k, v in h.untestable.items()},
        sum((h.skipped for h in found), Counter()), [c for h in found for c in h.crashed],
    )  # fmt: skip


def case(suspect, seed=0):
    return case_of(suspect.instance, seed)


@pytest.fixture
def no_forms(monkeypatch):
    """Each sample is tried as it is given, and not in other forms."""
    monkeypatch.setattr(trial, "variations", lambda one, oracle, number, **_: iter([(one, oracle, "")]))
    monkeypatch.setattr(trial.Undrawn, "calls", lambda *_: iter(()))


@pytest.fixture
def as_given(no_forms, monkeypatch):
    """Each sample is tried as it is given, with its own values."""
    monkeypatch.setattr(trial, "adverse", lambda *_, **__: {})


def lines(rules):
    return sorted(str(rule).partition(": ")[2] for rule in rules)


def strategy_of(one, function, monkeypatch):
    functions = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    monkeypatch.setitem(functions, overload(one.op), function)


# Suspects.


@pytest.mark.usefixtures("as_given")
@if_cumprod_is_wrong
def test_cumprod_along_a_negative_dim_is_suspected_on_that_dim_and_on_no_other():
    unit_result = validated(sample("cumprod.default", X, -1))
    assert lines(unit_result.suspects) == ["S(1) -> S(1)"]
    assert lines(unit_result.sound) == ["R -> R", "S(0) -> S(0)"]


@pytest.mark.usefixtures("as_given")
@if_cumprod_is_wrong
def test_a_charge_has_the_evidence_and_what_each_rank_was_given():
    (charges,) = validated(sample("cumprod.default", X, -1), seed=7).suspects.values()
    (charge,) = charges
    assert charge.instance.verdict is Verdict.UNSOUND
    assert charge.instance.evidence.reason.startswith("as S(1): the shards make")
    assert torch.equal(torch.cat(case(charge, seed=7).held[0], 1), X)
    assert (charge.instance.ranks, str(case(charge).rule)) == (2, "aten.cumprod.default: S(1) -> S(1)")


@pytest.mark.usefixtures("as_given")
@if_cumprod_is_wrong
def test_the_smallest_cases_are_kept_those_of_few_ranks_first():
    shapes = [(6, 12), (4, 6), (2, 24), (8, 6), (4, 3)]
    unit_result = validated(*(sample("cumprod.default", numbers(*shape), -1) for shape in shapes), ranks=(3, 2))
    (charges,) = [c for line, c in unit_result.suspects.items() if line.endswith("S(1) -> S(1)")]
    kept = [(charge.instance.ranks, charge.instance.sample.size) for charge in charges]
    assert kept == [(2, 12), (2, 24), (2, 48)]
    assert len(kept) == KEPT_CANDIDATES


@pytest.mark.usefixtures("no_forms")
def test_ordinary_values_are_kept_before_not_a_number():
    """`patched` is wrong where there is a NaN: the larger sample has one of its own."""
    small, large = numbers(4, 4), numbers(8, 4)
    large[0, 0] = torch.nan
    charges = validated(planted("patched", small), planted("patched", large)).suspects[
        "planted.patched.default: S(0) -> S(0)"
    ]
    assert [(c.instance.evidence.variant, c.instance.sample.size) for c in charges] == [("", 32), ("specials", 16)]


@pytest.mark.usefixtures("as_given")
def test_a_case_holds_the_very_draw_that_showed_it(monkeypatch):
    one = sample("ne.Scalar", X, 0.0)
    monkeypatch.setattr(dtensor_source, "claims", lambda *_: [Claim(rule(one, "P(sum) -> R"), "test")])
    ((charge,),) = validated(one).suspects.values()
    assert charge.instance.evidence.draw == 1
    assert any((held == 0).any() for held in case(charge).held[0])


# What cannot be judged here.


@pytest.mark.usefixtures("as_given")
def test_claims_for_the_real_dispatch_are_put_aside_with_their_cases():
    columns = range(
        END_TO_END_SAMPLES + 6, 4, -1
    )  # each smaller than the one before, so that the last would be liked best
    unit_result = validated(*(sample("argmax.default", numbers(4, n), 0) for n in columns), ranks=(2, 3))
    assert unit_result.suspects == {}
    assert "S(1) -> S(0)" in lines(unit_result.whole)
    for charges in unit_result.whole.values():
        sizes = [charge.instance.sample.size for charge in charges]
        assert len(sizes) == END_TO_END_SAMPLES and min(sizes) == 4 * columns[END_TO_END_SAMPLES - 1]


@pytest.mark.usefixtures("as_given")
def test_placements_of_dtensors_own_are_given_replicated_where_they_come_in():
    unit_result = validated(sample("embedding.default", X, torch.tensor([0, 3])))
    (charge,) = unit_result.whole["aten.embedding.default: S(0), P(mask) -> P(mask)"]
    assert str(case(charge).rule) == "aten.embedding.default: S(0), R -> P(mask)"


def test_a_random_op_is_sound_by_metadata_and_listed_as_such():
    unit_result = validated(sample("rand_like.default", X))
    assert "S(0) -> S(0)" in lines(unit_result.by_metadata)
    assert unit_result.by_metadata <= set(unit_result.sound)
    assert validated(sample("relu.default", X)).by_metadata == set()


def test_what_means_nothing_for_a_dtype_is_untestable_and_says_why():
    unit_result = validated(sample("neg.default", numbers(4, dtype=torch.complex64)))
    assert unit_result.untestable == {
        "aten.neg.default: P(max) -> P(min)": "P(max) means nothing for this dtype",
        "aten.neg.default: P(min) -> P(max)": "P(min) means nothing for this dtype",
    }
    assert "P(sum) -> P(sum)" in lines(unit_result.sound)


# What is skipped, and why.


@pytest.mark.usefixtures("as_given")
def test_a_sample_that_the_op_refuses_is_counted():
    unit_result = validated(
        sample("mm.default", numbers(2, 3), numbers(2, 3)), sample("mm.default", numbers(2, 3), numbers(3, 4))
    )
    assert unit_result.skipped == {"the op refuses this sample: RuntimeError": 1}
    assert unit_result.samples == 1


def test_a_sample_that_noise_moves_says_nothing():
    unit_result = validated(sample("floor.default", torch.arange(6.0)))
    assert unit_result.skipped == {"ill-conditioned: one-ulp noise moves most of the result": 1}
    assert (unit_result.samples, unit_result.tried) == (0, 0)


@pytest.mark.usefixtures("as_given")
def test_how_many_placement_tuples_of_a_decomposition_are_drawn_is_said_for_each_mesh_size(monkeypatch):
    monkeypatch.setattr(claim_sources, "MOST_TRACES", 2)
    unit_result = validated(sample("absolute.default", X), ranks=(2, 3))
    assert unit_result.skipped == {"DTensor has 3 placement tuples through this decomposition; 2 are drawn": 2}


@pytest.mark.usefixtures("as_given")
@pytest.mark.parametrize(("error", "said"), [
    (ValueError("no such dim\nmore"), "ValueError: no such dim"),
    (AssertionError(), "AssertionError: -"),
], ids=["with words", "without words"])  # fmt: skip
def test_a_strategy_of_dtensors_that_raises_is_counted_and_is_no_crash(error, said, monkeypatch):
    def raises(schema):
        raise error

    one = planted("forgotten", X)
    strategy_of(one, raises, monkeypatch)
    unit_result = validated(one)
    assert unit_result.skipped == {f"DTensor's own rule raises {said}": 1}
    assert unit_result.crashed == []


@pytest.mark.usefixtures("as_given")
def test_a_strategy_that_does_not_return_is_a_refused_call_on_lockstep_ranks_too(monkeypatch):
    def stays(schema):
        while True:
            pass

    monkeypatch.setattr(trial, "CALL_SECONDS", 0.3)
    monkeypatch.setattr(rank_runs, "CALL_SECONDS", 0.3)
    one = planted("forgotten", X)
    strategy_of(one, stays, monkeypatch)
    unit_result = validated(one, ranks=(2, 3))
    place = f"no return within 0.3 s of processor time from stays (test_overload.py:{stays.__code__.co_firstlineno})"
    assert unit_result.skipped == {f"DTensor's own rule: {place}": 2}
    assert unit_result.crashed == []
    ((candidate,),) = unit_result.suspects.values()
    assert candidate.instance.verdict is Verdict.REFUSED
    assert (
        candidate.instance.evidence.reason
        == f"no rank returns{place.removeprefix('no return')}; the op takes the whole tensors"
    )
    (run,) = run_simulated_programs([candidate.program])
    assert (run.wrong, run.refused) == ("", place)
    found = attribution(AttributionTask("endless", refusal_text(place), (candidate,), False, 0), silent)
    assert (found.kind, found.place.name, found.program) == ("rule", "stays", candidate.program)


@pytest.mark.usefixtures("as_given")
def test_later_samples_of_a_decomposition_are_not_traced_with_partials(monkeypatch):
    asked = []
    monkeypatch.setattr(dtensor_source, "claims", lambda one, ranks, oracle, alone: asked.append(alone.partials) or [])
    validated(*[sample("absolute.default", X)] * (PARTIALS + 2))
    assert asked == [True] * PARTIALS + [False] * 2


@pytest.mark.usefixtures("as_given")
def test_a_call_of_which_dtensor_says_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(dtensor_source, "claims", lambda *_: [])
    unit_result = validated(sample("neg.default", X), sample("neg.default", numbers(4)), ranks=(2, 3))
    assert unit_result.skipped == {"DTensor claims nothing about this call": 4}
    assert (unit_result.samples, unit_result.tried, unit_result.sound) == (4, 0, set())


# Crashes.


@pytest.mark.usefixtures("as_given")
@pytest.mark.parametrize("where", ["in the op", "on a shard"])
def test_a_crash_of_one_sample_leaves_the_rest(where):
    bad = numbers(3) if where == "in the op" else numbers(6)
    unit_result = validated(planted("trips", numbers(4)), planted("trips", bad), planted("trips", numbers(8)))
    (crash,) = unit_result.crashed
    assert crash.error == "ZeroDivisionError: three"
    assert crash.sample == f"planted.trips.default(f64[{len(bad)}]) from test"
    assert "in trips" in crash.trace
    assert lines(unit_result.sound) == ["R -> R", "S(0) -> S(0)"]
    assert unit_result.suspects == {}


def test_a_crash_of_another_form_keeps_what_came_before(monkeypatch):
    def variations(one, oracle, number, **_):
        yield one, oracle, ""
        raise ZeroDivisionError("in a form")

    monkeypatch.setattr(trial, "variations", variations)
    unit_result = validated(planted("trips", numbers(4)))
    assert [crash.error for crash in unit_result.crashed] == ["ZeroDivisionError: in a form"]
    assert lines(unit_result.sound) == ["R -> R", "S(0) -> S(0)"]


def test_steps_are_noted_before_they_are_taken_and_those_to_skip_are_not():
    noted = []
    samples = tuple(planted("trips", numbers(n)) for n in (4, 3, 8))
    task = OverloadTask(samples[0].op, samples, ((2,), (4,)), 0, skip=frozenset([step_of(1, 0), step_of(1, 1)]))
    validate_overload(task, noted.append)
    assert set(noted) == {task.oracle_step(0), 0, 1, task.oracle_step(2), 4, 5}
    assert [noted.index(n) for n in (task.oracle_step(0), 0, 1)] == [0, 1, 2]


def step_of(sample, mesh):
    return 2 * sample + mesh


@pytest.mark.usefixtures("as_given")
def test_an_oracle_that_killed_a_worker_is_not_reported_again():
    samples = (planted("trips", numbers(3)), planted("trips", numbers(8)))
    task = OverloadTask(samples[0].op, samples, ((2,),), 0)
    found = validate_overload(replace(task, skip=frozenset([task.oracle_step(0)])), silent)
    assert [(h.samples, h.crashed) for h in found if h.unit.dtypes == "real"] == [(1, [])]


# Units.


@pytest.mark.usefixtures("as_given")
def test_each_class_of_dtypes_and_each_mesh_is_a_unit_and_has_its_own():
    samples = (sample("neg.default", X), sample("neg.default", numbers(4, dtype=torch.complex64)))
    found = by_unit(*samples, ranks=(2, 3))
    assert [str(h.unit) for h in found] == [
        f"aten.neg.default alone {dtypes} {ranks}" for dtypes in ("bool", "complex", "integer", "real")
        for ranks in (2, 3)
    ]  # fmt: skip
    assert [(h.samples, bool(h.sound), bool(h.untestable)) for h in found] == [
        (0, False, False), (0, False, False), (1, True, True), (1, True, True), (0, False, False), (0, False, False),
        (1, True, False), (1, True, False),
    ]  # fmt: skip


@pytest.mark.usefixtures("as_given")
def test_only_the_units_that_are_wanted_are_tried():
    samples = (sample("neg.default", X), sample("neg.default", numbers(4, dtype=torch.complex64)))
    wanted = WorkUnit("aten.neg.default", "alone", "complex", (3,))
    (only,) = by_unit(*samples, ranks=(2, 3), only=frozenset([wanted]))
    every = {h.unit: h for h in by_unit(*samples, ranks=(2, 3))}
    assert only == every[wanted]
    assert only.samples == 1


def test_an_overload_without_samples_has_its_units_all_the_same():
    task = OverloadTask("aten.neg.default", (), ((2,),), 0)
    assert [h.unit for h in validate_overload(task, silent)] == list(task.units())
    assert read_unit("aten.neg.default alone real 2") in task.units()


# The same seed.


def test_the_same_seed_gives_the_same_results():
    samples = (sample("cumprod.default", X, -1), sample("cumprod.default", numbers(4, 4), 0))
    first, again = (repr(validated(*samples, ranks=(2, 3), seed=1, search=True)) for _ in range(2))
    assert first == again


def test_other_values_are_tried_on_all_meshes_at_first_and_then_on_one_after_another():
    task = OverloadTask("aten.neg.default", (sample("neg.default", X),), ((2,), (3,), (4,)), 0)
    recorder = trial.Recorder(task)
    turns, seen = recorder.turns(task.samples[0]).values, []
    for turn in range(1, 8):
        turns["ties"] = turn
        seen.append([i for i in range(3) if recorder.on_mesh({"ties": None}, task.samples[0], i, range(3))])
    assert seen == [[0, 1, 2], [2], [0], [1], [2], [0], [1]]


def meshes_of(form, turns, **options):
    """The meshes on which each of these calls is tried: that of a sample by its number, that of a form by its turn."""
    samples = tuple(sample("neg.default", numbers(4, n)) for n in range(2, 14))
    recorder = trial.Recorder(OverloadTask("aten.neg.default", samples, ((2,), (3,), (4,)), 0, **options))
    found = []
    for turn in turns:
        recorder.turns(samples[0]).forms[form] = turn
        found.append(recorder.meshes_in_turn(0 if form else turn, form))
    return found


def test_in_a_sweep_of_torchs_rules_later_calls_leave_out_meshes_in_turn():
    assert meshes_of("", range(2, 10)) == [[0, 1, 2], [1, 2], [0, 2], [0, 1], [1], [2], [0], [1]]
    assert meshes_of("scalar", range(1, 5)) == [[0, 1, 2], [0], [1], [2]]


def test_rules_of_a_module_and_searches_are_tried_on_all_meshes():
    for options in ({"home": ("my_rules", ".")}, {"search": True}):
        assert meshes_of("", range(2, 10), **options) == [[0, 1, 2]] * 8


def test_of_many_samples_later_values_are_tried_on_one_mesh_after_another(monkeypatch):
    asked = Counter()

    def check(one, oracle, ranks, claims, *, seed, variants, by_dtensor):
        asked.update((name, ranks) for name in variants)
        return []

    monkeypatch.setattr(trial, "check_claims", check)
    by_unit(*(sample("neg.default", numbers(4, n)) for n in range(3, 27)), ranks=(2, 3, 4))
    by_kind = {name: [asked[name, ranks] for ranks in (2, 3, 4)] for name, _ in asked}
    assert len(by_kind) > 10
    assert [counts for counts in by_kind.values() if min(counts) < 2] == []
    assert [counts for counts in by_kind.values() if sum(counts) > 16] == []  # of 24, and three at first


def test_of_many_samples_each_mesh_has_those_that_do_not_leave_it_out(as_given):
    samples = [sample("neg.default", numbers(4, n)) for n in range(3, 21)]
    tried = [unit.samples for unit in by_unit(*samples, ranks=(2, 3, 4)) if unit.samples]
    assert tried == [3 + 2 + 4] * 3

"""The gate from its options to its exit code, on small modules of rules.  What git says of them: tests/end_to_end/gate."""

import datetime as dt
from pathlib import Path

import pytest

from strategies.base.progress import Progress
from strategies.gate import plan as gate_work
from strategies.gate import verdict_cache
from strategies.gate.baseline import Baseline, BaselineEntry, ChosenOverload, FindingKey
from strategies.gate.changes.select import Selection
from strategies.gate.options import GateOptions
from strategies.gate.plan import NO_TIME, make_plan, run_plan
from strategies.model.settings import UnknownOp
from tests.strategies import users

TODAY = dt.date(2026, 11, 21)
TWO = 'op("twice", lambda x: x * 2, (R, R), (S0, S0))\nop("thrice", lambda x: x * 3, (R, R))\n'
WRONG = TWO + 'op("running", lambda x: x.cumsum(0), (R, R), (S0, S0))\n'
NONE = Baseline(Path("b.json"), "2.13.0", (), "text")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verdict_cache, "tool_digest", lambda: "these modules")


def found(name, body, start=0.0, dtypes=("float64",), **options):
    """What the gate makes of a module of this body, imported anew, before anybody has accepted anything."""
    users.write(Path.cwd(), name, body)
    asked = GateOptions(rules=name, ranks=(2,), workers=1, dtypes=dtypes, **options)
    with users.undone():
        return run_plan(asked, make_plan(asked, Path.cwd(), start), Progress())


def result_of(*given, **options):
    return found(*given, **options).beside(NONE, TODAY)


def ops(work):
    return [op.split(".")[1] for op in sorted(work.tried.ops)]


# Equal runs.


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """A cold run and a warm one, of a module with a wrong rule."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("wrong"))
        patch.setattr(verdict_cache, "tool_digest", lambda: "these modules")
        cold = found("gate_wrong", WRONG, dtypes=())

        def never(*_):
            raise AssertionError("nothing is to be tried")

        patch.setattr("strategies.sweep.session.run_validation", never)
        return cold, found("gate_wrong", WRONG, dtypes=())


def test_a_wrong_rule_fails_with_that_rule_and_its_place(wrong):
    (judged,) = wrong[0].beside(NONE, TODAY).new
    assert judged.finding.name == "gate_wrong.running.default: S(0) -> S(0)"
    assert {key.dtypes for key in judged.keys} == {"real", "complex", "integer", "bool"}
    assert judged.finding.confirmed_on == "gloo" and judged.place.file == "gate_wrong.py"


def test_an_equal_run_is_remembered_and_says_the_same(wrong):
    cold, warm = (one.beside(NONE, TODAY) for one in wrong)
    assert (cold.remembered, [op.split(".")[1] for op in warm.remembered]) == ((), ["running", "thrice", "twice"])
    assert warm.findings == cold.findings and warm.report.counts == cold.report.counts
    assert (warm.judged, warm.exit_code) == (cold.judged, cold.exit_code)


def test_what_is_remembered_can_be_gone_as_well(wrong):
    key = FindingKey("gate_wrong.twice.default", "S(0) -> S(0)", "real", "1 axis")
    held = Baseline(Path("b.json"), "2.13.0", (BaselineEntry(key, "known"),), "text")
    assert [[e.key for e in one.beside(held, TODAY).gone] for one in wrong] == [[key], [key]]


def test_only_what_was_edited_is_tried_again():
    assert ops(found("gate_edited", TWO)) == ["thrice", "twice"]
    edited = found("gate_edited", TWO.replace("x * 3, (R, R)", "x * 3, (R, R), (S1, S1)"))
    assert edited.remembered == ("gate_edited.twice.default",) and ops(edited) == ["thrice", "twice"]


def test_without_a_cache_nothing_is_kept():
    assert found("gate_uncached", TWO, no_cache=True).remembered == ()
    assert not Path(".localtensor-cache").exists()


def test_samples_of_the_modules_own_are_not_remembered():
    body = TWO + "\ndef samples(op):\n    yield (torch.ones(4),), {}\n"
    assert [found("gate_sampled", body).remembered for _ in range(2)] == [(), ()]


def test_rules_that_are_nowhere_in_the_project_are_not_remembered(monkeypatch):
    monkeypatch.setattr(gate_work, "rule_digests", lambda _: lambda _: gate_work.OUTSIDE)
    assert [found("gate_outside", TWO).remembered for _ in range(2)] == [(), ()]


def test_a_crash_is_not_remembered():
    body = 'op("a", lambda x: die() if tuple(x.shape) == (3, 5) else x * 2, (R, R), (S0, S0))\n' + TWO
    first, second = (found("gate_dead", body) for _ in range(2))
    assert [op.split(".")[1] for op in second.remembered] == ["thrice", "twice"]
    assert [work.beside(NONE, TODAY).exit_code for work in (first, second)] == [3, 3]


# What is chosen.


def test_ops_are_chosen_by_name_and_glob():
    assert ops(found("gate_named", TWO, ops=("twice",))) == ["twice"]
    assert ops(found("gate_globbed", TWO, ops=("t?rice.default",))) == ["thrice"]


def test_a_name_that_the_module_does_not_register_is_refused():
    with pytest.raises(
        UnknownOp, match=r"'twise': gate_unnamed registers no rule of an op of this name\. Did you mean .*twice"
    ):
        found("gate_unnamed", TWO, ops=("twise",))


def test_a_change_is_judged_alone_with_its_reason(monkeypatch):
    op = "gate_changed.twice.default"
    asked = []

    def select(*given):
        asked.append(given)
        return Selection((ChosenOverload(op, "its rule function changed"),), ("gate_changed.thrice.default",))

    monkeypatch.setattr(gate_work, "select_changed", select)
    result = result_of("gate_changed", TWO, changed="HEAD")
    assert asked == [("HEAD", Path.cwd(), "gate_changed", ("gate_changed.thrice.default", op))]
    assert (result.judged, result.choices) == ((op,), (ChosenOverload(op, "its rule function changed"),))


def test_no_change_is_a_pass_that_says_so(monkeypatch):
    monkeypatch.setattr(gate_work, "select_changed", lambda _rev, _folder, _module, ops: Selection((), tuple(ops)))
    result = result_of("gate_same", TWO, changed="v1")
    said = "no rule changed since v1: nothing had to be judged (2 overloads unchanged)"
    assert (result.exit_code, result.notes, result.judged) == (0, (said,), ())


def test_a_registration_that_torch_ignores_fails():
    body = TWO + "register_sharding(torch.ops.aten.add.Tensor)(lambda *_, **__: [])"
    result = result_of("gate_ignored", body)
    assert [judged.finding.name for judged in result.new] == ["aten.add.Tensor: ignored"]


# What is not tried.


def test_without_time_nothing_is_begun_and_that_is_no_pass():
    result = result_of("gate_late", TWO, budget="1s")
    assert [why for _, why in result.untried] == [NO_TIME, NO_TIME]
    assert result.trouble[-1] == "the 1s of --budget were over before the first overload was tried"
    assert result.exit_code == 3


def test_with_time_all_is_tried():
    result = result_of("gate_early", TWO, start=4e9, budget="1s")
    assert (result.untried, result.exit_code) == ((), 0)


def test_an_overload_that_refuses_every_call_is_named_with_the_reason():
    body = TWO + 'def no(x):\n    raise ValueError("never")\n\nop("no", no, (R, R))\n'
    result = result_of("gate_refusing", body)
    ((op, why),) = result.untried
    assert op == "gate_refusing.no.default" and why.startswith("no call of it could be judged (")
    assert result.exit_code == 0

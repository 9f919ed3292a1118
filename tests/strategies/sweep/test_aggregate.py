import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
from torch.distributed.tensor import Replicate, Shard

from strategies.model.rule import Program, Rule
from strategies.model.verdict import Crash, Evidence, Instance, Verdict, WorkUnit, plan_units
from strategies.sweep import aggregate
from strategies.sweep.confirmation import merge_equal, rule_prefix
from strategies.sweep.report import text_and_json
from strategies.validation import finding
from strategies.validation import finding as findings
from strategies.validation.finding import Candidate, RuleOutcome, TaskResult, finding_of_instance
from tests.strategies.cases import numbers, sample
from tests.strategies.programs.shrink.test_search import CUMPROD, CUT, EDGES, tried
from tests.strategies.validation.test_finding_candidate import instance

OPS = ["aten.cumprod.default", "aten.neg.default"]
BEGIN = {
    "kind": "begin", "torch": "2.13.0", "seed": 3, "ranks": [2, 3], "confirm": "gloo", "ops": OPS,
    "trials": [["alone", [2]], ["meshes", [2, 2]]], "ignored": [["aten.a.default", "never asked"]],
}  # fmt: skip
RULE = "aten.cumprod.default: S(1) -> S(1)"


def unit(op=OPS[0], trial="alone", dtypes="real", mesh=(2,)):
    return WorkUnit(op, trial, dtypes, mesh)


def line(at=None, **what):
    return finding.task_line(TaskResult(at or unit(), **what), 0.5)


def settled(verdict=Verdict.UNSOUND, name=RULE, **more):
    finding = replace(finding_of_instance(instance(), "reason"), verdict=verdict, **more) if verdict else None
    return findings.outcome_line(RuleOutcome(name, finding))


def suspicion(columns=6):
    return {RULE: [Candidate(instance(sample("cumprod.default", numbers(4, columns), -1)))]}


def told(*lines, **begin):
    return aggregate.report({**BEGIN, **begin}, lines)


# The head.


def test_the_head_is_that_of_the_first_line():
    found = aggregate.report(BEGIN, [], [("trials", 0.5)])
    assert (found.torch, found.seed, found.ranks, found.confirm, found.ignored) == (
        "2.13.0", 3, (2, 3), "gloo", (("aten.a.default", "never asked"),),
    )  # fmt: skip
    assert found.seconds == (("trials", 0.5),)


def test_the_plan_is_every_unit_of_every_overload():
    assert aggregate.planned_units(BEGIN) == plan_units(OPS, [("alone", (2,)), ("meshes", (2, 2))])
    assert len(aggregate.planned_units(BEGIN)) == 16


def test_the_first_line_of_a_run_is_what_its_journal_holds():
    asked = {name: BEGIN[name] for name in ("kind", "torch", "seed", "ranks", "confirm")}
    made = aggregate.first_line(asked, OPS, (("alone", (2,)), ("meshes", (2, 2))), (("aten.a.default", "never asked"),))
    assert json.loads(json.dumps(made)) == made == BEGIN | {"ops": list(OPS)}


@pytest.mark.parametrize("done", [0, 1, 15, 16])
def test_units_that_are_not_done_are_counted(done):
    units = aggregate.planned_units(BEGIN)[:done]
    assert told(*map(line, units)).unfinished == 16 - done


# Verdicts.


def test_a_rule_that_some_unit_found_wrong_is_not_sound():
    found = told(line(sound={RULE, "other"}), line(unit(mesh=(3,)), suspects=suspicion()), settled())
    assert (found.counts.sound, found.counts.unsound) == (1, 1)
    assert [f.name for f in found.findings] == [RULE]
    assert found.exit_code == 1


def test_a_rule_that_a_real_run_cleared_is_sound():
    found = told(line(whole=suspicion(), tried=1), settled(None), ignored=[])
    assert (found.counts.sound, found.findings, found.exit_code) == (1, (), 0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_the_worst_verdict_counts_then_the_smallest_case(order):
    every = [settled(None), settled(Verdict.SUSPECT), settled(elements=40), settled(elements=24)]
    (found,) = told(*(every[n] for n in order)).findings
    assert (found.verdict, found.elements) == (Verdict.UNSOUND, 24)


def test_a_missing_rule_is_reported_once_by_its_smallest_instance():
    big, small = (instance(sample("cumprod.default", numbers(4, n), -1)) for n in (6, 2))
    big, small = (replace(i, verdict=Verdict.MISSING) for i in (big, small))
    for order in ([big, small], [small, big]):
        found = told(line(missing=order[:1]), line(unit(mesh=(3,)), missing=order[1:]))
        assert [(f.verdict, f.elements) for f in found.findings] == [(Verdict.MISSING, 8)]


def test_what_only_a_real_run_can_judge_is_untestable_where_there_was_none():
    found = told(line(whole=suspicion(), untestable={"odd": "why"}), confirm="none")
    assert found.untestable == ((RULE, "wrong: only a real run can judge it"), ("odd", "why"))
    assert found.counts.untestable == 2
    assert told(line(whole=suspicion())).untestable == ()


def test_what_is_known_of_a_rule_elsewhere_is_not_untestable():
    found = told(line(untestable={"odd": "why", "good": "why", RULE: "why"}, sound={"good"}), settled())
    assert found.untestable == (("odd", "why"),)


def test_sound_by_metadata_is_counted_where_it_is_sound():
    found = told(line(sound={"a", RULE}, by_metadata={"a", RULE}), settled())
    assert (found.counts.by_metadata, found.counts.sound) == (1, 1)


# Programs.

PROGRAM = Program(sample("cumprod.default", numbers(4, 6), -1), (2, 2), ((Shard(1), Replicate()),), "sum")


def program_line(trial, mesh=(2, 2)):
    suspect = Candidate(instance(PROGRAM.sample, ranks=4), PROGRAM)
    return line(unit(trial=trial, mesh=mesh), suspects={str(PROGRAM): [suspect]}, tried=1)


def program_settled(verdict=Verdict.UNSOUND, name=str(PROGRAM), **more):
    return settled(verdict, name, title=str(PROGRAM), mesh=(2, 2), **more) if verdict else settled(None, name)


def test_a_finding_of_a_program_is_counted_once_by_its_title():
    """Two programs that were made small became the same; so they do on two shards."""
    found = told(
        program_line("meshes"), program_line("pairs"), program_settled(elements=40), settled(),
        program_settled(name="a larger one", elements=24),
    )  # fmt: skip
    assert [(f.name, f.elements) for f in found.findings] == [(str(PROGRAM), 24), (RULE, 24)]
    assert (found.counts.unsound, found.exit_code) == (2, 1)


@pytest.mark.parametrize("same_as", ["", RULE])
def test_a_program_that_was_cleared_or_is_anothers_is_not_sound_for_that(same_as):
    cleared = findings.outcome_line(RuleOutcome(str(PROGRAM), None, same_as=same_as))
    found = told(program_line("meshes"), line(sound={"fine"}, tried=1), cleared, ignored=[])
    assert (found.counts.sound, found.findings, found.untestable, found.exit_code) == (1, (), (), 0)


# Counts.


def test_the_samples_of_an_overload_are_counted_once_for_all_meshes():
    found = told(
        line(samples=5, tried=7, combinations=3), line(unit(mesh=(3,)), samples=4, tried=1),
        line(unit(dtypes="bool"), samples=2, tried=1), line(unit(OPS[1]), samples=1),
    )  # fmt: skip
    counts = found.counts
    assert (counts.samples, counts.overloads, counts.instances, counts.combinations) == (8, 1, 9, 3)


def test_crashes_are_those_of_the_capture_the_validation_and_the_confirmation():
    captured = {"kind": "captured", "crashed": [["a", "its samples", "E", "T"]], "refused": {"torch refuses": 2}}
    confirmed = findings.outcome_line(RuleOutcome(RULE, None, Crash("c", "x", "E")))
    found = told(captured, line(crashed=[Crash("b", "x", "E")], skipped=Counter({"too many": 4})), confirmed)
    assert [(c.op, c.trace) for c in found.crashed] == [("a", "T"), ("b", ""), ("c", "")]
    assert found.counts.crashed == 3
    assert found.skipped == (("aten.cumprod.default: too many", 4), ("torch refuses", 2))


def test_skipped_samples_of_all_units_of_an_overload_add_up():
    found = told(line(skipped=Counter({"x": 1})), line(unit(mesh=(3,)), skipped=Counter({"x": 2})))
    assert found.skipped == (("aten.cumprod.default: x", 3),)


def test_what_every_shard_captured_is_counted_once():
    captured = {"kind": "captured", "crashed": [["a", "its samples", "E", "T"]], "refused": {"no": 2}}
    found = told(captured, captured)
    assert (len(found.crashed), found.skipped) == (1, (("no", 2),))


# Order.


def test_the_report_is_the_same_whatever_the_order_of_the_lines():
    lines = [
        line(suspects=suspicion(), samples=2, untestable={"odd": "one"}, crashed=[Crash("b", "x", "E")]),
        line(unit(OPS[1]), sound={"fine"}, untestable={"odd": "two"}, crashed=[Crash("a", "x", "E")]),
        settled(), findings.outcome_line(RuleOutcome("z", None, Crash("z", "", ""))), findings.outcome_line(RuleOutcome("y", None, Crash("y", "", ""))),
    ]  # fmt: skip
    wanted = text_and_json.as_json(told(*lines))
    for order in itertools.permutations(lines):
        assert text_and_json.as_json(told(*order)) == wanted


def test_lines_say_the_same_after_they_were_written():
    lines = [line(suspects=suspicion(), missing=[instance()]), settled(mesh=(2, 2), title="t")]
    again = json.loads(json.dumps(lines))
    assert text_and_json.as_json(aggregate.report(json.loads(json.dumps(BEGIN)), again)) == text_and_json.as_json(
        told(*lines)
    )


# On what kinds of dtypes and meshes.


def test_a_finding_names_every_kind_of_unit_that_suspected_it_and_no_other():
    found = told(
        line(suspects=suspicion()),
        line(unit(mesh=(3,)), suspects=suspicion()),
        line(unit(dtypes="complex", mesh=(2, 2), trial="meshes"), whole=suspicion()),
        line(unit(dtypes="bool"), sound={RULE}),
        line(unit(OPS[1], dtypes="integer"), suspects={"another": suspicion()[RULE]}),
        settled(),
    )
    assert [f.kinds for f in found.findings] == [(("complex", "2 axes"), ("real", "1 axis"))]


def test_what_shrank_to_another_finding_adds_its_kinds_there():
    other = {"kind": "settled", "rule": "bigger", "verdict": "cleared", "same_as": RULE}
    bigger = {"bigger": suspicion()[RULE]}
    found = told(line(suspects=suspicion()), line(unit(mesh=(2, 2), trial="meshes"), suspects=bigger), settled(), other)
    assert [f.kinds for f in found.findings] == [(("real", "1 axis"), ("real", "2 axes"))]


# Which of the small programs are told of the same fault.


def program(one=EDGES, mesh=(2, 2), layout=CUT, **more):
    made = Program(one, mesh, (layout,), **more)
    rule = Rule(one.op, (layout[-1],), ())
    return Candidate(Instance(rule, made.ranks, one, Verdict.UNSOUND, "simulated", Evidence("wrong")), made)


def test_programs_that_shrink_to_the_same_one_are_tried_once():
    same, other = program(), program(layout=(Shard(1), Shard(0)))
    todo = {"large": [same, program(mesh=(2, 2, 2))], "larger": [same], "another": [other]}
    left, settled = merge_equal(todo, set(todo))
    assert left == {"large": todo["large"], "another": [other]}
    assert settled == [RuleOutcome("larger", None, same_as="large")]


def test_a_call_that_is_refused_in_two_ways_is_tried_for_each():
    program = Program(EDGES, (2,), ((Replicate(),),))
    todo = {error: [findings.refused_program(program, error)] for error in ("ValueError: no dim 3", "TypeError: none")}
    assert merge_equal(todo, set(todo)) == (todo, [])
    again = {"later": [findings.refused_program(program, "ValueError: no dim 4")]}
    assert merge_equal(todo | again, set(todo))[1] == [RuleOutcome("later", None, same_as="ValueError: no dim 3")]


def test_a_call_that_does_not_return_is_a_finding_beside_its_errors():
    program = Program(EDGES, (2,), ((Replicate(),),))
    errors = ("ValueError: no dim 3", "no return within 12 s of processor time from stays (rules.py:7)")
    candidates = [findings.refused_program(program, error) for error in errors]
    made = [findings.finding_of_candidate(c, Verdict.REFUSED, c.instance.evidence.reason) for c in candidates]
    assert [one.name for one in made] == [str(program), f"{program}, no return from stays"]


@pytest.mark.parametrize("rules", [{"planted.edges.default: S(1) -> S(1)"}, set()], ids=["suspected too", "not"])
def test_a_program_that_shrinks_to_one_op_on_one_axis_is_the_rules_if_that_is_suspected(rules):
    given = program(mesh=(2,), layout=(Shard(1),))
    left, settled = merge_equal({"large": [given]}, {*rules, "planted.edges.default: S(0) -> S(1)"})
    if rules:
        assert (left, settled) == ({}, [RuleOutcome("large", None, same_as=next(iter(rules)))])
    else:
        assert (left, settled) == ({"large": [given]}, [])


def test_a_rule_itself_is_never_the_same_as_another():
    found = {name: kept[:1] for name, kept in tried(CUMPROD).items()}
    assert merge_equal(found, {*found, "aten.cumprod.default: S(1) -> R"}) == (found, [])


@pytest.mark.parametrize("more", [{"then": "sum"}, {"flattened": True}, {"mesh": (2, 2)}], ids=str)
def test_what_follows_a_flattened_submesh_and_a_second_axis_are_no_plain_rule(more):
    alike = {"mesh": (2,), "layout": (Shard(1),)}
    axes = len(more.get("mesh", (2,)))
    assert rule_prefix(program(**alike)) == "planted.edges.default: S(1) -> "
    assert rule_prefix(program(**{**alike, "layout": (Shard(1),) * axes, **more})) == ""
    assert rule_prefix(Candidate(program().instance)) == ""

"""Which of the small programs are told of the same fault."""

import pytest
from torch.distributed.tensor import Shard

from strategies.model.rule import Program, Rule
from strategies.model.verdict import Evidence, Instance, Verdict
from strategies.sweep.aggregate import merge_equal, rule_prefix
from strategies.validation.finding import Candidate, RuleOutcome
from tests.strategies.programs.shrink.test_search import CUMPROD, CUT, EDGES, tried


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

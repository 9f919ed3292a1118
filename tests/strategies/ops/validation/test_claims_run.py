"""Trials of our own rules in workers: wrong rules are found, killers cost one call, nothing tested is no pass."""

import os
import signal

import pytest
import torch
from rich.console import Console
from torch.distributed.tensor import Partial, Shard

from strategies.base.worker_pool import WorkerPool
from strategies.cli.commands.coverage import chosen_rules, print_validation, validate_ops
from strategies.model.rule import Call, Leaf, Sample
from strategies.model.verdict import CLEAN, NOTHING, USAGE, WRONG
from strategies.ops.semantics.rule_registry import OpRule, RuleRegistry
from strategies.ops.validation.claims import RuleResult, ValidationEffort, validate_rules

TERMS = ValidationEffort(ranks=(2,), budget=1)


def rows(query):
    yield query.line({0: Shard(0)}, [Shard(0)])


def deadly(query):
    """Kills its process for a call of three rows."""
    if query.tensors[0].shape[0] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    yield from rows(query)


def averaged(query):
    yield query.line({0: Partial("avg")}, [Partial("avg")])


def broken(query):
    raise ZeroDivisionError("here")


def sample(op, *shape, args=()):
    call = Call(op, (Leaf(0), *args))
    return Sample(call, (torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape),), "made here")


def entry(op, lines):
    return OpRule(op, lines, "planted", "to be tried")


def tried(one, *calls, without=None):
    with WorkerPool(1) as crew:
        (validated,) = validate_rules(crew, [one], {one.op: calls} if calls else {}, without or {}, TERMS)
    return validated


def test_a_right_rule_is_judged_right():
    validated = tried(entry("aten.neg.default", rows), sample("aten.neg.default", 4, 2))
    assert validated.tested and not validated.wrong and validated.lines == 1 and validated.calls > 1


def test_a_wrong_rule_is_judged_wrong_with_its_call():
    validated = tried(entry("aten.cumsum.default", rows), sample("aten.cumsum.default", 4, 2, args=(0,)))
    assert validated.tested and len(validated.wrong) == 1
    assert validated.wrong[0].startswith("aten.cumsum.default: S(0) -> S(0) on 2 ranks, cumsum.default(f32[4,2], 0)")


def test_a_call_that_kills_its_process_costs_that_call_alone():
    one = entry("aten.neg.default", deadly)
    validated = tried(one, sample("aten.neg.default", 3, 2), sample("aten.neg.default", 8, 1))
    assert validated.untried == ("f32[3,2]: the process died with SIGKILL",)
    assert validated.tested and not validated.wrong


def test_an_entry_without_calls_says_why():
    validated = tried(entry("aten.neg.default", rows), without={"aten.neg.default": "no kernel"})
    assert not validated.tested and validated.untried == ("no kernel",)


def test_a_call_that_the_op_refuses_is_no_test_and_says_so():
    validated = tried(entry("aten.mm.default", rows), sample("aten.mm.default", 4, args=(Leaf(0),)))
    assert not validated.tested and validated.untried == ("none of its calls gives what could be compared",)


def test_a_rule_that_raises_is_no_right_rule():
    validated = tried(entry("aten.neg.default", broken), sample("aten.neg.default", 4, 2))
    assert validated.wrong == ("the validation failed: ZeroDivisionError: here",)


@pytest.mark.parametrize(("validated", "code"), [
    (RuleResult("a.b.c", "some", "here:1", sound=3, calls=1), CLEAN),
    (RuleResult("a.b.c", "some", "here:1", wrong=("a line",), calls=1), WRONG),
    (RuleResult("a.b.c", "some", "here:1", untried=("no kernel",)), NOTHING),
    (RuleResult("a.b.c", "some", "here:1", calls=4), NOTHING),
])  # fmt: skip
def test_the_exit_code_is_that_of_what_was_found(validated, code, capsys):
    assert print_validation([validated], Console(width=200)) == code
    said = capsys.readouterr().out
    assert ("not tested: a.b.c" in said) == (code == NOTHING)
    assert ("WRONG a line" in said) == (code == WRONG)


def test_nothing_tested_at_all_is_no_pass(capsys):
    assert print_validation([], Console()) == NOTHING
    assert "0 of 0" in capsys.readouterr().out


def test_a_pattern_names_overloads_packets_or_families():
    book = RuleRegistry.of(
        entry("aten.neg.default", rows), entry("aten.neg.out", rows), entry("aten.abs.default", rows)
    )
    assert [e.op for e in chosen_rules(book, ["neg"])] == ["aten.neg.default", "aten.neg.out"]
    assert [e.op for e in chosen_rules(book, ["abs.*"])] == ["aten.abs.default"]
    assert len(chosen_rules(book, ["planted"])) == len(chosen_rules(book, [])) == 3


def test_a_pattern_that_names_nothing_is_an_error_of_usage(capsys):
    assert validate_ops(RuleRegistry.of(entry("aten.neg.default", rows)), ["nosuchop"], seeds=1) == USAGE
    assert "nosuchop" in capsys.readouterr().err


def test_a_line_with_parts_that_mean_nothing_to_everybody_is_wrong_though_no_call_speaks_against_it():
    one = entry("aten.neg.default", averaged)
    whole = Sample(Call(one.op, (Leaf(0),)), (torch.arange(6),), "made here")
    assert tried(one, sample(one.op, 4, 2)).wrong == ()
    assert tried(one, whole).wrong == ("aten.neg.default: P(avg) -> P(avg): P(avg) of i64[6] is not defined",)

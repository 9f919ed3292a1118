"""Our rules beside DTensor's: what counts as served, what is lacking, and that the most used products are covered."""

import os
import signal

import pytest
import torch
from rich.console import Console
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.base.worker_pool import WorkerPool
from strategies.cli.commands.coverage import print_comparison
from strategies.model.rule import Call, Leaf, Rule, Sample, flat_results
from strategies.model.verdict import CLEAN, NOTHING, WRONG
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.semantics.rule_registry import OpRule
from strategies.ops.validation import coverage as ops_coverage
from strategies.ops.validation.coverage import (
    OverloadComparison,
    UncoveredRule,
    compare,
    coverage,
    covers,
    documented_exception,
)
from tests.strategies.cases import placements

R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial("sum")


def made(op, *shapes, args=()):
    torch.manual_seed(0)
    tensors = tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return Sample(Call(op, (*map(Leaf, range(len(shapes))), *args)), tensors, "made here")


def rule(inputs, outputs):
    return Rule("aten.mm.default", inputs, outputs)


@pytest.mark.parametrize(("ours", "theirs", "does"), [
    (rule((S0, R), (S0,)), rule((S0, R), (S0,)), True),
    (rule((S0, S0), (S0,)), rule((S0, R), (S0,)), True),  # a replica is cut for nothing
    (rule((S0, R), (S0,)), rule((S0, S0), (S0,)), False),  # a shard is not whole for nothing
    (rule((S0, R), (R,)), rule((S0, R), (SUM,)), True),  # a replica serves as anything
    (rule((S0, R), (SUM,)), rule((S0, R), (R,)), False),
    (rule((S1, S0), (SUM,)), rule((S0, R), (S0,)), False),
])  # fmt: skip
def test_a_line_serves_where_it_costs_nothing_more(ours, theirs, does):
    assert covers(ours, theirs, [True]) is does


def test_a_missing_entry_lacks_every_line_of_theirs():
    found = compare("aten.mm.default", None, [made("aten.mm.default", (4, 6), (6, 4))], ranks=(2,))
    assert not found.covered and found.theirs == len(found.lacking) >= 3 and found.same == 0


def test_a_missing_line_is_reported_with_the_call_that_shows_it():
    def rows(query):
        yield query.line({0: S0}, [S0])

    entry = OpRule("aten.mm.default", rows, "planted", "half a rule")
    found = compare("aten.mm.default", entry, [made("aten.mm.default", (4, 6), (6, 4))], ranks=(2,))
    assert found.same == 1 and not found.covered
    assert "aten.mm.default: S(1), S(0) -> P(sum)" in [lack.rule for lack in found.lacking]
    assert all(lack.call == "f64[4,6], f64[6,4]" and lack.ranks == 2 for lack in found.lacking)


CALLS = [
    made("aten.mm.default", (4, 6), (6, 4)),
    made("aten.add.Tensor", (4, 6), (6,)),
    made("aten.convolution.default", (4, 4, 5, 5), (6, 4, 3, 3), args=(None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    made("aten.sum.dim_IntList", (4, 6), args=([1], False)),
    made("aten.view.default", (4, 6), args=([4, 2, 3],)),
    made("aten._softmax.default", (4, 6), args=(1, False)),
    made("aten.transpose.int", (4, 6), args=(0, 1)),
]


@pytest.mark.parametrize("sample", CALLS, ids=lambda sample: sample.op)
def test_what_programs_use_most_is_covered(sample):
    found = compare(sample.op, OUR_RULES.get(sample.op), [sample], ranks=(2,))
    assert found.theirs and found.covered, found.lacking


def test_averages_of_integers_are_the_documented_exception():
    whole = Sample(Call("aten.neg.default", (Leaf(0),)), (torch.arange(4),), "made here")
    average = Rule("aten.neg.default", (Partial("avg"),), (Partial("avg"),))
    assert documented_exception(average, whole).startswith("integers")
    assert not documented_exception(Rule("aten.neg.default", (SUM,), (SUM,)), whole)
    assert not documented_exception(average, made("aten.neg.default", (4,)))


COMPLEX = torch.ones(3, 4, dtype=torch.complex64)


@pytest.mark.parametrize(("call", "tensors", "inputs", "outputs", "why"), [
    (Call("aten.all.default", (Leaf(0),)), (torch.ones(3),), "P(product)", "P(product)", "underflows"),
    (Call("aten.all.default", (Leaf(0),)), (torch.ones(3) > 0,), "P(product)", "P(product)", ""),
    (Call("aten.prod.default", (Leaf(0),)), (COMPLEX,), "S(0)", "P(product)", "overflows"),
    (Call("aten.prod.default", (Leaf(0),)), (COMPLEX.real,), "S(0)", "P(product)", ""),
    (Call("aten.nll_loss_forward.default", (Leaf(0), Leaf(1), None, 1, -100)), (torch.randn(2, 3), torch.tensor([0, 1])),
     "S(0), S(0)", "P(avg), P(sum)", "weights"),
    (Call("aten._foreach_neg.default", ([Leaf(0), Leaf(1), Leaf(2)],)), (torch.ones(3),) * 3, "S(0), R, R", "S(0), R, R", "long list"),
    (Call("aten._foreach_neg.default", ([Leaf(0), Leaf(1), Leaf(2)],)), (torch.ones(3),) * 3, "S(0), S(0), S(0)",
     "S(0), S(0), S(0)", ""),
    (Call("aten._foreach_neg.default", ([Leaf(0), Leaf(1)],)), (torch.ones(3),) * 2, "S(0), R", "S(0), R", ""),
], ids=str)  # fmt: skip
def test_each_exception_is_for_its_own_lines_and_says_why(call, tensors, inputs, outputs, why):
    sample = Sample(call, tensors, "made here")
    found = documented_exception(
        Rule(call.op, placements(inputs), placements(outputs)), sample, flat_results(call(tensors))
    )
    assert why in found if why else not found


def killing(calls):
    for call in calls:
        if call.tensors[0].shape[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield call


def test_a_call_that_kills_its_process_leaves_the_others_to_be_compared(monkeypatch):
    monkeypatch.setattr(ops_coverage, "compare", lambda op, entry, calls, **t: compare(op, entry, killing(calls), **t))
    alive, dead = made("aten.neg.default", (4, 6)), made("aten.neg.default", (3,))
    with WorkerPool(1) as crew:  # forked, so the workers have what is patched here
        found, lost = coverage(crew, {"aten.neg.default": [dead, alive], "aten.abs.default": [dead]},
                               ops=["aten.neg.default", "aten.abs.default"], ranks=(2,))  # fmt: skip
    assert found.calls == 1 and found.covered and found.theirs and not found.why
    assert lost.calls == 0 and lost.why == "the process died with SIGKILL"


def test_the_figure_counts_what_could_be_compared(capsys):
    good = OverloadComparison("a.b.c", theirs=2, same=1, served=1, calls=1)
    bad = OverloadComparison(
        "a.b.d", theirs=2, same=1, lacking=(UncoveredRule("a.b.d: R -> S(0)", 2, "f32[2]"),), calls=1
    )
    none = OverloadComparison("a.b.e", why="no call could be tried")
    assert print_comparison([good], Console(width=300)) == CLEAN
    assert print_comparison([good, bad, none], Console(width=300)) == WRONG
    said = capsys.readouterr().out
    assert "lacking: a.b.d: R -> S(0) on 2 ranks, f32[2]" in said and "not compared: a.b.e" in said
    assert (
        "1 of 2 overloads covered; of 4 different placement rules of DTensor's that are right, 3 are served (2 the same)"
        in said
    )
    assert print_comparison([none], Console(width=300)) == NOTHING

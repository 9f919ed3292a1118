"""Rules of our own tested against real execution: a call of one overload of each op, in CI of every fourth op.  `python -m
strategies.ops` tests all overloads.
"""

from collections import Counter

import pytest
import torch

from strategies.base.worker_pool import WorkerPool
from strategies.inputs import opinfo_samples
from strategies.inputs.gathering import select_overloads
from strategies.ops.all_rules import OUR_RULES
from strategies.ops.validation.claims import ValidationEffort, calls_of_overloads, validate_rules

PARTS, MOST = 8, 2
TERMS = ValidationEffort(ranks=(3,), budget=1)
"""Three ranks: every size that OpInfo likes is uneven on them, and the last rank may have nothing."""
LEAST = 0.8
"""Share of the overloads that have to be tested even with so few calls."""


def one_of_each_op():
    """For each op one overload: what writes in place or to `out`, and lists of tensors, take the rule of that."""
    plain = {}
    for entry in sorted(OUR_RULES, key=lambda entry: ("_foreach_" in entry.op, "_." in entry.op, "out" in entry.op)):
        plain.setdefault(entry.op.split(".")[1].removeprefix("_foreach_").rstrip("_"), entry)
    return list(plain.values())


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore")  # OpInfo calls what torch deprecates
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_no_rule_of_our_own_is_wrong(part, monkeypatch):
    entries = one_of_each_op()[part::PARTS]
    ops = [entry.op for entry in entries]
    every = opinfo_samples.database()
    named = [infos for op in ops if len(infos := select_overloads(frozenset([op]), every).infos) < len(every)]
    near = [every[number] for number in sorted(set().union(*named))]
    monkeypatch.setattr(
        opinfo_samples, "database", lambda: near
    )  # the others take far longer, and give a few calls more
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with WorkerPool(1) as workers:
        captured = calls_of_overloads(workers, ops, most=MOST, dtypes=("float64", "int64"), sizes=("even",))
        results = validate_rules(workers, entries, captured.of, captured.without, TERMS)
    torch.set_num_threads(threads)
    assert [sentence for one in results for sentence in one.wrong] == []
    assert [one.op for one in results] == ops
    untested = Counter(one.op for one in results if not one.tested)
    assert len(untested) <= (1 - LEAST) * len(entries), sorted(untested)
    assert all(one.untried or one.calls for one in results)  # nothing is left out without a reason

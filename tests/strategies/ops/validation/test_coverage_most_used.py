"""The list of the most used overloads: as long as it says, of overloads that exist, made by programs that run."""

from collections import Counter

import torch

from strategies.ops.validation.coverage import MOST_USED, most_used
from tests.tools.bench.most_used import MOST, shardable, text, used
from tests.tools.bench.most_used_programs import PROGRAMS


def test_the_list_names_each_of_so_many_overloads_once():
    names = [line.split()[0] for line in MOST_USED.read_text().splitlines() if not line.startswith("#")]
    assert len(names) == len(set(names)) == MOST
    assert set(most_used()) <= set(names) and len(most_used()) > 0.95 * MOST


def test_the_list_is_in_the_order_of_what_it_counts():
    rows = [line.split() for line in MOST_USED.read_text().splitlines() if not line.startswith("#")]
    keys = [(-int(programs), -int(calls), -int(infos), op) for op, programs, calls, infos in rows]
    assert keys == sorted(keys)


def test_a_program_calls_the_same_each_time():
    program = next(one for one in PROGRAMS if one.__name__ == "mixture_of_experts")
    assert used(program) == used(program) != Counter()
    assert {"aten.topk.default", "aten.index_add_.default", "aten.mm.default"} <= used(program).keys()


def test_what_gives_no_tensor_is_not_counted():
    assert shardable(torch.ops.aten.mm.default) and shardable(torch.ops.aten._foreach_add_.Scalar)
    assert not shardable(torch.ops.aten._local_scalar_dense.default)
    assert not shardable(torch.ops.aten.arange.default)


def test_the_text_says_how_it_was_made():
    assert text([("aten.mm.default", 2, 3, 4)]).splitlines()[-1] == "aten.mm.default 2 3 4"
    assert "tests.tools.bench.most_used" in text([])

"""`localtensor cost rule`: the bytes of a call by placement, equal to a hand count, before and after the overlay."""

import json
import sys

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from strategies.cli.commands.cost_rule import _chosen, measure
from strategies.model.rule import Call, Leaf, Sample
from tests.tools import warm

COMMAND = [sys.executable, "-c", "from strategies.cli.app import main; main()", "cost", "rule"]
ADD = Sample(Call("aten.add.Tensor", (Leaf(0), Leaf(1))), (torch.ones(8, 4), torch.ones(8, 4)), "by hand")
MM = Sample(Call("aten.mm.default", (Leaf(0), Leaf(1))), (torch.ones(8, 4), torch.ones(4, 8)), "by hand")


@pytest.mark.parametrize(("sample", "placed", "gives", "bytes_of_a_rank"), [
    (ADD, (Shard(0), Shard(0)), "S(0)", 0),
    (ADD, (Replicate(), Shard(1)), "S(1)", 0),
    (ADD, (Shard(0), Shard(1)), "S(0)", 8 * 1 * 4),  # its piece of the second is gathered
    (MM, (Shard(1), Shard(0)), "P(sum)", 0),
    (MM, (Shard(0), Replicate()), "S(0)", 0),
])  # fmt: skip
def test_bytes_are_those_of_a_hand_count(sample, placed, gives, bytes_of_a_rank):
    (found,) = measure(sample, [placed], 4)
    assert (found.gives, found.bytes, found.refused) == (gives, bytes_of_a_rank, "")


def test_a_call_that_is_refused_says_why():
    wrong = Sample(Call("aten.mm.default", (Leaf(0), Leaf(1))), (torch.ones(2, 3), torch.ones(2, 3)), "by hand")
    (found,) = measure(wrong, [(Replicate(), Replicate())], 2)
    assert found.refused.startswith("RuntimeError") and str(found) == "refused"


def test_calls_are_chosen_whose_price_says_something():
    def call(*shape, dtype=torch.float64):
        return Sample(Call("aten.relu.default", (Leaf(0),)), (torch.ones(shape, dtype=dtype),), "by hand")

    samples = [call(0, 4), call(), call(3, 5), call(8, 4, dtype=torch.int64), call(4, 4), call(8, 4), call(8, 4)]
    assert [tuple(one.tensors[0].shape) for one in _chosen(samples, 4)] == [(8, 4), (4, 4)]
    assert [tuple(one.tensors[0].shape) for one in _chosen(samples[:2], 4)] == [(), (0, 4)]
    assert _chosen(samples, 4)[0].tensors[0].dtype == torch.float64


def test_the_command_prints_both_sets_of_rules(tmp_path):
    done = warm.run([*COMMAND, "aten.cumsum.default", "--ranks", "2", "--json"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["op"] for row in rows} == {"aten.cumsum.default"} and len(rows) >= 2
    assert all(row["torch_bytes"] == 0 for row in rows if " R" in row["call"])
    table = warm.run([*COMMAND, "aten.cumsum.default", "--ranks", "2"], cwd=tmp_path).stdout
    assert "DTensor moves" in table and "overlay_dtensor moves" in table and "in all " in table


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["no_such_op_at_all"], "localtensor cost rule: OP: 'no_such_op_at_all': no op"),
        (["add", "--ranks", "1"], "--ranks: 1"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(tmp_path, words, problem):
    done = warm.run([*COMMAND, *words], cwd=tmp_path)
    assert done.returncode == 2 and problem in done.stderr and "Traceback" not in done.stderr

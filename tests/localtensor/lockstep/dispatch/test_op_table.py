"""The table of ways, the facts of an overload, and that an op is executed as often as the table promises, and never more."""

import sys
from collections import Counter

import numpy as np
import pytest
import torch

from localtensor.lockstep.dispatch import execute, op_table
from localtensor.lockstep.dispatch.decompositions import functional_overload
from localtensor.lockstep.dispatch.op_table import (
    WRONG_BATCHING_RULES,
    Execution,
    execution_of,
    list_ops,
    op_traits,
    overload,
)
from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.values.partition import everyone
from tests.localtensor.lockstep.lockstep_reference import check_op
from tests.tools import warm

aten = torch.ops.aten
RANKS = 6


@pytest.fixture
def mode():
    with LocalTensorMode(RANKS) as found:
        yield found


def numbers(*shape, rows=RANKS):
    """So many different values, dealt to the ranks in turn."""
    return rank_map(lambda rank: torch.randn(shape, generator=torch.Generator().manual_seed(rank % rows)))


# -- the table


def test_every_overload_has_a_way():
    found = dict(list_ops())
    assert len(found) > 3000 and set(found.values()) == set(Execution)
    assert all(overload(name).name() == name for name in list(found)[::50])
    if torch.__version__.startswith("2.13."):
        counts = {way.value: times for way, times in Counter(found.values()).items()}
        assert counts == {"stack": 752, "vmap": 230, "ranks": 1261, "draws": 149, "parts": 718}


@pytest.mark.parametrize(("op", "way"), [
    (aten.add.Tensor, Execution.STACK), (aten.cumsum.default, Execution.STACK), (aten._foreach_mul_.Scalar, Execution.STACK),
    (aten.convolution.default, Execution.VMAP), (aten.nonzero.default, Execution.RANKS), (aten.item.default, Execution.PARTS),
    (aten._local_scalar_dense.default, Execution.RANKS), (aten.native_dropout.default, Execution.DRAWS),
    (aten.linear.default, Execution.PARTS), (aten.masked_select.default, Execution.RANKS), (aten.nll_loss_forward.default, Execution.RANKS),
])  # fmt: skip
def test_known_ways(op, way):
    assert execution_of(op) is way


LATE = """
import torch
from localtensor.lockstep.dispatch.op_table import list_ops
before = dict(list_ops())
torch.vmap(torch.sin)(torch.ones(2))
print(sorted(name for name, way in list_ops() if way is not before[name]))
"""


def test_a_way_does_not_depend_on_what_the_process_did_before():
    """In a process of its own, since torch.vmap registers rules when it is called for the first time."""
    done = warm.run([sys.executable, "-c", LATE])
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_what_is_no_overload_is_none():
    assert overload("aten::no_such_op") is None


# -- facts


@pytest.mark.parametrize(("op", "writes", "returns", "views"), [
    (aten.add.Tensor, (), (None,), False),
    (aten.add_.Tensor, ((0, "self"),), (0,), False),
    (aten.add.out, ((3, "out"),), (3,), False),
    (aten.view.default, (), (None,), True),
    (aten._unsafe_view.default, (), (None,), True),
    (aten.split.Tensor, (), (None,), True),
    (aten.native_batch_norm.default, ((3, "running_mean"), (4, "running_var")), (None, None, None), False),
    (aten._foreach_add_.Scalar, ((0, "self"),), (), False),
])  # fmt: skip
def test_facts(op, writes, returns, views):
    known = op_traits(op)
    assert (known.writes, known.returns, known.views) == (writes, returns, views)
    assert op_traits(op) is known


def test_batch_norm_writes_only_in_training(mode):
    outside = torch.zeros(3), torch.ones(3)  # belong to all ranks
    x = numbers(5, 3)
    assert op_traits(aten.native_batch_norm.default).if_training == (5, "training")
    assert op_traits(aten._native_batch_norm_legit.default).if_training == (5, "training")
    assert (
        op_traits(aten.add_.Tensor).if_training is op_traits(aten._batch_norm_with_update.default).if_training is None
    )
    check_op(aten.native_batch_norm.default, x, None, None, *outside, False, 0.1, 1e-5)
    assert outside[0].tolist() == [0, 0, 0]
    means = torch.zeros(3)  # a LocalTensor, the same on all ranks
    check_op(aten.native_batch_norm.default, x, None, None, means, torch.ones(3), True, 0.1, 1e-5)
    assert means._partition.rows == RANKS


@pytest.mark.parametrize(("op", "functional"), [
    (aten.add.out, aten.add.Tensor), (aten.topk.values, aten.topk.default), (aten.mm.out, aten.mm.default),
    (aten._foreach_abs.out, aten._foreach_abs.default), (aten.add.Tensor, None), (aten.arange.start_out, None),
])  # fmt: skip
def test_the_op_behind_out(op, functional):
    assert functional_overload(op) is functional
    assert (op_traits(op).rewrite is not None) == (functional is not None)


# -- how often an op is executed


@pytest.fixture(scope="module")
def counted():
    """An op that counts how often it is executed, once with torch's word that it is pointwise, once without."""
    library = torch.library.Library("counted", "FRAGMENT")
    times = Counter()

    def op(name):
        def run(x):
            times[name] += 1
            return x + 1

        return run

    library.define("pointwise(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))
    library.define("rows(Tensor x) -> Tensor")
    for name in ("pointwise", "rows"):
        library.impl(name, op(name), "CPU")
    yield times
    library._destroy()


@pytest.mark.parametrize(("rows", "pointwise", "by_rows"), [(1, 1, 1), (2, 1, 2), (3, 1, 3), (6, 1, 6)])
def test_once_for_a_value_that_all_share_once_for_a_stack_and_never_more(mode, counted, rows, pointwise, by_rows):
    x = numbers(4, rows=rows)
    counted.clear()
    assert torch.equal((torch.ops.counted.pointwise(x) - torch.ops.counted.rows(x)).on(0), torch.zeros(4))
    assert counted == {"pointwise": pointwise, "rows": by_rows}


def test_once_for_each_shape(mode, counted):
    x = rank_map(lambda rank: torch.full((rank // 3 + 1,), float(rank)))
    counted.clear()
    torch.ops.counted.pointwise(x)
    assert counted == {"pointwise": 2}


def test_a_plain_tensor_is_done_once(mode, counted):
    x = torch.ones(3)
    counted.clear()
    assert torch.ops.counted.pointwise(x)._partition is everyone(RANKS) and counted == {"pointwise": 1}


def test_the_value_does_not_matter_to_what_is_like_another(mode):
    assert op_traits(aten.zeros_like.default).value_free and not op_traits(aten.clone.default).value_free
    assert torch.zeros_like(numbers(3))._partition.uniform


# -- WRONG_BATCHING_RULES

POINTS = torch.arange(6.0).view(3, 2), torch.arange(8.0, 0, -1).sqrt().view(4, 2)
WRONG_UNDER_VMAP = {
    "aten::index_fill.int_Tensor": lambda: (torch.tensor(1.0), 0, torch.tensor([0]), numbers()),
    "aten::linalg_pinv.atol_rtol_tensor": lambda: (numbers(0, 5, 5),),
    "aten::_cdist_backward": lambda: (numbers(3, 4), *POINTS, 1.0, torch.cdist(*POINTS, p=1.0)),
    "aten::roll": lambda: (numbers(), [1]),
    "aten::embedding": lambda: (numbers(4, 3), rank_map(lambda rank: torch.tensor([rank % 4, 4]))),
}


def differs(name, args):
    """Whether lockstep is not what the op alone is, be it that only one of them raises."""
    kwargs = {"atol": torch.tensor(0.1), "rtol": numbers().abs()} if "pinv" in name else {}
    try:
        check_op(overload(name), *args, **kwargs)
    except (AssertionError, IndexError) as error:
        return not (isinstance(error, IndexError) and "out of range in self" in str(error))
    return False


@pytest.mark.parametrize("name", WRONG_UNDER_VMAP)
def test_what_goes_rank_by_rank_is_right_so_and_has_a_reason(mode, name):
    assert set(WRONG_BATCHING_RULES) == set(WRONG_UNDER_VMAP) and len(WRONG_BATCHING_RULES[name]) > 20
    assert not op_table.has_batching_rule(overload(name))
    assert not differs(name, WRONG_UNDER_VMAP[name]())


@pytest.mark.parametrize("name", [name for name in WRONG_UNDER_VMAP if name != "aten::embedding"])
def test_what_goes_rank_by_rank_is_wrong_under_vmap(mode, monkeypatch, name):
    monkeypatch.setattr(op_table, "WRONG_BATCHING_RULES", {})
    monkeypatch.setattr(op_table, "_properties", {})
    assert execution_of(overload(name)) is Execution.VMAP and differs(name, WRONG_UNDER_VMAP[name]())


def test_vmap_reads_the_table_of_another_row_for_an_index_out_of_range(mode):
    tables, index = torch.arange(24.0).view(2, 4, 3), torch.tensor([[4], [0]])
    with mode.disable():
        got = torch.vmap(aten.embedding.default)(tables, index)
    assert got[0, 0].tolist() == tables[1, 0].tolist()  # and torch does not say that 4 is out of range
    assert "another row" in WRONG_BATCHING_RULES["aten::embedding"]


def test_an_error_is_that_of_the_op_on_one_row(mode):
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(3x4 and 3x4\)"):
        aten.mm(numbers(3, 4), numbers(3, 4))
    with pytest.raises(IndexError, match=r"index 7 out of range for tensor of size \[3, 4\]"):
        numbers(3, 4).select(0, 7)
    with pytest.raises(IndexError, match=r"in range of \[-2, 1\], but got 5"):
        torch.softmax(numbers(3, 4), 5)


def test_a_cell_reads_the_int_of_its_ranks(mode):
    lengths = mode.gather({rank: torch.ones(rank // 2) for rank in range(RANKS)}).shape[0]
    reader = execute.CellReader(numbers(2)._partition, 0)
    assert reader(3) == 3 and reader([1, None]) == [1, None] and not reader.stacked
    assert np.array([check_op(torch.arange, lengths).on(rank).numel() for rank in range(RANKS)]).tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]

"""Tensor-parallel programs on rank threads, on gloo, and on one device; and what the ranks have to say for them."""

from collections import Counter

import pytest
import torch

import localtensor as lt
from localtensor.errors import LocalTensorError
from tests.device import DEVICE
from tests.end_to_end.programs import tensor_parallel_programs
from tests.end_to_end.programs.one_device import alone, assert_three_ways
from tests.torch_here import before_2_14

FLOAT = 8  # bytes of a float64


def said(calls, function):
    """The collectives of these that come from within this function of the program, with their bytes."""
    return [(kind_of(call), call.bytes) for call in calls if call.place.function == function]


def of_first(run):
    return [call for call in run.calls if call.rank == 0]


def kind_of(call):
    """In c10d, the functional collectives that DTensor uses take lists, here of one tensor."""
    return call.kind.removesuffix("_coalesced")


@pytest.mark.few(3)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "program",
    [
        tensor_parallel_programs.mlp,
        tensor_parallel_programs.attention,
        tensor_parallel_programs.sequence_parallel_block,
    ],
)
def test_layers_and_their_gradients(program, ranks):
    assert_three_ways(program, (ranks,))


@pytest.mark.parametrize("hidden", [6, 3])
def test_hidden_units_that_four_ranks_cannot_share_evenly(hidden):
    assert_three_ways(tensor_parallel_programs.uneven_mlp, (4,), hidden)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_whole_transformer_learns(ranks):
    run = assert_three_ways(tensor_parallel_programs.language_model, (ranks,), 2)
    assert run[0]["losses"].diff().lt(0).all()


@pytest.mark.ranks(4)
def test_an_mlp_takes_one_all_reduce_each_way(comms):
    tensor_parallel_programs.mlp((4,))
    activations = 3 * 5 * 8 * FLOAT
    assert said(comms, "forward") == said(comms, "backward") == [("all_reduce", activations)]


@pytest.mark.ranks(4)
def test_sequence_parallel_takes_two_gathers_and_two_reduce_scatters_each_way(comms):
    """An all-reduce cut in two: a rank brings its positions to the gather, and all of them to the reduce-scatter."""
    tensor_parallel_programs.sequence_parallel_block((4,))
    activations = 3 * 4 * 8 * FLOAT
    each = [("all_gather_into_tensor", activations // 4), ("reduce_scatter_tensor", activations)]
    assert said(comms, "forward") == said(comms, "backward") == each * 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_parallel_takes_three_numbers_a_row_and_nothing_backward(reduction):
    """The row's largest logit, the sum of its exponentials, and the logit of its target, which only one rank has.

    The size of the vocabulary does not come into it.  Backward, each rank has all it needs for its own classes.
    """
    rows = 8
    calls = of_first(assert_three_ways(tensor_parallel_programs.cross_entropy, (4,), reduction, 1, rows, 3))
    assert said(calls, "forward") == [("all_reduce", rows * FLOAT)] * 3
    assert said(calls, "backward") == []


AT_ONCE = pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 reduces a sum of losses at once")


@pytest.mark.parametrize("reduction", [pytest.param("sum", marks=AT_ONCE), "none"])
def test_the_loss_of_cut_rows_takes_nothing_unless_it_is_a_mean(reduction):
    calls = of_first(assert_three_ways(tensor_parallel_programs.cross_entropy, (2,), reduction, 0, 5, 3))
    assert said(calls, "forward") == said(calls, "backward") == []


@before_2_14
def test_the_mean_loss_of_cut_rows_takes_one_number_backward():
    """Forward it stays P(avg).  Backward, a gradient is divided by the number of targets that count, on all ranks
    together; a rank cannot know that its peers ignore none.
    """
    calls = of_first(assert_three_ways(tensor_parallel_programs.cross_entropy, (2,), "mean", 0, 8, 0))
    assert said(calls, "forward") == []
    assert said(calls, "backward") == [("all_reduce", FLOAT)]


@before_2_14
def test_torch_is_wrong_about_the_mean_loss_where_ranks_ignore_unequally_and_so_are_we():
    """DTensor averages the ranks' means, as if all ranks had equally many targets: `validate` lists that rule."""
    args = ("mean", 0, 8, 3)
    threads = lt.run(tensor_parallel_programs.cross_entropy, (2,), *args, ranks=2, device=DEVICE)
    gloo = lt.run(tensor_parallel_programs.cross_entropy, (2,), *args, ranks=2, on="gloo", device=DEVICE)
    one = alone(tensor_parallel_programs.cross_entropy, *args)
    per_row = alone(tensor_parallel_programs.cross_entropy, "none", 0, 8, 3)["loss"]
    assert not torch.allclose(one["loss"], (per_row[3:4].mean() + per_row[4:].mean()) / 2)
    for rank in range(2):
        torch.testing.assert_close(threads[rank], gloo[rank], rtol=0, atol=0)
        torch.testing.assert_close(threads[rank]["loss"], (per_row[3:4].mean() + per_row[4:].mean()) / 2)
        torch.testing.assert_close(threads[rank]["gradient"], one["gradient"])


@pytest.mark.parametrize("on", ["threads", "gloo"])
@before_2_14
def test_the_mean_loss_of_uneven_rows_is_refused(on):
    with pytest.raises(LocalTensorError, match="cannot be evenly sharded"):
        lt.run(tensor_parallel_programs.cross_entropy, (2,), "mean", 0, 5, 0, ranks=2, on=on, device=DEVICE)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_in_which_ranks_run_is_of_no_importance(seed):
    """Within loss_parallel: it exchanges DTensor's handlers of some ops, for the whole process, while it is on."""
    in_order = lt.run(tensor_parallel_programs.language_model, (2,), 1, ranks=2, device=DEVICE)
    shuffled = lt.run(
        tensor_parallel_programs.language_model, (2,), 1, ranks=2, schedule=lt.shuffled(seed), device=DEVICE
    )
    torch.testing.assert_close(list(shuffled), list(in_order), rtol=0, atol=0)


def test_torch_counts_the_collectives_that_the_log_has():
    threads = lt.run(tensor_parallel_programs.collectives_of_block, (2,), ranks=2, device=DEVICE)
    gloo = lt.run(tensor_parallel_programs.collectives_of_block, (2,), ranks=2, on="gloo", device=DEVICE)
    assert [threads[rank] for rank in range(2)] == [gloo[rank] for rank in range(2)]
    logged = Counter(kind_of(call) for call in threads.calls if call.rank == 0)
    assert threads[0] == dict(logged)

"""What each rank draws: on rank threads, on gloo, and by plain torch from a piece of the same shape."""

import random

import numpy as np
import pytest
import torch

import localtensor as lt
from localtensor.errors import LocalTensorError
from tests.device import ON_CPU
from tests.end_to_end.programs import random_programs
from tests.end_to_end.programs.one_device import assert_three_ways
from tests.end_to_end.programs.three_ways import on_both
from tests.torch_here import before_2_14

pytestmark = ON_CPU  # those of CUDA: test_on_cuda
CUT = {None: "replicated", 0: "rows cut", 1: "columns cut"}


def pieces(dim, ranks):
    """The zeros that each rank starts from: those of torch.chunk, and nothing for a rank that it leaves out."""
    zeros = torch.zeros(random_programs.SHAPE)
    return [zeros] * ranks if dim is None else zeros.tensor_split([2, 4, 6], dim)


@pytest.mark.parametrize("seeds", [[7, 7, 7, 7], [1, 2, 3, 4]], ids=["one seed", "four seeds"])
@pytest.mark.parametrize("dim", CUT, ids=CUT.get)
@before_2_14
def test_a_rank_draws_what_a_piece_of_this_shape_draws_from_its_generator(dim, seeds):
    """A list as an argument is one entry for each rank."""
    drawn = on_both(random_programs.draws, dim, seeds, ranks=4)
    for rank, piece in enumerate(pieces(dim, 4)):
        with torch.random.fork_rng(devices=[]):
            expected = random_programs.draws_of_piece(piece, seeds[rank])
        torch.testing.assert_close(drawn[rank], expected, rtol=0, atol=0)


def test_so_on_the_cpu_one_seed_fills_all_pieces_alike_and_not_as_one_device():
    """On CUDA, DTensor moves each rank's generator on to where its piece begins; on the CPU it has no such account."""
    drawn = on_both(random_programs.draws, 0, [7] * 4, ranks=4)
    assert torch.equal(drawn[0]["normal_"], drawn[1]["normal_"])


@pytest.mark.parametrize("on", ["threads", "gloo"])
def test_hence_torch_cannot_make_a_random_dtensor_on_the_cpu(on):
    with pytest.raises(LocalTensorError, match="AssertionError"):
        lt.run(random_programs.made_by_factory, ranks=2, on=on)


@pytest.mark.parametrize("dim", [0, 1])
def test_an_init_counts_the_columns_of_the_whole_weight(dim):
    drawn = on_both(random_programs.kaiming, dim, ranks=4)
    for rank, piece in enumerate(pieces(dim, 4)):
        with torch.random.fork_rng(devices=[]):
            expected = random_programs.kaiming_alone(piece, rank)
        torch.testing.assert_close(drawn[rank], expected, rtol=0, atol=0)


@pytest.mark.parametrize("how", ["sharded", "tensor parallel"])
def test_a_model_from_meta_is_drawn_piece_by_piece(how):
    drawn = on_both(random_programs.fresh_weights, how, ranks=4)
    for rank in range(4):
        with torch.random.fork_rng(devices=[]):
            expected = random_programs.fresh_weights_alone(how, rank, 4)
        torch.testing.assert_close(drawn[rank], expected, rtol=0, atol=0)


def test_each_rank_has_three_generators_of_its_own():
    drawn = on_both(random_programs.three_generators, 3, ranks=3)
    before = states()
    expected = [random_programs.three_generators_alone(rank, 3) for rank in range(3)]
    put_back(before)
    assert drawn == expected


def states():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def put_back(before):
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


def test_a_run_leaves_the_generators_of_its_caller_alone():
    before = states()
    lt.run(random_programs.three_generators, 1, ranks=2)
    after = states()
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert before[2][1].tolist() == after[2][1].tolist()


@pytest.mark.parametrize("backward", ["remembers", "recomputes"])
def test_dropout_around_a_tensor_parallel_layer(backward):
    run = assert_three_ways(random_programs.dropout, (4,), 11, backward)
    assert run[0]["out"].eq(0).any()


def test_the_order_in_which_ranks_run_is_of_no_importance():
    in_order = lt.run(random_programs.draws, 0, [1, 2, 3, 4], ranks=4)
    shuffled = lt.run(random_programs.draws, 0, [1, 2, 3, 4], ranks=4, schedule=lt.shuffled(5))
    torch.testing.assert_close(list(shuffled), list(in_order), rtol=0, atol=0)

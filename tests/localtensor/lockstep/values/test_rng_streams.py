"""Random numbers in lockstep are those that real ranks draw: seeded alike, or each with its own seed."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from localtensor import run
from localtensor.lockstep.mode import LocalTensorMode, rank_map, tensor_map
from localtensor.lockstep.values.local_tensor import LocalTensor
from localtensor.lockstep.values.partition import every_rank_alone, everyone, one_row_per_rank
from localtensor.lockstep.values.rank_int import is_rank_int
from localtensor.lockstep.values.rng_streams import Stream, Streams

RANKS = 4


def rank_tensor(make):
    """A tensor that differs between ranks, in lockstep and in a rank of `run`."""
    if not is_rank_int(dist.get_rank()):
        return make(dist.get_rank())
    return rank_map(make)


def lain_by_columns():
    return torch.empty(20, 3).t().normal_(1, 2)


def lain_with_gaps():
    return torch.zeros(6, 20)[:, ::2].uniform_()


DRAWS = {
    "randn": lambda: torch.randn(3, 4),
    "rand, double": lambda: torch.rand(2, 3, dtype=torch.float64),
    "randint": lambda: torch.randint(0, 100, (5,)),
    "randperm": lambda: torch.randperm(17),
    "normal": lambda: torch.normal(torch.zeros(3), 2.0),
    "normal_": lambda: torch.zeros(4, 5).normal_(1, 2),
    "uniform_ of a tensor that differs": lambda: rank_tensor(lambda rank: torch.full((3,), float(rank))).uniform_(),
    "exponential_": lambda: torch.zeros(4).exponential_(),
    "random_": lambda: torch.zeros(4, dtype=torch.int64).random_(5),
    "by columns": lain_by_columns,
    "with gaps": lain_with_gaps,
    "an initialiser": lambda: torch.nn.init.kaiming_uniform_(torch.empty(3, 5)),
    "dropout": lambda: functional.dropout(torch.ones(4, 5), 0.5),
    "dropout where ranks differ": lambda: functional.dropout(rank_tensor(lambda rank: torch.arange(9.0) + rank), 0.3),
    "dropout in place": lambda: functional.dropout(rank_tensor(lambda rank: torch.arange(9.0) + rank), 0.3, inplace=True),
    "alpha dropout": lambda: functional.alpha_dropout(rank_tensor(lambda rank: torch.arange(9.0) + rank), 0.3, training=True),
    "bernoulli": lambda: torch.bernoulli(torch.full((20,), 0.5)),
    "bernoulli, a chance for each rank": lambda: torch.bernoulli(rank_tensor(lambda rank: torch.full((20,), rank / 4))),
    "bernoulli_ by tensor": lambda: torch.zeros(9).bernoulli_(rank_tensor(lambda rank: torch.full((9,), rank / 4))),
    "multinomial": lambda: torch.multinomial(torch.tensor([0.2, 0.3, 0.5]), 5, replacement=True),
    "multinomial, weights of each rank": lambda: torch.multinomial(rank_tensor(lambda rank: torch.ones(5) + rank), 3),
    "rand_like": lambda: torch.rand_like(rank_tensor(lambda rank: torch.full((3,), float(rank)))),
    "randint_like": lambda: torch.randint_like(torch.zeros(6), 9),
    "of another size on each rank": lambda: torch.randn_like(rank_tensor(lambda rank: torch.zeros(rank + 1, 2))),
    "as many as the rank": lambda: torch.randn(dist.get_rank() + 1),
    "rrelu": lambda: functional.rrelu(rank_tensor(lambda rank: torch.arange(-4.0, 4) - rank), training=True),
    "poisson": lambda: torch.poisson(rank_tensor(lambda rank: torch.ones(5) * rank)),
    "own generator": lambda: torch.randn(3, generator=torch.Generator().manual_seed(5)),
    "gumbel": lambda: functional.gumbel_softmax(rank_tensor(lambda rank: torch.arange(3.0) * rank)),
    "noise of attention": lambda: functional.scaled_dot_product_attention(*[rank_tensor(lambda rank: torch.ones(1, 4, 8) * rank)] * 3, dropout_p=0.5),
}  # fmt: skip
SEEDS = {
    "alike": lambda: torch.manual_seed(3),
    "by rank": lambda: torch.manual_seed(dist.get_rank()),
    "in pairs": lambda: torch.manual_seed(7 + dist.get_rank() // 2),
    "twice": lambda: (torch.manual_seed(dist.get_rank()), torch.randn(3), torch.manual_seed(2)),
}


def on_each(x):
    return [x.on(rank) if isinstance(x, LocalTensor) else x for rank in range(RANKS)]


def check_same(program):
    """In lockstep, the program gives on each rank what it gives on the ranks of `run`."""
    with LocalTensorMode(RANKS):
        found = program()
    wanted = run(program, ranks=RANKS).values
    for place, x in enumerate(found):
        for rank, got in enumerate(on_each(x)):
            assert torch.equal(got, wanted[rank][place]), f"draw {place} on rank {rank}: {got}, {wanted[rank][place]}"


@pytest.mark.few(24)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("draw", DRAWS)
def test_ranks_draw_what_real_ranks_draw(draw, seed):
    def program():
        SEEDS[seed]()
        return DRAWS[draw](), torch.rand(2), DRAWS[draw](), torch.randn(17)

    check_same(program)


def test_all_draws_one_after_the_other():
    def program():
        torch.manual_seed(dist.get_rank() % 3)
        found = [draw() for draw in DRAWS.values()]
        torch.manual_seed(1)
        return found + [draw() for draw in DRAWS.values()]

    check_same(program)


def test_ranks_that_draw_apart_and_meet_again_share_a_state():
    def program():
        torch.manual_seed(3)
        state = torch.get_rng_state()
        torch.manual_seed(dist.get_rank())
        mine = torch.get_rng_state()
        first = torch.rand(2)
        torch.set_rng_state(state)
        together = torch.rand(2)
        torch.set_rng_state(mine)
        return first, together, torch.rand(2)

    check_same(program)
    with LocalTensorMode(RANKS) as mode:
        first, together, again = program()
        assert first._partition.rows == RANKS and together._partition.uniform
        assert torch.equal(first, again) and len(mode.streams.of().states) == RANKS
        torch.manual_seed(dist.get_rank() * 0 + 1)
        assert mode.streams.of().states == [] and torch.rand(1)._partition.uniform


def test_one_rank_that_draws_more_is_alone_until_the_others_have_drawn_as_much():
    with LocalTensorMode(RANKS) as mode:
        x = rank_map(lambda rank: torch.rand(1) if rank == 2 else torch.zeros(1))
        assert len(mode.streams.of().states) == 2
        y = torch.rand(1)
        assert not torch.equal(y.on(2), y.on(0)) and torch.equal(x.on(2), y.on(0))
        tensor_map(x, lambda rank, one: torch.rand(1) if rank != 2 else one)
        assert mode.streams.of().states == []


def test_what_depends_on_the_shape_only_is_drawn_once():
    with LocalTensorMode(RANKS):
        x = rank_map(lambda rank: torch.full((3,), float(rank)))
        assert torch.rand_like(x)._partition.uniform and torch.randint_like(x, 9)._partition.uniform
        assert x.clone().uniform_()._partition.rows == RANKS  # overwritten as it is held


def test_only_the_ranks_that_hold_a_tensor_draw_for_it():
    with LocalTensorMode(RANKS) as mode:
        x = tensor_map(torch.zeros(3), lambda rank, one: one if rank < 2 else None)
        functional.dropout(x, 0.5)
        assert mode.streams.of().partition.row_of.tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])
        y = torch.rand(2)
        assert torch.equal(y.on(0), y.on(1)) and not torch.equal(y.on(1), y.on(2))


def test_a_mode_of_some_ranks_keeps_one_stream():
    with LocalTensorMode([1, 3]) as mode:
        assert torch.rand(2).reconcile().shape == (2,) and mode.streams.of().states == []
        torch.manual_seed(dist.get_rank())
        x = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(x.on(3), torch.rand(2))


def test_the_generator_is_put_back_after_the_mode():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    with LocalTensorMode(RANKS):
        torch.manual_seed(dist.get_rank())
        torch.randn(3)
    assert torch.equal(torch.get_rng_state(), before)
    with LocalTensorMode(RANKS):
        inside = torch.rand(3)
    assert torch.equal(inside.reconcile(), torch.rand(3))  # it started where the generator was


def test_a_generator_that_is_seeded_behind_our_back_is_seeded_on_all_ranks():
    with LocalTensorMode(RANKS):
        torch.manual_seed(dist.get_rank())
        generator = torch.Generator().manual_seed(1)
        torch.rand(dist.get_rank() + 1, generator=generator)  # ranks draw as many, of the same stream
        generator.manual_seed(5)
        torch.default_generator.manual_seed(5)
        assert torch.equal(torch.rand(2), torch.rand(2, generator=generator))
        assert torch.rand(2)._partition.uniform


def test_a_generator_of_the_program_is_where_the_first_rank_has_it_after_the_mode():
    mine = torch.Generator().manual_seed(1)
    with LocalTensorMode(RANKS):
        torch.rand(20 * (4 - dist.get_rank()), generator=mine)
    other = torch.Generator().manual_seed(1)
    torch.rand(80, generator=other)
    assert torch.equal(mine.get_state(), other.get_state())


def test_an_op_that_fails_leaves_every_stream_as_it_was():
    with LocalTensorMode(RANKS) as mode:
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="invalid multinomial distribution"):
            torch.multinomial(rank_map(lambda rank: torch.ones(3) * (rank != 3)), 2)
        assert torch.equal(torch.get_rng_state(), state) and mode.streams.of().states == []
        with pytest.raises(ZeroDivisionError):
            rank_map(lambda rank: torch.rand(1) / (rank < 2 or 1 // 0))
        assert torch.equal(torch.get_rng_state(), state) and mode.streams.of().states == []
        torch.manual_seed(dist.get_rank())
        state = torch.get_rng_state()
        with pytest.raises(RuntimeError, match="invalid multinomial distribution"):
            torch.multinomial(rank_map(lambda rank: torch.ones(3) * (rank != 3)), 2)
        assert torch.equal(torch.get_rng_state(), state) and mode.streams.of().partition.rows == RANKS


def test_fork_rng_and_checkpoint_bring_each_rank_its_own_numbers_back():
    def program():
        torch.manual_seed(dist.get_rank())
        with torch.random.fork_rng(devices=[]):
            first = torch.rand(2)
        second = torch.rand(2)
        x = torch.ones(8, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(lambda x: functional.dropout(x * x, 0.5), x, use_reentrant=False)
        y.sum().backward()
        return first, second, y.detach(), x.grad

    check_same(program)


def test_draws_outside_of_a_mode_that_has_ended():
    with LocalTensorMode(2):
        x = rank_map(lambda rank: torch.zeros(3) + rank)
    torch.manual_seed(0)
    got = torch.rand_like(x)
    torch.manual_seed(0)
    assert torch.equal(got.reconcile(), torch.rand(3))


def test_a_stream_says_where_each_rank_is():
    generator = torch.Generator().manual_seed(4)
    stream = Stream(generator, everyone(3))
    start = generator.get_state()
    with stream.drawing(one_row_per_rank([2], 3)) as at:
        at(0)
        torch.rand(1, generator=generator)
    assert torch.equal(stream.state_on(0), start) and not torch.equal(stream.state_on(2), start)
    assert stream.partition.row_of.tolist()[:2] == [stream.partition.row_of[0]] * 2
    with stream.drawing(every_rank_alone(3)) as at:
        for rank in (1, 0):
            at(rank)
            torch.rand(1, generator=generator)
    assert stream.states == [] and stream.partition.uniform


def test_streams_know_a_generator_by_what_it_is():
    mine, streams = torch.Generator(), Streams(everyone(2))
    assert streams.of(mine) is streams.of(mine) is not streams.of()
    assert streams.of_call((torch.ones(1), mine), {}) is streams.of(mine)
    assert streams.of_call((torch.ones(1),), {"generator": None}) is streams.of() is streams.of(torch.default_generator)

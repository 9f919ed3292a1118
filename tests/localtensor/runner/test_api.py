import math
import random
import threading
import warnings
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import (
    GroupsLeftOver,
    NoRanks,
    NotCallableWith,
    NotCopyable,
    NoTime,
    PiecesDiffer,
    UnknownWay,
    WrongType,
)
from localtensor.runner.api import timeout_limit

RANKS_SAY = "a group has at least one rank, and a whole number of them. Ask for 1 rank or more."
TIME_SAYS = "a limit is more than 0 seconds, and at most a day. Give it 30, say."
FN_SAYS = "Pass a function, and after it the arguments that it takes on one rank."
PIECES_SAY = "Make it 2 long, or pass a tuple to give it whole to every rank."
LOCK_SAYS = "cannot pickle '_thread.lock' object"
COPY_SAYS = "Make it inside the function, or bind it there by a closure or functools.partial: then the ranks share it."
SEED_SAYS = "it is no whole number that torch.manual_seed takes. Give it 0, say."
BAD_INPUT = {
    "no function": (NotCallableWith, (5,), {}, f"run: fn: 5: it is not a function. {FN_SAYS}"),
    "an argument is missing": (NotCallableWith, (pow, 1), {},
        f"run: fn: pow: missing a required argument: 'exp'. {FN_SAYS}"),
    "an argument too many": (NotCallableWith, (dist.is_initialized, 1), {},
        f"run: fn: is_initialized: too many positional arguments. {FN_SAYS}"),
    "no ranks": (NoRanks, (int,), {"ranks": 0}, f"run: ranks: ranks=0: {RANKS_SAY}"),
    "less than none": (NoRanks, (int,), {"ranks": -1}, f"run: ranks: ranks=-1: {RANKS_SAY}"),
    "half a rank": (NoRanks, (int,), {"ranks": 2.0}, f"run: ranks: ranks=2.0: {RANKS_SAY}"),
    "ranks in words": (NoRanks, (int,), {"ranks": "2"}, f"run: ranks: ranks='2': {RANKS_SAY}"),
    "ranks is a boolean": (NoRanks, (int,), {"ranks": True}, f"run: ranks: ranks=True: {RANKS_SAY}"),
    "ranks is nothing": (NoRanks, (int,), {"ranks": None}, f"run: ranks: ranks=None: {RANKS_SAY}"),
    "a seed in words": (WrongType, (int,), {"seed": "x"}, f"run: seed: 'x': {SEED_SAYS}"),
    "half a seed": (WrongType, (int,), {"seed": 0.5}, f"run: seed: 0.5: {SEED_SAYS}"),
    "too large a seed": (WrongType, (int,), {"seed": 2**64}, f"run: seed: 18446744073709551616: {SEED_SAYS}"),
    "too many ranks": (NoRanks, (int,), {"ranks": 10**30},
        f"run: ranks: ranks={10**30}: one machine has no room for so many. Ask for fewer."),
    "no time": (NoTime, (int,), {"timeout": 0}, f"run: timeout: timeout=0: {TIME_SAYS}"),
    "less than no time": (NoTime, (int,), {"timeout": -1.5}, f"run: timeout: timeout=-1.5: {TIME_SAYS}"),
    "time is no number": (NoTime, (int,), {"timeout": float("nan")}, f"run: timeout: timeout=nan: {TIME_SAYS}"),
    "time is a boolean": (NoTime, (int,), {"timeout": True}, f"run: timeout: timeout=True: {TIME_SAYS}"),
    "time in words": (NoTime, (int,), {"timeout": "1s"}, f"run: timeout: timeout='1s': {TIME_SAYS}"),
    "more than a day": (NoTime, (int,), {"timeout": 1e9}, f"run: timeout: timeout=1000000000.0: {TIME_SAYS}"),
    "an unknown way": (UnknownWay, (int,), {"on": "mpi"},
        "run: on: on='mpi': there is no such way to run. Write 'threads', 'gloo', 'nccl'."),
    "unknown leftovers": (UnknownWay, (int,), {"leftovers": "keep"},
        "run: leftovers: leftovers='keep': there is no such choice. Write 'warn', 'raise', 'ignore'."),
    "a piece too many": (PiecesDiffer, (abs, [1, 2, 3]), {},
        f"run: x: a list of 3 for 2 ranks: a list is dealt out, one piece for each rank. {PIECES_SAY}"),
    "not copyable": (NotCopyable, (abs, threading.Lock()), {},
        f"run: x: lock: each rank gets its own deep copy, and this one failed ({LOCK_SAYS}). {COPY_SAYS}"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_in_whole_sentences_before_any_thread_starts(case):
    kind, args, options, message = BAD_INPUT[case]
    before = threading.enumerate()
    with pytest.raises(kind) as caught:
        lt.run(*args, **{"ranks": 2, **options})
    assert str(caught.value) == message
    assert threading.enumerate() == before


def test_the_smallest_good_input_passes_the_same_checks():
    assert lt.run(abs, -1, ranks=1, timeout=86400, on="threads", leftovers="ignore").values == (1,)
    assert lt.run(abs, -1, ranks=1, timeout=None).values == (1,)


def test_each_rank_has_its_own_copy_of_an_argument():
    shared = {"x": torch.zeros(2), "log": ()}

    def own(given):
        given["x"] += dist.get_rank() + 1
        return given["x"].tolist()

    assert lt.run(own, shared, ranks=3).values == ([1.0, 1.0], [2.0, 2.0], [3.0, 3.0])
    assert shared["x"].tolist() == [0.0, 0.0]


def test_a_list_is_dealt_out_and_a_tuple_goes_whole_to_everybody():
    assert lt.run(lambda piece, whole: (piece, whole), [7, 8], (1, 2, 3), ranks=2).values == (
        (7, (1, 2, 3)),
        (8, (1, 2, 3)),
    )


def test_what_is_reached_by_closure_is_shared():
    seen = []
    lt.run(partial(lambda log: log.append(dist.get_rank()), seen), ranks=3)
    lt.run(lambda: seen.append(dist.get_rank() * 10), ranks=3)
    assert seen == [0, 1, 2, 0, 10, 20]


def test_an_object_can_say_what_each_rank_gets():
    class Dealt:
        def __localtensor_on__(self, rank):
            return rank * 100

    assert lt.run(lambda x: x, Dealt(), ranks=3).values == (0, 100, 200)


def test_a_leaf_stays_a_leaf_that_wants_its_gradient():
    leaf = torch.ones(2, requires_grad=True)

    def learn(x):
        (x * 3).sum().backward()
        return x.is_leaf, x.grad.tolist()

    assert lt.run(learn, leaf, ranks=2).values == ((True, [3.0, 3.0]), (True, [3.0, 3.0]))
    assert lt.run(learn, leaf, ranks=1, device="cpu").values == ((True, [3.0, 3.0]),)
    assert leaf.grad is None


def test_the_device_is_the_default_of_each_rank_and_of_no_one_else():
    assert lt.run(lambda: torch.empty(2).device.type, ranks=2, device="meta").values == ("meta", "meta")
    assert torch.empty(2).device.type == "cpu"


def draws():
    noise = torch.nn.functional.dropout(torch.ones(4), 0.5).tolist()
    return torch.randn(3).tolist(), torch.randperm(5).tolist(), noise, random.random(), np.random.rand()


@pytest.mark.parametrize("seed", [0, 1, 12345])
@pytest.mark.parametrize("schedule", ["round_robin", "shuffled:3"])
def test_every_rank_draws_what_a_process_seeded_alike_draws(seed, schedule):
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    alone = draws(), draws()
    torch.set_rng_state(state[0]), random.setstate(state[1]), np.random.set_state(state[2])

    def program():
        first = draws()
        dist.barrier()
        return first, draws()

    assert lt.run(program, ranks=3, seed=seed, schedule=schedule).values == (alone,) * 3
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]


def test_a_run_is_a_sequence_of_values():
    run = lt.run(lambda: dist.get_rank() * 2, ranks=4)
    assert list(run) == [0, 2, 4, 6] and run[3] == 6 and run[-1] == 6 and run[1:3] == (2, 4) and len(run) == 4
    assert repr(run) == "Run(values=(0, 2, 4, 6), replay='round_robin')"


def test_calls_say_what_the_ranks_did_and_where():
    def program():
        x = torch.ones(2, 3)
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            dist.send(x, 1, tag=5)
        else:
            dist.recv(x, 0, tag=5)

    calls = lt.run(program, ranks=2).calls
    short = [str(call).partition(", at ")[0] for call in calls]
    assert sorted(short) == [
        "rank 0: all_reduce #0 of f32[2,3] on cpu, op=sum, in group 0 (ranks 0, 1)",
        "rank 0: send #0 of f32[2,3] on cpu, peer=1, tag=5, in group 0 (ranks 0, 1)",
        "rank 1: all_reduce #0 of f32[2,3] on cpu, op=sum, in group 0 (ranks 0, 1)",
        "rank 1: recv #0 of f32[2,3] on cpu, peer=0, tag=5, in group 0 (ranks 0, 1)",
    ]
    first = program.__code__.co_firstlineno
    assert {(c.place.line - first, c.place.function) for c in calls} == {(2, "program"), (4, "program"), (6, "program")}
    assert all(call.bytes == 24 for call in calls)


def leaves_a_group():
    dist.new_group([0, 1])


def test_groups_left_over_warn_raise_or_are_ignored():
    line = leaves_a_group.__code__.co_firstlineno + 1
    message = (
        "new_group: group: group 1 on ranks 0, 1: made by the function, and still there when it returned. "
        "Call torch.distributed.destroy_process_group(group) on each rank that made it.\n"
        f"  group 1 of ranks 0, 1 at test_api.py:{line} in leaves_a_group"
    )
    with pytest.warns(lt.LeftoverWarning) as told:
        lt.run(leaves_a_group, ranks=2)
    assert [str(one.message) for one in told] == [message] and told[0].filename == __file__
    with pytest.raises(GroupsLeftOver) as caught:
        lt.run(leaves_a_group, ranks=2, leftovers="raise")
    assert str(caught.value) == message
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lt.run(leaves_a_group, ranks=2, leftovers="ignore")
    assert told == []


def test_the_environment_replaces_the_default_limit_and_no_other(monkeypatch):
    monkeypatch.delenv("LOCALTENSOR_TIMEOUT", raising=False)
    assert (timeout_limit(300.0), timeout_limit(7), timeout_limit(None)) == (300.0, 7, None)
    monkeypatch.setenv("LOCALTENSOR_TIMEOUT", "2.5")
    assert (timeout_limit(300.0), timeout_limit(7), timeout_limit(None)) == (2.5, 7, None)
    monkeypatch.setenv("LOCALTENSOR_TIMEOUT", "0")
    assert (timeout_limit(300.0), timeout_limit(7)) == (None, 7)


def test_a_decorator_may_give_arguments_that_no_one_passes():
    @mock.patch("math.tau", 7.0)
    @mock.patch("math.cosh")
    def patched(cosh):
        return cosh is math.cosh, math.tau

    assert list(lt.run(patched, ranks=2)) == [(True, 7.0)] * 2
    with pytest.raises(NotCallableWith, match="missing a required argument"):
        lt.run(lambda x: x, ranks=2)

"""localtensor.threads.state.patched_attributes: what a rank patches for a while is patched on that rank alone."""

import logging
import math
import os
import pkgutil
import unittest
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from localtensor import run
from localtensor.threads.state.swap import SLOTS

TABLE = {"of": "nobody"}
LOG = logging.getLogger("tests.rank_patches")
ASK = "torch.distributed.tensor._sharding_prop._select_min_cost_strategy"


def leave_after_the_rank_before():
    """All are in, and leave in the order in which they came: with one value for all, each would put back another's."""
    rank = dist.get_rank()
    dist.barrier()
    if rank:
        dist.recv(torch.empty(1), rank - 1)


def let_the_next_leave():
    rank = dist.get_rank()
    if rank < dist.get_world_size() - 1:
        dist.send(torch.ones(1), rank + 1)


def test_each_rank_has_its_own_patch_and_its_leaving_leaves_the_others_theirs():
    def patches():
        with mock.patch.object(math, "tau", dist.get_rank()):
            leave_after_the_rank_before()
            inside = math.tau
        outside = math.tau
        let_the_next_leave()
        return inside, outside

    before = math.tau
    assert run(patches, ranks=3).values == tuple((rank, before) for rank in range(3))
    assert math.tau == before


def test_a_patch_on_one_rank_is_on_no_other():
    def patches():
        if dist.get_rank() == 1:
            with mock.patch("os.getcwd", return_value="/mine"):
                dist.barrier()
                seen = os.getcwd()
                dist.barrier()
                return seen
        dist.barrier()
        seen = os.getcwd()
        dist.barrier()
        return seen

    here = os.getcwd()
    assert run(patches, ranks=3).values == (here, "/mine", here)


def test_a_patch_that_decorates_is_one_object_and_entered_by_each_rank():
    @mock.patch.object(math, "floor")
    def patched(floor):
        leave_after_the_rank_before()
        math.floor(dist.get_rank())
        let_the_next_leave()
        return floor.call_args.args

    before = math.floor
    assert run(lambda _: patched(), None, ranks=3).values == ((0,), (1,), (2,))
    assert math.floor is before


def test_several_at_once_and_started_ones_are_of_their_rank():
    def patches():
        rank = dist.get_rank()
        one = mock.patch.object(math, "e", rank)
        with mock.patch.multiple(math, tau=rank, pi=rank):
            one.start()
            leave_after_the_rank_before()
            seen = {math.tau, math.pi, math.e}
            one.stop()
        let_the_next_leave()
        return seen

    before = math.tau, math.pi, math.e
    assert run(patches, ranks=3).values == ({0}, {1}, {2})
    assert (math.tau, math.pi, math.e) == before


@pytest.mark.parametrize("decorates", [False, True])
def test_what_a_rank_puts_into_a_dict_is_there_on_that_rank(decorates):
    def looks():
        leave_after_the_rank_before()
        seen = dict(TABLE)
        let_the_next_leave()
        return seen

    def patches():
        return mock.patch.dict(TABLE, {"rank": dist.get_rank()})(looks)()

    @mock.patch.dict(TABLE, clear=True)
    def cleared():
        return looks()

    seen = run(cleared if decorates else patches, ranks=3).values
    assert seen == (({},) * 3 if decorates else tuple({"of": "nobody", "rank": rank} for rank in range(3)))
    assert TABLE == {"of": "nobody"}


@pytest.mark.parametrize("named", [f"{__name__}.TABLE", "os.environ"])
def test_a_dict_that_is_named_is_found(named):
    def patches():
        with mock.patch.dict(named, {"LT_OF_A_RANK": str(dist.get_rank())}):
            leave_after_the_rank_before()
            seen = pkgutil.resolve_name(named)["LT_OF_A_RANK"]
        let_the_next_leave()
        return seen, "LT_OF_A_RANK" in pkgutil.resolve_name(named)

    assert run(patches, ranks=3).values == (("0", False), ("1", False), ("2", False))
    assert "LT_OF_A_RANK" not in pkgutil.resolve_name(named)


def test_what_was_not_there_is_not_there_afterwards():
    def patches():
        with mock.patch.object(math, "of_a_rank", dist.get_rank(), create=True):
            dist.barrier()
        dist.barrier()
        return hasattr(math, "of_a_rank")

    assert run(patches, ranks=2).values == (False, False)
    assert not hasattr(math, "of_a_rank")


def test_a_patch_that_a_rank_leaves_open_ends_with_the_run():
    before = math.tau

    def forgets():
        mock.patch.object(math, "tau", 1).start()
        dist.barrier()
        return math.tau

    with mock.patch.object(mock._patch, "_active_patches", []):
        assert run(forgets, ranks=2).values == (1, 1)
    assert math.tau == before


def test_a_patch_around_a_run_is_for_all_its_ranks():
    with mock.patch.object(math, "tau", 5):
        assert run(lambda: (dist.barrier(), math.tau)[1], ranks=2).values == (5, 5)
        assert math.tau == 5


def test_asserted_logs_are_those_of_their_rank():
    def logs():
        with unittest.TestCase().assertLogs(LOG, "INFO") as logged:
            leave_after_the_rank_before()
            LOG.info("rank %s", dist.get_rank())
        let_the_next_leave()
        return logged.output

    before = list(LOG.handlers), LOG.level, LOG.propagate
    assert run(logs, ranks=3).values == tuple([f"INFO:{LOG.name}:rank {rank}"] for rank in range(3))
    assert (LOG.handlers, LOG.level, LOG.propagate) == before
    assert not LOG.isEnabledFor(logging.DEBUG)


def test_a_rank_without_asserted_logs_is_as_silent_as_before():
    def logs():
        if dist.get_rank() == 0:
            with unittest.TestCase().assertLogs(LOG, "DEBUG"):
                LOG.debug("one")
                dist.barrier()
                dist.barrier()
            return None
        dist.barrier()
        enabled = LOG.isEnabledFor(logging.DEBUG)
        dist.barrier()
        return enabled

    assert run(logs, ranks=2).values == (None, False)


def test_what_a_rank_sets_by_monkeypatch_is_its_own(monkeypatch):
    def patches():
        rank = dist.get_rank()
        monkeypatch.setattr(math, "tau", rank)
        monkeypatch.setattr("math.pi", rank)
        monkeypatch.setitem(TABLE, "rank", rank)
        if rank:
            monkeypatch.delattr(math, "e")
            monkeypatch.delitem(TABLE, "of")
        dist.barrier()
        return math.tau, math.pi, hasattr(math, "e"), dict(TABLE)

    before = math.tau, math.pi, math.e
    assert run(patches, ranks=3).values == (
        (0, 0, True, {"of": "nobody", "rank": 0}),
        (1, 1, False, {"rank": 1}),
        (2, 2, False, {"rank": 2}),
    )
    monkeypatch.undo()
    assert (math.tau, math.pi, math.e) == before
    assert TABLE == {"of": "nobody"}


def test_a_patched_rank_asks_propagation_itself():
    """Ranks share what they propagate; a mock that counts the questions of one rank must see all of them."""

    def asks():
        mesh = init_device_mesh("cpu", (2,))
        placed = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        with mock.patch(ASK, side_effect=lambda strategy, schema=None: strategy.strategies[0]) as asked:
            torch.frac(placed)
        return bool(asked.call_count)

    assert run(asks, ranks=2).values == (True, True)


def test_no_one_is_inside_a_patch_when_all_are_left():
    def patches():
        inside = SLOTS["patches"].inside
        with mock.patch.object(math, "tau", 0):
            within = inside()
        return within, inside()

    assert run(patches, ranks=2).values == ((True, False),) * 2

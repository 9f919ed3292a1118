"""What ranks write to the globals and classes of modules that they share, beside what tests/.../state_probe.py looks at."""

import contextlib
import json
import logging
import mimetypes
import pickle
import sys
import time
import types
import unittest.mock
from collections import OrderedDict, deque

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # the patched namespaces are those of a program that uses it
from torch import nn
from torch.distributed import distributed_c10d as c10d

import localtensor as lt
from localtensor.concurrency.schedule import round_robin
from localtensor.threads.isolation import isolate, watch
from localtensor.threads.isolation.namespaces import Contents, Namespace, RankNamespaces
from localtensor.threads.isolation.watch import Watch
from localtensor.threads.run import run_in_threads

VALUE, RANK = 0, None
KEPT: list = []


def write_and_read():
    global VALUE  # noqa: PLW0603  # what ranks write
    VALUE += dist.get_rank() + 1
    dist.barrier()
    return VALUE


def test_two_runs_in_a_row_begin_alike():
    assert (
        lt.run(write_and_read, ranks=3, isolate=True).values
        == lt.run(write_and_read, ranks=3, isolate=True).values
        == (1, 2, 3)
    )
    assert VALUE == 0


def test_nothing_is_left_of_a_run_that_fails():
    def fails():
        write_and_read()
        KEPT.append(1)
        raise ValueError(VALUE)

    with pytest.raises(lt.errors.RankRaised, match="ValueError: 1"):
        lt.run(fails, ranks=2, isolate=True)
    assert (VALUE, KEPT) == (0, [])


def test_what_a_function_refers_to_by_closure_is_shared():
    collected = []
    lt.run(lambda: collected.append(dist.get_rank()), ranks=3, isolate=True)
    assert collected == [0, 1, 2]


def patched_around_a_collective():
    """As torch's own tests of FSDP do: each rank patches a method of torch, and restores what it found."""
    original, calls = nn.Linear.forward, []

    def forward(self, x):
        calls.append(dist.get_rank())
        return original(self, x)

    nn.Linear.forward = forward
    dist.barrier()
    nn.Linear(1, 1)(torch.ones(1))
    dist.barrier()
    nn.Linear.forward = original
    dist.barrier()
    return calls, nn.Linear.forward is original


def test_a_method_of_torch_that_every_rank_patches_for_a_while():
    original = nn.Linear.forward
    assert lt.run(patched_around_a_collective, ranks=3, isolate=True).values == tuple(
        ([rank], True) for rank in range(3)
    )
    assert nn.Linear.forward is original


def test_a_rank_that_never_restores_leaves_torch_as_it_was():
    original = c10d.all_reduce

    def program():
        c10d.all_reduce = lambda *args: dist.get_rank()
        dist.barrier()
        return c10d.all_reduce()

    assert lt.run(program, ranks=2, isolate=True).values == (0, 1)
    assert c10d.all_reduce is original


def test_what_a_shared_module_imports_is_there_for_all_ranks():
    parent = sys.modules["torch.distributed"]
    assert isolate.write_rule(parent, "fsdp", torch.distributed.fsdp) == isolate.FOR_ALL
    assert isolate.write_rule(parent, "fsdp", types.ModuleType("lt_own")) == isolate.OWN


def test_what_this_package_puts_into_torch_for_all_ranks_and_takes_out_again_is_no_ranks_own():
    owner = types.ModuleType("lt_owner")
    owner.function = original = len
    cell = Namespace(owner, vars(owner), isolate.write_rule)
    owner.function = isolate.write_rule  # code of this package
    assert cell.changes() == {}
    owner.function = original
    assert cell.changes() == {}
    assert cell.first["function"] is original


class Fussy:
    __slots__ = ("held",)

    def __getattr__(self, name):
        raise LookupError(f"nothing is called {name}")


FUSSY = Fussy()


def test_an_object_whose_getattr_raises_is_left_alone():
    assert lt.run(lambda: FUSSY is not None, ranks=2, isolate=True).values == (True, True)


@pytest.mark.slow
def test_a_mock_of_a_tracked_module_is_the_ranks_own_and_ends():
    def program():
        with (
            unittest.mock.patch(f"{__name__}.RANK", dist.get_rank()),
            unittest.mock.patch.object(time, "time", dist.get_rank),
        ):
            dist.barrier()
            inside = RANK, time.time()
            dist.barrier()
        return inside, RANK, time.time() > 1

    assert lt.run(program, ranks=2, isolate=True).values == tuple(((rank, rank), None, True) for rank in (0, 1))


def test_a_capturing_handler_of_the_caller_sees_all_ranks(caplog):
    lt.run(lambda: logging.getLogger("lt.captured").warning("rank %d", dist.get_rank()), ranks=2, isolate=True)
    assert sorted(caplog.messages) == ["rank 0", "rank 1"]


CHANGES = {
    "dict": ({"a": 1}, lambda c: c.update(a=2)),
    "dict, new key": ({"a": 1}, lambda c: c.update(b=2)),
    "dict, other order": ({"a": 1, "b": 2}, lambda c: c.update(a=c.pop("a"))),
    "ordered dict": (OrderedDict(a=1, b=2), lambda c: c.move_to_end("a")),
    "list": ([1, 2], lambda c: c.append(3)),
    "list, one element": ([1, 2], lambda c: c.__setitem__(1, 3)),
    "list, other order": ([1, 2], lambda c: c.reverse()),
    "set": ({1, 2}, lambda c: c.add(3)),
    "set, as many": ({1, 2}, lambda c: (c.clear(), c.update((1, 7)))),
    "deque": (deque([1, 2]), lambda c: c.append(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_container_is_seen_kept_and_put_back(name):
    container, change = CHANGES[name]
    before, track = list(container), RankNamespaces(2)
    track.add([Contents(container)])
    track.turn(0)
    change(container)
    after = list(container)
    track.turn(1)
    assert list(container) == before
    track.turn(0)
    assert list(container) == after or (isinstance(container, set) and container == set(after))
    track.turn(None)
    assert list(container) == before


def test_a_look_at_what_has_not_changed_finds_nothing():
    containers = [{"a": 1}, [1, 2], {1, 2}, deque([1]), {}, []]
    seen = Watch()
    seen.add(containers)
    assert seen.changed() == []
    containers[1].extend(range(1000))  # its table moves
    containers[4]["x"] = 1
    assert seen.changed() == [1, 4]
    seen.read([1, 4])
    assert seen.changed() == []
    containers[1][500] = None
    assert seen.changed() == [1]


def test_the_words_of_memory_are_where_they_are_read():
    assert watch.ON_SIGHT or sys.version_info >= (3, 13)


def test_without_versions_each_cell_is_compared(monkeypatch):
    monkeypatch.setattr("localtensor.threads.isolation.namespaces.ON_SIGHT", False)
    monkeypatch.setattr("localtensor.threads.isolation.reach.ON_SIGHT", False)
    assert lt.run(write_and_read, ranks=3, isolate=True).values == (1, 2, 3)
    assert lt.run(patched_around_a_collective, ranks=2, isolate=True).values == tuple(([rank], True) for rank in (0, 1))


def test_a_hand_over_that_changes_nothing_writes_nothing():
    track, space = RankNamespaces(2), {"name": 1}
    owner = types.SimpleNamespace()
    track.add([Namespace(owner, space, lambda *_: isolate.OWN)])
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(Namespace, "put", None)  # would raise if called
        for rank in (0, 1, 0, None):
            track.turn(rank)
    assert space == {"name": 1}


def test_what_a_rank_registers_in_a_table_of_the_standard_library_is_its_own():
    def body():
        rank = dist.get_rank()
        name = f"lt_kind_{rank}"
        pickle._Pickler.dispatch[type(name, (), {})] = write_and_read
        kept = len(pickle._Pickler.dispatch), len(mimetypes.types_map)
        mimetypes.types_map[f".{name}"] = name
        json.JSONEncoder.lt_rank = rank
        dist.barrier()
        assert f".lt_kind_{1 - rank}" not in mimetypes.types_map and json.JSONEncoder.lt_rank == rank
        return kept, (len(pickle._Pickler.dispatch), len(mimetypes.types_map))

    before = len(pickle._Pickler.dispatch), len(mimetypes.types_map)
    expected = (before[0] + 1, before[1]), (before[0] + 1, before[1] + 1)
    assert (
        run_in_threads(lambda rank: body(), 2, round_robin(), 0, 60.0, fresh=True, roots=(body,)).values
        == (expected,) * 2
    )
    assert (len(pickle._Pickler.dispatch), len(mimetypes.types_map)) == before
    assert not hasattr(json.JSONEncoder, "lt_rank")


def test_a_class_with_a_descriptor_for_code_may_replace_a_name_of_a_module():
    def body():
        json.lt_kind = types.FunctionType
        dist.barrier()
        return json.lt_kind is types.FunctionType

    assert run_in_threads(lambda rank: body(), 2, round_robin(), 0, 60.0, fresh=True, roots=(body,)).values == (
        True,
        True,
    )
    assert not hasattr(json, "lt_kind")

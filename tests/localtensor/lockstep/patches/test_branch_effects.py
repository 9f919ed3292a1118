"""A statement that runs for some ranks only must not change what all of them share: it is refused, never lost or done for all."""

import functools
import importlib
import random
import sys
import unittest
from array import array
from collections import Counter, deque

import numpy as np
import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.errors import LocalTensorError, NotInLockstep
from localtensor.lockstep.patches.branch_effects import Effects

RANKS, COUNTS = 4, [0]
total = 0


class Box:
    def __init__(self):
        self.value, self.inner = 0, None

    def add(self):
        self.value += 1


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0

    def add(self):
        self.value += 1


class Documented:
    __slots__ = {"value": "a number"}

    def __init__(self):
        self.value = 0

    def add(self):
        self.value += 1


def nested():
    box = Box()
    box.inner = Box()
    return box


def count():
    COUNTS[0] += 1


def rebind():
    global total  # noqa: PLW0603  # what is tested
    total += 1


def counter_in_closure():
    held = [0]

    def add():
        held[0] += 1

    return add


DONE = {
    "append to a list": ([1], lambda x: x.append(2)),
    "append to a list in a list": ([[1]], lambda x: x[0].append(2)),
    "sort a list": ([2, 1], lambda x: x.sort()),
    "grow a set": (set(), lambda x: x.add(1)),
    "grow a dict": ({}, lambda x: x.setdefault("a", 1)),
    "grow an empty counter": (Counter(), lambda x: x.update([1])),
    "grow a deque": (deque([1]), lambda x: x.append(2)),
    "grow bytes": (bytearray(b"a"), lambda x: x.extend(b"b")),
    "write to an array of Python": (array("i", [1, 2]), lambda x: x.append(3)),
    "write to an array": (np.zeros(3), lambda x: x.fill(2)),
    "write to a view of an array": (np.zeros(3), lambda x: np.add(x[1:], 1, out=x[1:])),
    "set an attribute": (Box(), lambda x: x.add()),
    "set an attribute further in": (nested(), lambda x: x.inner.add()),
    "set a slot": (Slotted(), lambda x: x.add()),
    "by a bound method": (Box().add, lambda x: x()),
    "by a method of C": ([].append, lambda x: x(1)),
    "by a partial function": (functools.partial(Box.add, Box()), lambda x: x()),
    "by a closure": (counter_in_closure(), lambda x: x()),
    "of a global that a function names": (count, lambda x: x()),
    "rebind a global in a function": (rebind, lambda x: x()),
    "take from an iterator": (iter([1, 2]), next),
    "take from an iterator of iterators": (zip([1, 2], [3, 4], strict=True), next),
    "take from a map": (map(abs, [1, 2]), next),
    "take from an iterator of a dict": (iter({1: 2, 3: 4}), next),
    "set a slot that a dict documents": (Documented(), lambda x: x.add()),
    "take from a generator": ((i for i in range(3)), next),
    "draw a random number": (random.Random(0), lambda x: x.random()),
    "draw one of numpy's": (np.random.default_rng(0), lambda x: x.random()),
}


@pytest.mark.parametrize("name", DONE)
def test_what_changes_a_shared_object_on_some_ranks_is_refused(name):
    shared, change = DONE[name]

    def program():
        rank = dist.get_rank()
        if rank == 0:
            change(shared)

    with lt.LocalTensorMode(RANKS), pytest.raises(NotInLockstep, match="on some ranks only"):
        program()


def assigns_a_global():
    global total  # noqa: PLW0603  # what is tested
    rank = dist.get_rank()
    if rank == 0:
        total = 1


def chooses_within_a_comprehension():
    rank = dist.get_rank()
    row = [1 if rank == i else 0 for i in range(RANKS)]
    return row  # noqa: RET504  # an assignment is what runs for each kind of rank


def assigns_an_array():
    rank, x = dist.get_rank(), np.zeros(2)
    if rank == 0:
        x = x + 1
    return x


@pytest.mark.parametrize("program", [assigns_a_global, chooses_within_a_comprehension, assigns_an_array])
def test_what_cannot_be_joined_is_refused(program):
    with lt.LocalTensorMode(RANKS), pytest.raises(LocalTensorError):
        program()


def test_reading_shared_objects_is_allowed():
    def program():
        rank, box, numbers, x = dist.get_rank(), nested(), [1, 2, 3], torch.zeros(2)
        if rank == 1:
            x = x + numbers[2] + box.value
        return x

    with lt.LocalTensorMode(RANKS):
        x = program()
        assert [x.on(rank)[0].item() for rank in range(RANKS)] == [0, 3, 0, 0]


@pytest.fixture(scope="class")
def fresh_module(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fresh")
    (folder / "test_of_nothing.py").write_text("SEVEN = 7")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


def imports_and_asserts(case):
    rank = dist.get_rank()
    if rank == 0:
        case.assertEqual(importlib.import_module("test_of_nothing").SEVEN, 7)  # noqa: PT009  # what is tested


def cleans_up(case):
    rank = dist.get_rank()
    if rank == 0:
        case.addCleanup(print, "on all ranks")


@pytest.mark.usefixtures("fresh_module")
class TestRunner(unittest.TestCase):
    def test_caches_of_the_runner_of_tests_may_change(self):
        with lt.LocalTensorMode(RANKS):
            imports_and_asserts(self)
        assert "test_of_nothing" in sys.modules

    def test_what_a_test_case_does_later_is_refused(self):
        with lt.LocalTensorMode(RANKS), pytest.raises(NotInLockstep, match="if: case"):
            cleans_up(self)
        assert self._cleanups.pop()[1] == ("on all ranks",)


def sets_a_variable(monkeypatch):
    rank = dist.get_rank()
    if rank == 0:
        monkeypatch.setenv("ON_SOME_RANKS", "1")


def test_a_patch_on_some_ranks_is_refused(monkeypatch):
    with lt.LocalTensorMode(RANKS), pytest.raises(NotInLockstep, match="if: monkeypatch"):
        sets_a_variable(monkeypatch)


def test_more_than_can_be_followed_is_refused(monkeypatch):
    monkeypatch.setattr("localtensor.lockstep.patches.branch_effects.MOST_HELD", 10)
    with pytest.raises(NotInLockstep, match="so much can be reached"):
        Effects({"numbers": list(range(1000, 1020))})

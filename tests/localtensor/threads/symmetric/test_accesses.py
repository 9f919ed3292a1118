import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localtensor.threads.symmetric import accesses
from localtensor.threads.symmetric.accesses import Access, Footprint, Shadow, footprint_of, footprint_of_elements
from localtensor.threads.symmetric.order import Order

SIZE = 32


@st.composite
def views(draw):
    """A strided view of one storage of `SIZE` bytes, of a random dtype, shape, strides and offset."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
    base = torch.zeros(SIZE, dtype=torch.uint8).view(dtype)
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    stride = [draw(st.integers(0, 5)) for _ in shape]
    span = sum(max(count - 1, 0) * step for count, step in zip(shape, stride))
    if span >= base.numel():
        shape, stride, span = [], [], 0
    return base.as_strided(shape, stride, draw(st.integers(0, base.numel() - 1 - span)))


def bytes_of(x):
    """The plain way: each element's address."""
    size, found = x.element_size(), set()
    for index in np.ndindex(*x.shape):
        first = (x.storage_offset() + sum(i * step for i, step in zip(index, x.stride()))) * size
        found.update(range(first, first + size))
    return found


def bytes_in(where):
    return set() if where is None else set(np.arange(SIZE)[where.index()].tolist())


@given(views())
def test_a_footprint_is_exact_to_the_byte(x):
    where = footprint_of(x)
    assert bytes_in(where) == bytes_of(x)
    if where is not None:
        assert (where.lo, where.hi) == (min(bytes_of(x)), max(bytes_of(x)) + 1)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(views(), views())
def test_overlap_agrees_with_sets_of_bytes(x, y):
    a, b = footprint_of(x), footprint_of(y)
    if a is None or b is None:
        return
    assert a.overlaps(b) == bool(bytes_of(x) & bytes_of(y))
    assert a.key != b.key or bytes_of(x) == bytes_of(y)


@given(views(), st.data())
def test_the_footprint_of_some_elements_is_that_of_each(x, data):
    chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=x.numel(), max_size=x.numel())), dtype=torch.bool)
    chosen = chosen.view(x.shape)
    each = [bytes_of(x[tuple(index)]) for index in chosen.nonzero().tolist()]
    assert bytes_in(footprint_of_elements(x, chosen)) == set().union(*each)


def programs(count):
    """Programs of three ranks: accesses (rank, writes, first byte, length) and edges (from, to), from few to many."""
    draw = random.Random(29)
    for _ in range(count):
        edges, length = draw.choice([0.3, 0.6, 0.8, 0.9]), draw.randint(1, 60)
        yield [
            (draw.randrange(3), draw.randrange(3))
            if draw.random() < edges
            else (draw.randrange(3), draw.random() < 0.4, draw.randrange(4), draw.randint(1, 2))
            for _ in range(length)
        ]


def first_race(steps):
    """The plain way: every access is kept, and happens-before is the transitive closure of a graph."""
    kept, past = [], [set() for _ in range(3)]
    for number, step in enumerate(steps):
        if len(step) == 2:
            past[step[1]] |= past[step[0]]
            continue
        rank, writes, lo, length = step
        mine = set(range(lo, lo + length))
        for earlier, other_writes, theirs in kept:
            if (writes or other_writes) and mine & theirs and earlier not in past[rank]:
                return number
        kept.append((number, writes, mine))
        past[rank].add(number)
    return None


def detected(steps):
    order = Order(3)
    shadow = Shadow(SIZE, order, 0)
    shadow.ranks.update(range(3))
    for number, step in enumerate(steps):
        if len(step) == 2:
            order.hosts[step[1]].current.learn(order.hosts[step[0]].current.publish())
            continue
        rank, writes, lo, length = step
        lane = order.hosts[rank].current
        access = Access(lane, lane.time, writes, Footprint(lo, length), "op", None)
        if shadow.add(access) is not None:
            return number
    return None


def test_a_race_is_found_if_and_only_if_the_plain_way_finds_one(monkeypatch):
    monkeypatch.setattr(accesses, "FIRST_SWEEP", 2)  # so that accesses are removed in a short program, too
    found = 0
    for steps in programs(6000):
        race = first_race(steps)
        assert detected(steps) == race, steps
        found += race is not None
    assert 1500 < found < 5500


def test_accesses_known_to_all_streams_are_not_kept():
    order = Order(2)
    shadow, (a, b) = Shadow(1 << 16, order, 0), [host.current for host in order.hosts]
    shadow.ranks.add(1)
    for step in range(5000):
        assert shadow.add(Access(a, a.time, True, Footprint(step * 8, 8), "op", None)) is None
        b.learn(a.publish())
        a.learn(b.publish())
    assert sum(map(len, shadow._accesses.values())) <= 512


@given(st.lists(views(), max_size=6), views())
def test_the_bytes_that_no_rank_has_written_are_counted(written, read):
    shadow, seen = Shadow(SIZE, Order(1), 0), set()
    for x in written:
        where = footprint_of(x)
        if where is not None:
            shadow.mark_written(where)
            seen |= bytes_of(x)
    where = footprint_of(read)
    if where is not None:
        mine = bytes_of(read)
        assert shadow.unwritten(where) == (len(mine - seen), len(mine)) or seen >= set(range(SIZE))

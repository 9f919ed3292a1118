import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import localtensor as lt
from localtensor.threads import buffer_watch
from localtensor.threads.buffer_watch import overlap

BASE = torch.arange(24.0)


def elements(x):
    """Where each element lies: the slow obvious twin."""
    first = x.storage_offset()
    at = [first]
    for size, stride in zip(x.shape, x.stride()):
        at = [place + i * stride for place in at for i in range(size)]
    return {byte for place in at for byte in range(place * x.element_size(), (place + 1) * x.element_size())}


@st.composite
def views(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=2))
    stride = draw(st.lists(st.integers(0, 4), min_size=len(shape), max_size=len(shape)))
    reach = sum((size - 1) * step for size, step in zip(shape, stride) if size)
    return torch.as_strided(BASE, shape, stride, draw(st.integers(0, 23 - reach)))


@given(views(), views())
def test_two_views_overlap_if_they_share_an_element(a, b):
    shared = bool(a.numel() and b.numel() and elements(a) & elements(b))
    assert overlap(a, b) == shared == overlap(b, a)


def test_parts_of_elements_are_seen_in_any_dtype():
    numbers = torch.zeros(4, dtype=torch.complex64)
    assert overlap(numbers, numbers.imag) and overlap(numbers.real, numbers) and not overlap(numbers.real, numbers.imag)
    halves = BASE.view(torch.int16)[1::2]
    assert (
        overlap(BASE[::2], halves) and overlap(halves, BASE[1::2]) and not overlap(halves, BASE.view(torch.int16)[::2])
    )
    assert not overlap(BASE[::2], halves[1::2])


def test_columns_side_by_side_do_not_overlap():
    whole = BASE.view(4, 6)
    assert not overlap(whole[:, 0], whole[:, 1]) and overlap(whole[:, 0], whole[1])
    assert not overlap(BASE[1:5], BASE[::6]) and overlap(BASE[1:7], BASE[::6])
    assert overlap(whole, whole.T) and not overlap(whole[:2], whole[2:])


def test_other_memory_and_empty_tensors_do_not_overlap():
    assert not overlap(BASE, BASE.clone()) and not overlap(BASE[:0], BASE)


@pytest.mark.parametrize(("a", "b", "shared"), [
    (slice(0, None, 2), slice(0, None, 2), True),
    (slice(0, 10), slice(1 << 18, None), False),
])  # fmt: skip
def test_large_ones_are_compared_by_their_ranges(a, b, shared):
    large = torch.zeros(1 << 19)
    assert overlap(large[a], large[b]) is shared


def test_views_of_another_dtype_share_bytes():
    as_bytes = BASE.view(torch.uint8)
    assert overlap(as_bytes[3:4], BASE[0:1]) and not overlap(as_bytes[4:5], BASE[0:1])


def test_large_strided_views_overlap_only_if_they_are_the_same():
    x = torch.zeros(600, 600)
    left, right = x[:, :300], x[:, 300:]
    assert overlap(left, left)
    assert not overlap(left, right)


def test_a_call_is_compared_with_what_shares_its_memory_only(monkeypatch):
    compared = []
    monkeypatch.setattr(buffer_watch, "overlap", lambda a, b: bool(compared.append(a)))

    def program():
        tensors = [torch.ones(4) for _ in range(20)]
        for work in [dist.all_reduce(x, async_op=True) for x in tensors]:
            work.wait()
        x = torch.ones(4)
        work = dist.all_reduce(x[:2], async_op=True)
        x[2:].add_(1)  # the same memory
        work.wait()

    lt.run(program, ranks=2)
    assert 0 < len(compared) <= 4

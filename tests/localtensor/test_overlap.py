"""Whether two tensors share an element, against the plain definition."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from localtensor.overlap import overlap

SLICES = st.builds(slice, st.integers(0, 5), st.integers(0, 6), st.integers(1, 3))


def views(base):
    return st.tuples(SLICES, SLICES, st.booleans()).map(
        lambda cut: base[cut[0], cut[1]].t() if cut[2] else base[cut[0], cut[1]]
    )


BASE = torch.arange(36).reshape(6, 6)


@given(views(BASE), views(BASE))
def test_views_overlap_if_they_share_an_element(a, b):
    assert overlap(a, b) == bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))


def test_tensors_of_their_own_never_overlap():
    assert not overlap(torch.ones(3), torch.ones(3))


def test_views_of_another_dtype_are_measured_in_bytes():
    x = torch.zeros(4, dtype=torch.float32)
    assert overlap(x[2:], x.view(torch.uint8)[8:9])
    assert not overlap(x[2:], x.view(torch.uint8)[:8])


def test_large_strided_views_overlap_only_if_they_are_the_same():
    x = torch.zeros(600, 600)
    left, right = x[:, :300], x[:, 300:]
    assert overlap(left, left)
    assert not overlap(left, right)

"""Sizes and offsets of shards for all coordinates at once, against DTensor's own, asked for one coordinate at a time."""

import itertools

import pytest
from torch.distributed.tensor import Shard, _utils
from torch.distributed.tensor.placement_types import _StridedShard

from localtensor.lockstep.patches.shard_offsets import shard_sizes_and_starts

# Asked here with plain numbers, outside of any mode.
of_one = _utils._compute_local_shape_and_global_offset

CUTS = {
    "one": (4,),
    "two": (2, 3),
    "three": (2, 2, 2),
    "strided": ((2, 2), 2),
    "strided, three": ((2, 4), 2, 2),
    "strided behind a plain one": (2, (2, 3)),
}


def cuts_of(name):
    return tuple(cut if isinstance(cut, tuple) else (cut, 0) for cut in CUTS[name])


def placements(cuts):
    return [_StridedShard(0, split_factor=stride) if stride else Shard(0) for _, stride in cuts]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 7, 8, 12, 13])
@pytest.mark.parametrize("name", CUTS)
def test_every_coordinate_has_what_torch_says(name, size):
    cuts = cuts_of(name)
    mesh = [chunks for chunks, _ in cuts]
    sizes, starts = shard_sizes_and_starts(size, cuts, size)
    assert sizes.shape == starts.shape == tuple(mesh)
    for place in itertools.product(*map(range, mesh)):
        shape, offset = of_one((size,), mesh, list(place), placements(cuts))
        assert (int(sizes[place]), int(starts[place])) == (shape[0], offset[0]), place


def test_the_sizes_of_all_shards_make_the_whole():
    for name, size in itertools.product(CUTS, range(20)):
        sizes, _ = shard_sizes_and_starts(size, cuts_of(name), size)
        assert int(sizes.sum()) == size

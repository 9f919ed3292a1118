"""The size of each shard of one dim, and where it begins, for every coordinate at once.

A dim can be cut by several axes of a mesh, from left to right.  A cut is (chunks, stride): plain cuts follow
torch.chunk and have stride 0; a strided one cuts the dim into `stride` pieces first, and a shard is a chunk of each.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Cut = tuple[int, int]
Counts = np.ndarray[Any, Any]


@lru_cache(1024)
def shards(size: int, cuts: tuple[Cut, ...], past: int) -> tuple[Counts, Counts]:
    """The size and the first index of each shard, int64 with a dim for each cut; an empty one begins at `past`.

    >>> shards(5, ((4, 0),), 5)
    (array([2, 2, 1, 0]), array([0, 2, 4, 5]))
    >>> shards(9, ((4, 2),), 9)[0]
    array([3, 3, 2, 1])
    """
    sizes, starts = _plain(size, cuts) if not any(stride for _, stride in cuts) else _strided(size, cuts)
    return sizes, np.where(sizes > 0, starts, past)


def _plain(size: int, cuts: Sequence[Cut]) -> tuple[Counts, Counts]:
    sizes, starts = np.array(size), np.array(0)
    for chunks, _ in cuts:
        sizes, starts = sizes[..., None], starts[..., None]
        step = -(-sizes // chunks)
        inside = np.minimum(step * np.arange(chunks), sizes)
        sizes, starts = np.minimum(step, sizes - inside), starts + inside
    return sizes, starts


def _strided(size: int, cuts: Sequence[Cut]) -> tuple[Counts, Counts]:
    """By the indices of each shard themselves."""
    held = [np.arange(size)]
    for chunks, stride in cuts:
        held = [shard for whole in held for shard in _cut(whole, chunks, max(stride, 1))]
    shape = [chunks for chunks, _ in cuts]
    sizes = np.array([len(shard) for shard in held])
    starts = np.array([shard[0] if len(shard) else 0 for shard in held])
    return sizes.reshape(shape), starts.reshape(shape)


def _cut(whole: Counts, chunks: int, stride: int) -> list[Counts]:
    pieces = [_chunks(piece, chunks) for piece in _chunks(whole, stride)]
    return [np.concatenate([piece[place] for piece in pieces]) for place in range(chunks)]


def _chunks(whole: Counts, chunks: int) -> list[Counts]:
    step = -(-len(whole) // chunks)
    return [whole[step * place : step * (place + 1)] for place in range(chunks)]

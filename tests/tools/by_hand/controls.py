"""Programs in which DTensor is right: the runner must accuse none of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's own pages call it)

from tests.tools.by_hand.words import AVG, MAX, S0, S1, SUM, Given, R, count, right


@right()
def cumprod_along_the_other_dim(d: Given) -> Any:
    return torch.cumprod(d(count(2, 4), S1), 0)


@right()
def sum_of_shards(d: Given) -> Any:
    return d(count(4, 2), S0).sum()


@right((3,))
def mean_of_even_shards(d: Given) -> Any:
    return d(count(6, 2), S0).mean()


@right((3,))
def uneven_shards_with_an_empty_one(d: Given) -> Any:
    return d(count(4, 2), S0) * 2 + 1


@right()
def matmul_and_its_gradients(d: Given) -> Any:
    x, w = d(count(2, 4), S1, grad=True), d(count(4, 2), S0, grad=True)
    (x @ w).pow(2).sum().backward()
    return x.grad, w.grad


@right()
def sum_of_partial_values(d: Given) -> Any:
    return d(count(4), SUM) * 2


@right()
def negative_of_an_average(d: Given) -> Any:
    return -d(count(4), AVG)


@right()
def relu_of_partial_sums(d: Given) -> Any:
    return torch.relu(d(count(4) - 3, SUM))


@right()
def maximum_of_partial_maxima(d: Given) -> Any:
    return torch.maximum(d(count(4), MAX), d(5 - count(4), MAX))


@right()
def addition_in_place(d: Given) -> Any:
    x = d(count(4), S0)
    x.add_(d(count(4), R))
    return x


@right((2, 2))
def layer_norm_on_two_axes(d: Given) -> Any:
    x = d(count(4, 2, 3), S0, S1, grad=True)
    F.layer_norm(x, [3]).pow(2).sum().backward()
    return x.grad


@right()
def cat_along_the_sharded_dim(d: Given) -> Any:
    return torch.cat([d(count(4), S0), d(count(2), S0)])


@right()
def softmax_along_the_sharded_dim(d: Given) -> Any:
    return torch.softmax(d(count(2, 4), S1), 1)


@right()
def embedding_of_sharded_rows(d: Given) -> Any:
    return F.embedding(d([0, 3, 2]), d(count(4, 2), S0))


@right((2, 2))
def redistribution_of_two_axes(d: Given) -> Any:
    x = d(count(5, 3), S0, S1)
    return x if d.mesh is None else x.redistribute(placements=[S1, S0])


@right()
def any_of_booleans(d: Given) -> Any:
    return torch.any(d([False, False, True, False], S0))

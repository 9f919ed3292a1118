"""Losses: their means over shards, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (as torch's own pages call it)

from tests.tools.by_hand.words import FALSE, S0, S1, S2, S3, Given, R, check, count

aten = torch.ops.aten


@check("aten.mse_loss.default: S(0), S(0) -> P(avg)")
def mse_loss_of_uneven_shards(d: Given) -> Any:
    return F.mse_loss(d(count(3), S0), d([0.0, 0.0, 0.0], S0))


@check("aten.mse_loss.default on (2,): S(0), S(0), then grad")
def mse_loss_gradient_of_even_shards(d: Given) -> Any:
    x = d(count(4), S0, grad=True)
    F.mse_loss(x, d([0.0, 0.0, 0.0, 0.0], S0)).backward()
    return x.grad


@check("aten.mse_loss.default on (2,): S(1), S(1), then sgd")
def mse_loss_and_a_step_of_sgd(d: Given) -> Any:
    w = d(count(2, 4), S1, grad=True)
    F.mse_loss(w, d(torch.zeros(2, 4), S1)).backward()
    torch.optim.SGD([w], lr=0.5).step()
    return w


@check("aten.huber_loss.default: S(0), S(0) -> P(avg)")
def huber_loss_of_uneven_shards(d: Given) -> Any:
    return F.huber_loss(d(count(3), S0), d([0.0, 0.0, 0.0], S0))


@check("aten.huber_loss.default on (2,): S(0), S(0), then sgd")
def huber_loss_gradient(d: Given) -> Any:
    x = d(count(4), S0, grad=True)
    F.huber_loss(x, d([0.5, 0.5, 0.5, 0.5], S0)).backward()
    return x.grad


@check("aten.smooth_l1_loss.default: S(0), S(0) -> P(avg)")
def smooth_l1_loss_of_uneven_shards(d: Given) -> Any:
    return F.smooth_l1_loss(d(count(3), S0), d([0.0, 0.0, 0.0], S0))


@check("aten.smooth_l1_loss.default on (3,): R, S(0)", (3,))
def smooth_l1_loss_of_a_replica_and_uneven_shards(d: Given) -> Any:
    return F.smooth_l1_loss(d(count(4)), d([0.0, 0.0, 0.0, 0.0], S0))


@check("aten.smooth_l1_loss.default on (2,): S(0), S(0), then grad")
def smooth_l1_loss_gradient(d: Given) -> Any:
    x = d(count(2, 3), S0, grad=True)
    F.smooth_l1_loss(x, d(torch.zeros(2, 3), S0)).backward()
    return x.grad


@check("aten.soft_margin_loss.default: S(2), S(2) -> P(avg)")
def soft_margin_loss_of_uneven_shards(d: Given) -> Any:
    return F.soft_margin_loss(d(count(2, 1, 3), S2), d(torch.ones(2, 1, 3), S2))


@check("aten.soft_margin_loss.default on (2,): S(1), S(1), then grad of input 0 alone")
def soft_margin_loss_gradient(d: Given) -> Any:
    x = d(count(2, 4) / 4, S1, grad=True)
    F.soft_margin_loss(x, d(torch.ones(2, 4), S1)).backward()
    return x.grad


@check("aten.binary_cross_entropy.default: S(0), S(0) -> P(avg)")
def binary_cross_entropy_of_uneven_shards(d: Given) -> Any:
    return F.binary_cross_entropy(d([0.9, 0.9, 0.2], S0), d([1.0, 0.0, 1.0], S0))


@check("aten.binary_cross_entropy.default on (2,): S(0), S(0), then grad")
def binary_cross_entropy_gradient(d: Given) -> Any:
    x = d([0.9, 0.9, 0.2, 0.5], S0, grad=True)
    F.binary_cross_entropy(x, d([1.0, 0.0, 1.0, 0.0], S0)).backward()
    return x.grad


@check("aten.binary_cross_entropy_with_logits.default: S(0), S(0) -> P(avg)")
def binary_cross_entropy_with_logits_of_uneven_shards(d: Given) -> Any:
    return F.binary_cross_entropy_with_logits(d([2.0, -1.0, 0.5], S0), d([1.0, 0.0, 0.0], S0))


@check("aten.binary_cross_entropy_with_logits.default: S(1), S(1), S(1), S(0) -> P(avg)")
def binary_cross_entropy_with_weights_of_uneven_shards(d: Given) -> Any:
    x, y, w = d(count(2, 3), S1), d(torch.ones(2, 3), S1), d(count(2, 3), S1)
    return F.binary_cross_entropy_with_logits(x, y, w, pos_weight=d(count(3), S0))


@check("aten.mse_loss_backward.default on (2,): R, R, S(0)")
def mse_loss_gradient_beside_a_sharded_target(d: Given) -> Any:
    x = d(count(4), R, grad=True)
    F.mse_loss(x, d([0.0, 0.0, 0.0, 0.0], S0)).backward()
    return x.grad


@check("aten.huber_loss_backward.default: R, S(1), S(1) -> S(1)")
def huber_loss_gradient_of_sharded_columns(d: Given) -> Any:
    x = d(count(2, 4), S1, grad=True)
    F.huber_loss(x, d(torch.zeros(2, 4), S1)).backward()
    return x.grad


@check("aten.mse_loss_backward.default on (2,): R, R, R, then grad S(0)")
def mse_loss_second_gradient(d: Given) -> Any:
    loss, x = d(2.0, grad=True), d(count(4))
    first = aten.mse_loss_backward.default(loss, x, d([0.0, 0.0, 0.0, 0.0]), 1)
    (second,) = torch.autograd.grad(first, loss, d(count(4), S0))
    return second


@check("aten.nll_loss_forward.default: S(0), S(0), R -> P(avg), P(sum)")
def nll_loss_with_weights_of_sharded_classes(d: Given) -> Any:
    return F.nll_loss(d(-count(4, 2), S0), d([0, 0, 1, 0], S0), weight=d([1.0, 3.0]))


@check("aten.nll_loss_forward.default: S(0), S(0) -> P(avg), P(sum)")
def nll_loss_with_an_ignored_target(d: Given) -> Any:
    return F.nll_loss(d(-count(4, 2), S0), d([0, 1, 1, -100], S0))


@check("aten.nll_loss_forward.default on (2,): S(0), R, R")
def nll_loss_with_weights_beside_replicas(d: Given) -> Any:
    return F.nll_loss(d(-count(4, 2), S0), d([0, 0, 1, 0]), weight=d([1.0, 3.0]))


@check("aten.nll_loss2d_forward.default: S(3), S(2) -> P(avg), P(sum)")
def nll_loss_of_images_with_an_ignored_target(d: Given) -> Any:
    target = d([[[0, 1]], [[1, -100]]], S2)
    return F.nll_loss(d(-count(2, 3, 1, 2), S3), target)


@check("aten.nll_loss2d_forward.default: S(3), S(2), R -> P(avg), P(sum)")
def nll_loss_of_images_with_weights(d: Given) -> Any:
    target = d([[[0, 1]], [[0, 0]]], S2)
    return F.nll_loss(d(-count(2, 2, 1, 2), S3), target, weight=d([1.0, 3.0]))


@check("aten.nll_loss2d_forward.default on (2,): S(3), R, then less its mean | mean -1", judged=FALSE)
def nll_loss_less_its_mean(d: Given) -> Any:
    """The finding was the last digit of a zero."""
    loss = F.nll_loss(d(-count(1, 2, 1, 2), S3), d([[[0, 1]]], S2), weight=d([1.0, 3.0]), reduction="sum")
    return (loss - loss.mean()).mean(-1)


@check("aten.huber_loss_backward.default on (2,): R, R, S(0), then amax | softmax | grad twice", judged=FALSE)
def huber_loss_gradient_through_amax_and_softmax(d: Given) -> Any:
    """The finding was the last digit of a zero."""
    coming, x = d(1.0, grad=True), d([[5.0, 1.0], [2.0, 7.0]], S0, grad=True)
    out = aten.huber_loss_backward.default(coming, x, d(torch.zeros(2, 2), S0), 2, 1.0).amax(0).softmax(-1)
    (first,) = torch.autograd.grad(out, coming, d([1.0, 2.0]), create_graph=True)
    (second,) = torch.autograd.grad(first, coming)
    return first, second

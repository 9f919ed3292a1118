"""Normalisation: rows by themselves, channels by themselves, and sums of what is learned."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Shard

from strategies.ops.nn.normalization import RULES
from strategies.ops.semantics.local_call import own_arguments, with_arguments
from strategies.ops.semantics.rule_registry import Meta, RuleRegistry, query_of
from strategies.ops.validation.claims import query_of_sample
from tests.strategies.cases import numbers, sample
from tests.strategies.ops import held

X, G = numbers(4, 6), numbers(4, 6, seed=1)
W, B = numbers(6, seed=2), numbers(6, seed=3)
MEAN, SPREAD = numbers(6, seed=4), numbers(6, seed=5).abs() + 1
BOTH = [True, True, True]
LAYER = torch.ops.aten.native_layer_norm.default(X, [6], W, B, 1e-5)
BATCH = torch.ops.aten.native_batch_norm.default(X, W, B, None, None, True, 0.1, 1e-5)
TRAINED = ["S(1), S(1), S(0), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0), filled"]
GRADS = ["P(+), R, R, R, R -> P(+), P(+), P(+)"]


def backward(training, mask=BOTH, saved=BATCH[1:]):
    return sample("native_batch_norm_backward.default", G, X, W, MEAN, SPREAD, *saved, training, 1e-5, mask)


LINES = [
    (sample("native_layer_norm.default", X, [6], W, B, 1e-5), ["S(0), R, R -> S(0), S(0), S(0)"]),
    (sample("native_layer_norm.default", X, [4, 6], None, None, 1e-5), []),
    (sample("native_layer_norm_backward.default", G, X, [6], *LAYER[1:], W, B, BOTH),
     ["S(0), S(0), S(0), S(0), R, R -> S(0), P(sum), P(sum)", "P(+), R, R, R, R, R -> P(+), P(+), P(+)"]),
    (sample("native_layer_norm_backward.default", G, X, [6], *LAYER[1:], W, B, [False, True, False]),
     ["S(0), S(0), S(0), S(0), R, R -> -, P(sum), -", "P(+), R, R, R, R, R -> -, P(+), -"]),
    (sample("_fused_rms_norm.default", X, [6], W, None), ["S(0), R -> S(0), S(0)"]),
    (sample("_fused_rms_norm.default", X, [6], W.expand(4, 6), None), []),
    (sample("native_batch_norm.default", X, W, B, MEAN, SPREAD, True, 0.1, 1e-5),
     ["S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0), filled"]),
    (sample("native_batch_norm.default", X, None, None, MEAN, SPREAD, False, 0.1, 1e-5),
     ["S(1), S(0), S(0) -> S(1), S(0), S(0)", "S(0), R, R -> S(0), R, R"]),
    (sample("_native_batch_norm_legit.no_stats", numbers(3, 4, 5), None, None, True, 0.1, 1e-5),
     ["S(1) -> S(1), S(0), S(0), filled"]),
    (sample("_native_batch_norm_legit_no_training.default", numbers(3, 6, 5), W, B, MEAN, SPREAD, 0.1, 1e-5),
     ["S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0)", "S(0), R, R, R, R -> S(0), R, R", "S(2), R, R, R, R -> S(2), R, R"]),
    (sample("_batch_norm_with_update.default", X, W, B, MEAN, SPREAD, 0.1, 1e-5),
     ["S(1), S(0), S(0), S(0), S(0) -> S(1), S(0), S(0), R, filled"]),
    (backward(True), [*TRAINED, "P(+), R, R, R, R, R, R -> P(+), P(+), P(+)"]),
    (backward(False, saved=(torch.empty(0, dtype=X.dtype),) * 2),
     ["S(1), S(1), S(0), S(0), S(0), R, R -> S(1), S(0), S(0), filled",
      "S(0), S(0), R, R, R, R, R -> S(0), P(sum), P(sum), filled", "P(+), R, R, R, R, R, R -> P(+), P(+), P(+)"]),
    (sample("native_group_norm.default", numbers(3, 6, 5), W, B, 3, 6, 5, 3, 1e-5), ["S(0), R, R -> S(0), S(0), S(0)"]),
    (sample("renorm.default", X, 2, 1, 0.5), ["S(1) -> S(1)"]),
]  # fmt: skip
TEMPTING = [
    ("what is learned is summed over all rows", sample("native_layer_norm_backward.default", G, X, [6], *LAYER[1:], W, B, BOTH),
     "S(0), S(0), S(0), S(0), R, R -> S(0), R, R", "rank 0 make"),
    ("a row is one", sample("native_layer_norm.default", X, [6], None, None, 1e-5), "S(1) -> S(1), R, R", "expected input with shape"),
    ("the batch makes the statistics", sample("native_batch_norm.default", X, None, None, None, None, True, 0.1, 1e-5),
     "S(0) -> S(0), R, R", "the shards make"),
    ("each rank would be told all rows", sample("native_group_norm.default", numbers(4, 6, 5), None, None, 4, 6, 5, 3, 1e-5),
     "S(0) -> S(0), R, R", "rank 0"),
    ("and their gradient", backward(True), "S(0), S(0), R, R, R, R, R -> S(0), P(sum), P(sum)", "the shards make"),
]  # fmt: skip


@held.for_each_line_case(LINES)
def test_a_norm_has_just_these_lines_and_they_hold(one, texts):
    held.assert_lines(RULES, one, *texts)


@held.for_each_tempting_case(TEMPTING)
def test_a_tempting_line_of_a_norm_is_wrong_and_not_there(one, text, because):
    held.assert_tempting(RULES, one, text, because)


@pytest.fixture
def a_kernel_for_cpus():
    """What the kernel for GPUs computes, which is the only one that torch has."""

    def gradients(grad, x, shape, rstd, weight, mask):
        dims = tuple(range(x.ndim - len(shape), x.ndim))
        scaled, normal = grad if weight is None else grad * weight, x * rstd
        front = tuple(range(x.ndim - len(shape)))
        learned = (grad * normal).sum(front) if front else grad * normal
        return rstd * (scaled - normal * (scaled * normal).mean(dims, keepdim=True)), learned

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm_backward", gradients, "CPU")
    yield
    del library


@pytest.mark.usefixtures("a_kernel_for_cpus")
def test_the_gradients_of_rms_norm_are_cut_by_rows_and_summed_over_them():
    _, rstd = torch.ops.aten._fused_rms_norm.default(X, [6], W, None)
    one = sample("_fused_rms_norm_backward.default", G, X, [6], rstd, W, [True, True])
    held.assert_lines(RULES, one, "S(0), S(0), S(0), R -> S(0), P(sum)", "P(+), R, R, R -> P(+), P(+)")
    held.assert_tempting(RULES, one, "S(0), S(0), S(0), R -> S(0), R", "rank 0 make")


# Group norm.


@pytest.mark.parametrize("rows", [(2, 2), (3, 1), (4, 0)])
@pytest.mark.parametrize("mask", [BOTH, [True, False, True]], ids=str)
def test_group_norm_is_cut_by_rows_and_each_rank_is_told_how_many_it_has(rows, mask):
    x, grad = numbers(4, 6, 5), numbers(4, 6, 5, seed=1)
    forward = sample("native_group_norm.default", x, W, B, 4, 6, 5, 3, 1e-5)
    _, mean, rstd = forward.call([x, W, B])
    back = sample("native_group_norm_backward.default", grad, x, mean, rstd, W, 4, 6, 5, 3, mask)
    out, summed = on_rows(forward, rows), on_rows(back, rows)
    assert [line for line, _ in out] == ["S(0), R, R -> S(0), S(0), S(0)"]
    assert len(summed) == 1 and summed[0][0].startswith("S(0), S(0), S(0), S(0), R -> S(0), ")
    for together, want in zip(
        (*out[0][1], *summed[0][1]), (*forward.call([x, W, B]), *back.call(back.tensors)), strict=True
    ):
        assert (together is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(together, want)


def on_rows(one, rows):
    """Each line that cuts rows, and what the ranks' own calls make when it is put together."""
    entry, whole = RuleRegistry.of(*RULES).get(one.op), tuple(one.call(one.tensors))
    query, found = query_of_sample(one, whole), []
    for line in entry.lines(query):
        if line.inputs[0] != Shard(0):
            continue
        pieces = [
            x.split(rows) if p == Shard(0) else [x] * len(rows) for x, p in zip(one.tensors, line.inputs, strict=True)
        ]
        made = []
        for tensors in zip(*pieces, strict=True):
            own = own_arguments(entry, query_of_sample(replace(one, tensors=tensors), whole), reshaped=True)
            made.append(with_arguments(one.call, own)(tensors))
        parts = zip(line.outputs, zip(*made, strict=True), strict=True)
        found.append((str(line), [p and (torch.cat(x) if p == Shard(0) else sum(x)) for p, x in parts]))
    return found


def test_group_norm_that_is_told_another_number_of_rows_is_not_cut():
    x = numbers(4, 6, 5)
    one = sample("native_group_norm.default", x, W, B, 2, 12, 5, 3, 1e-5)
    metas = [Meta(tuple(t.shape), t.dtype) for t in one.tensors]
    outputs = [torch.empty(4, 6, 5), torch.empty(2, 3), torch.empty(2, 3)]
    asked = query_of(one.op, one.call.args, dict(one.call.kwargs), metas, outputs)
    assert list(RuleRegistry.of(*RULES).get(one.op).lines(asked)) == []


def test_the_gradients_of_group_norm_are_linear_in_that_of_the_result():
    x, grad = numbers(2, 6, 5), numbers(2, 6, 5, seed=1)
    _, mean, rstd = torch.ops.aten.native_group_norm.default(x, W, B, 2, 6, 5, 3, 1e-5)
    one = sample("native_group_norm_backward.default", grad, x, mean, rstd, W, 2, 6, 5, 3, BOTH)
    texts = {f"P({kind}), R, R, R, R -> P({kind}), P({kind}), P({kind})" for kind in ("sum", "avg")}
    assert {str(line) for line in held.lines_of(RULES, one)} - {
        "S(0), S(0), S(0), S(0), R -> S(0), P(sum), P(sum)"
    } == texts
    noise = numbers(2, 6, 5, seed=2)
    whole, first, second = (one.call([g, *one.tensors[1:]]) for g in (grad, grad + noise, -noise))
    for all_, left, right in zip(whole, first, second, strict=True):
        torch.testing.assert_close(left + right, all_)

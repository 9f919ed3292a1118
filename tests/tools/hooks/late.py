"""Ten right and ten wrong hooks that were written last, in styles that the corpus has not, before their author had read the judge.

The corpus makes its Functions from a kernel and a hook of one expression.  Here are `setup_context`, several results, results that have no
gradient, hooks that stamp the results themselves, opaque and dotted dims, arguments that are None, `*args`, kernels that read their
rank, and `all_to_all`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (as torch's own pages call it)
from spmd_types import I, P, R, S, assert_type, rules

from tests.tools.hooks.corpus import BACKWARD, FORWARD, KIND, ONE_DIM, UNEVEN, Hook
from tests.tools.hooks.kernels import draw, total, vjp


class RmsNorm(torch.autograd.Function):
    """Two results, and what the backward pass needs is kept by `setup_context`."""

    @staticmethod
    def forward(x, weight):
        scale = x.square().mean(-1).add(1e-5).rsqrt()
        return x * scale[..., None] * weight, scale

    @staticmethod
    def setup_context(ctx, inputs, _):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad, _):
        return vjp(lambda x, weight: RmsNorm.forward(x, weight)[0], ctx.saved_tensors, grad)

    @staticmethod
    def spmd_typecheck(*, x, weight):
        return rules.einsum("..._,_->..._", x, weight), rules.einsum("..._->...", x)


class RmsNormScaleInParts(RmsNorm):
    @staticmethod
    def spmd_typecheck(*, x, weight):
        y = rules.einsum("..._,_->..._", x, weight, linear_in=(0, 1))
        return y, rules.einsum("..._->...", x, linear_in=(0,))


def first_row(rows, group):
    """The number of rows on the ranks before this one, whatever each of them has."""
    sizes = torch.empty(dist.get_world_size(group), dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([rows]), group=group)
    before = torch.arange(dist.get_world_size(group)) < dist.get_rank(group)
    return (sizes * before).sum()


class VocabularyEmbedding(torch.autograd.Function):
    """Each rank has rows of the table; its hook gets the result and stamps it."""

    first = staticmethod(first_row)

    @classmethod
    def look_up(cls, ids, table, group):
        local = ids - cls.first(table.shape[0], group)
        own = (local >= 0) & (local < table.shape[0])
        return local.clamp(0, table.shape[0] - 1), own

    @classmethod
    def run(cls, ctx, ids, table, group):
        local, own = cls.look_up(ids, table, group)
        ctx.save_for_backward(local, own, table)
        return table[local] * own[:, None]

    @staticmethod
    def forward(ctx, ids, table, group):
        return VocabularyEmbedding.run(ctx, ids, table, group)

    @staticmethod
    def backward(ctx, grad):
        local, own, table = ctx.saved_tensors
        return None, torch.zeros_like(table).index_add(0, local, grad * own[:, None]), None

    @staticmethod
    def spmd_typecheck(result, *, ids, table, group):
        assert_type(table, {group: S(0)})
        rules.output(result, rules.einsum("t,vd->td", ids, table))


class EmbeddingOfEqualPieces(VocabularyEmbedding):
    """It takes each rank's piece to be as long as its own."""

    first = staticmethod(lambda rows, group: dist.get_rank(group) * rows)

    @staticmethod
    def forward(ctx, ids, table, group):
        return EmbeddingOfEqualPieces.run(ctx, ids, table, group)


class VocabularyLoss(torch.autograd.Function):
    """The cross entropy of logits whose columns are sharded: three collectives, one of them a maximum."""

    @staticmethod
    def forward(ctx, logits, target, group):
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        sums = total(shifted.exp().sum(1), group)
        local = target - first_row(logits.shape[1], group)
        own = (local >= 0) & (local < logits.shape[1])
        local = local.clamp(0, logits.shape[1] - 1)
        picked = total(shifted.gather(1, local[:, None])[:, 0] * own, group)
        ctx.save_for_backward(shifted.exp() / sums[:, None], local, own)
        return sums.log() - picked

    @staticmethod
    def backward(ctx, grad):
        probability, local, own = ctx.saved_tensors
        picked = torch.zeros_like(probability).scatter(1, local[:, None], own[:, None].to(probability.dtype))
        return grad[:, None] * (probability - picked), None, None

    @staticmethod
    def spmd_typecheck(result, *, logits, target, group):
        parts = rules.einsum("tv,t->t", logits, target)
        rules.all_reduce(parts, group, src=P, dst=I, out=result)


class VocabularyLossReplicated(VocabularyLoss):
    """R: then each rank has a part of the gradient, and the backward pass does not add them."""

    @staticmethod
    def spmd_typecheck(result, *, logits, target, group):
        parts = rules.einsum("tv,t->t", logits, target)
        rules.all_reduce(parts, group, src=P, dst=R, out=result)


class Linear(torch.autograd.Function):
    """The bias may be None."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, grad.sum(0) if ctx.has_bias else None

    @staticmethod
    def spmd_typecheck(*, x, weight, bias):
        y = rules.einsum("mk,nk->mn", x, weight, linear_in=(0, 1))
        return y if bias is None else rules.einsum("mn,n->mn", y, bias)


class LinearIgnoresBias(Linear):
    """The bias is added to each rank's part."""

    @staticmethod
    def spmd_typecheck(*, x, weight, bias):
        rules.ignore(bias)
        return rules.einsum("mk,nk->mn", x, weight)


class Largest(torch.autograd.Function):
    """The largest values and where they stand; the second result has no gradient."""

    @staticmethod
    def forward(ctx, x, number):
        values, places = x.topk(number, -1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return values, places

    @staticmethod
    def backward(ctx, grad, _):
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter(-1, places, grad), None

    @staticmethod
    def spmd_typecheck(*, x):
        return tuple(rules.einsum("..._->..._", x) for _ in range(2))


class PlaceOfLargest(torch.autograd.Function):
    """An index alone; the hook takes it to be additive along the dim that is searched."""

    @staticmethod
    def forward(ctx, x):
        place = x.argmax(1)
        ctx.mark_non_differentiable(place)
        return place

    @staticmethod
    def backward(*_):
        return None

    @staticmethod
    def spmd_typecheck(*, x):
        return rules.einsum("mn->m", x)


def columns_to_rows(x, group):
    """[m, n] on each rank to [m * ranks, n / ranks]: the shards of rows become shards of columns."""
    ranks = dist.get_world_size(group)
    if x.shape[1] % ranks:
        raise ValueError("columns must be divisible by the ranks")
    blocks = torch.cat(x.chunk(ranks, 1)).contiguous()
    out = torch.empty_like(blocks)
    dist.all_to_all_single(out, blocks, group=group)
    return out


class Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return columns_to_rows(x, group)

    @staticmethod
    def backward(ctx, grad):
        return columns_to_rows(grad.t(), ctx.group).t(), None

    @staticmethod
    def spmd_typecheck(*, x, group):
        return rules.all_to_all(x, group, src=S(0), dst=S(1))


class ReshardWithoutWayBack(Reshard):
    """The backward pass puts the blocks side by side, and does not send them back."""

    @staticmethod
    def backward(ctx, grad):
        return torch.cat(grad.chunk(dist.get_world_size(ctx.group), 0), 1), None


class Blend(torch.autograd.Function):
    """Any number of tensors."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.number = len(tensors)
        return sum(weight * x for weight, x in enumerate(tensors, 1))

    @staticmethod
    def backward(ctx, grad):
        return tuple(weight * grad for weight in range(1, ctx.number + 1))

    @staticmethod
    def spmd_typecheck(*, tensors):
        n = len(tensors)
        return rules.einsum(",".join(["..."] * n) + "->...", *tensors, linear_in=(tuple(range(n)),))


class ProductOfMany(Blend):
    """A product is not jointly linear."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return torch.stack(tensors).prod(0)

    @staticmethod
    def backward(ctx, grad):
        return vjp(lambda *tensors: torch.stack(tensors).prod(0), ctx.saved_tensors, grad)


class ToParts(torch.autograd.Function):
    """A whole becomes parts, without communication."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.ranks = dist.get_world_size(group)
        return x / ctx.ranks

    @staticmethod
    def backward(ctx, grad):
        return grad / ctx.ranks, None

    @staticmethod
    def spmd_typecheck(*, x, group):
        return rules.convert(x, group, src=R, dst=P)


class ToPartsUnscaledGradient(ToParts):
    @staticmethod
    def backward(_, grad):
        return grad, None


class Attention(torch.autograd.Function):
    """Queries may be sharded; keys and values must be whole."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx, grad):
        return vjp(F.scaled_dot_product_attention, ctx.saved_tensors, grad)

    @staticmethod
    def spmd_typecheck(*, q, k, v):
        return rules.einsum("bq_,b__,b__->bq_", q, k, v)


class CausalAttention(Attention):
    """A query's place among all queries is lost where they are sharded."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @staticmethod
    def backward(ctx, grad):
        return vjp(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ctx.saved_tensors, grad)


class Swiglu(torch.autograd.Function):
    """Linear in the second argument alone, and a switch that the hook reads."""

    @staticmethod
    def forward(ctx, gate, up, swapped=False):
        ctx.save_for_backward(gate, up)
        ctx.swapped = swapped
        return F.silu(up) * gate if swapped else F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        swapped = ctx.swapped
        both = vjp(lambda gate, up: F.silu(up) * gate if swapped else F.silu(gate) * up, ctx.saved_tensors, grad)
        return *both, None

    @staticmethod
    def spmd_typecheck(*, gate, up, swapped):
        return rules.einsum("...,...->...", gate, up, linear_in=(0 if swapped else 1,))


class GroupNorm(torch.autograd.Function):
    """Channels may be sharded, says the hook; but they are normalized in groups, whose number is an argument."""

    @staticmethod
    def forward(ctx, x, groups):
        ctx.save_for_backward(x)
        ctx.groups = groups
        return F.group_norm(x, groups)

    @staticmethod
    def backward(ctx, grad):
        groups = ctx.groups
        return *vjp(lambda x: F.group_norm(x, groups), ctx.saved_tensors, grad), None

    @staticmethod
    def spmd_typecheck(*, x):
        return rules.einsum("nc_->nc_", x)


def every() -> list[Hook]:
    """All twenty, the right ones first."""
    x, other, square = draw(2, 6, 4, seed=20), draw(2, 6, 4, seed=21), draw(6, 6, seed=22)
    scale, table, ids = draw(4, seed=23), draw(8, 3, seed=24), torch.tensor([0, 7, 3, 3, 5])
    rows, weight, bias, logits = draw(6, 4, seed=25), draw(8, 4, seed=26), draw(8, seed=27), draw(5, 8, seed=28)
    q, k, v = draw(2, 6, 4, seed=29), draw(2, 6, 4, seed=30), draw(2, 6, 4, seed=31)
    return [
        Hook("rms_norm", RmsNorm, (x, scale)),
        Hook("vocabulary_embedding", VocabularyEmbedding, (ids, table, "tp")),
        Hook("vocabulary_loss", VocabularyLoss, (logits, ids, "tp")),
        Hook("linear_without_bias", Linear, (rows, weight, None)),
        Hook("largest", Largest, (draw(4, 7, seed=32), 2)),
        Hook("reshard", Reshard, (square, "tp")),
        Hook("blend", Blend, (x, other, x + other)),
        Hook("to_parts", ToParts, (rows, "tp")),
        Hook("attention", Attention, (q, k, v)),
        Hook("swiglu_swapped", Swiglu, (rows, draw(6, 4, seed=33), True)),
        Hook("rms_norm_scale_in_parts", RmsNormScaleInParts, (x, scale), FORWARD),
        Hook("embedding_of_equal_pieces", EmbeddingOfEqualPieces, (ids, table, "tp"), UNEVEN),
        Hook("vocabulary_loss_replicated", VocabularyLossReplicated, (logits, ids, "tp"), KIND),
        Hook("linear_ignores_bias", LinearIgnoresBias, (rows, weight, bias), FORWARD),
        Hook("place_of_largest", PlaceOfLargest, (draw(4, 7, seed=34),), FORWARD),
        Hook("reshard_without_way_back", ReshardWithoutWayBack, (square, "tp"), BACKWARD),
        Hook("to_parts_unscaled_gradient", ToPartsUnscaledGradient, (rows, "tp"), BACKWARD),
        Hook("causal_attention", CausalAttention, (q, k, v), ONE_DIM),
        Hook("group_norm", GroupNorm, (draw(2, 12, 5, seed=35), 2), ONE_DIM),
        Hook("product_of_many", ProductOfMany, (x, other, x - other), FORWARD),
    ]

"""Fused optimizer steps: every parameter is stepped element by element, together with its gradient and its state.

The number of steps, the learning rate, the scale of gradients and what it found are one number for all, and the same on
all ranks.  A gradient that is a sum of parts is none yet: its square is no sum of squares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.model.rule import overload
from strategies.ops.lib.foreach_lift import ALONE
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Line, rules

ONE_NUMBER = "state_steps"
STEPS = ("adam", "adamw", "sgd", "adagrad")


def steps(ask: Ask) -> Iterator[Line]:
    """All parameters cut along the same dim, those that have it; and in a short list each alone."""
    parameters = ask.leaves("self")
    names = [
        a.name for a in overload(ask.op)._schema.arguments if str(a.type) == "List[Tensor]" and a.name != ONE_NUMBER
    ]
    lists = {name: ask.leaves(name) for name in names}
    ndims = [ask.tensors[leaf].ndim for leaf in parameters]
    for dim in range(max(ndims, default=0)):
        yield _line(ask, lists, [Shard(dim) if dim < ndim else Replicate() for ndim in ndims])
    for i, ndim in enumerate(ndims if 1 < len(ndims) <= ALONE else ()):
        for dim in range(ndim):
            yield _line(ask, lists, [Shard(dim) if j == i else Replicate() for j in range(len(ndims))])


def _line(ask: Ask, lists: dict[str, tuple[int, ...]], chosen: Sequence[Placement]) -> Line:
    """Each list of tensors lies as the parameters do; each list of results as the list of which it is the new state."""
    inputs = {leaf: p for leaves in lists.values() for leaf, p in zip(leaves, chosen, strict=False)}
    outputs: list[Placement] = []
    for returned in overload(ask.op)._schema.returns:
        name = (returned.name or "").removesuffix("_out")
        outputs += [inputs.get(leaf, Replicate()) for leaf in ask.leaves(name)]
    return ask.line(inputs, outputs)


RULES = with_variants(
    rules("fused", "a step of each element by itself",
          [f"aten._fused_{name}.{which}" for name in STEPS for which in ("default", "tensor_lr")], steps),
    but=[f"aten._fused_{name}.{which}" for name in STEPS for which in ("out", "tensor_lr_out")],
)  # fmt: skip

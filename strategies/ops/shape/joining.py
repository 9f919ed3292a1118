"""Rules of joining, repeating, flipping, masking and padding: the affected dims are replicated, and elements do not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategies.ops.lib.elementwise import (
    KINDS,
    LINEAR,
    dim_map_rules,
    partial_rules,
    reductions_keeping,
    shard_rule,
    unchanged_dims,
)
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, rules

FAMILY = "joining"


def cat(query: RuleQuery) -> Iterator[PlacementRule]:
    """All tensors sharded along another dim.  The joined dim may be sharded if only one tensor has rows.

    `cat` ignores tensors of shape (0,), whatever the shape of the others.
    """
    leaves = query.leaves("tensors")
    yield from partial_rules(query, leaves)
    result = query.outputs[0]
    if result is None or result.ndim == 0:
        return
    dim = query["dim"] % result.ndim
    real = [leaf for leaf in leaves if result.ndim == 1 or query.tensors[leaf].shape != (0,)]
    for other, _ in unchanged_dims(result.ndim, dim):
        yield shard_rule(query, dict.fromkeys(leaves, 0) | dict.fromkeys(real, other), other)
    full = [leaf for leaf in real if query.tensors[leaf].shape[dim] > 0]
    if len(full) == 1:
        yield shard_rule(query, {full[0]: dim}, dim)


def stack(query: RuleQuery) -> Iterator[PlacementRule]:
    leaves = query.leaves("tensors")
    yield from partial_rules(query, leaves)
    ndim = query.tensors[leaves[0]].ndim
    new = query["dim"] % (ndim + 1)
    for dim in range(ndim):
        yield shard_rule(query, dict.fromkeys(leaves, dim), dim + (dim >= new))


def repeat(query: RuleQuery) -> Iterator[PlacementRule]:
    """A dim that is repeated once, or empty, may be sharded; the pieces of several copies would interleave."""
    yield from partial_rules(query, [0])
    ndim, times = query.tensors[0].ndim, query["repeats"]
    new = len(times) - ndim
    result = query.outputs[0]
    if result is not None:
        once = [dim for dim in range(ndim) if times[dim + new] == 1 or result.shape[dim + new] == 0]
        yield from dim_map_rules(query, [(dim, dim + new) for dim in once])


def roll(query: RuleQuery) -> Iterator[PlacementRule]:
    """Without dims, the flattened tensor is rolled."""
    given, shifts = query.tensors[0], query["shifts"]
    yield from partial_rules(query, [0])
    dims = query.dims("dims") if any(shifts) else ()
    yield from dim_map_rules(query, unchanged_dims(given.ndim, *dims))


def flip(query: RuleQuery) -> Iterator[PlacementRule]:
    """A flip of at most one row changes nothing."""
    given = query.tensors[0]
    yield from partial_rules(query, [0])
    dims = [dim % max(given.ndim, 1) for dim in query["dims"]]
    turned = [dim for dim in dims if dim < given.ndim and given.shape[dim] > 1]
    yield from dim_map_rules(query, unchanged_dims(given.ndim, *turned))


def rot90(query: RuleQuery) -> Iterator[PlacementRule]:
    """Both dims of the rotated plane are replicated."""
    yield from partial_rules(query, [0])
    ndim = query.tensors[0].ndim
    yield from dim_map_rules(query, unchanged_dims(ndim, *(dim % ndim for dim in query["dims"])))


def block_diag(query: RuleQuery) -> Iterator[PlacementRule]:
    """Zeros beside the blocks are equal on all ranks, which every reduction keeps."""
    yield from partial_rules(query, query.leaves("tensors"))


def tril_or_triu(query: RuleQuery) -> Iterator[PlacementRule]:
    """Elements beyond the diagonal become zero, which every reduction keeps; matrices are replicated."""
    yield from partial_rules(query, [0])
    yield from dim_map_rules(query, [(dim, dim) for dim in range(query.tensors[0].ndim - 2)])


_JOINED = "rows of several tensors one after the other: the joined dim is whole"
_TURNED = "a dim whose rows change places is whole"


def padded_dims(ndim: int, pad: Sequence[int]) -> list[int]:
    """The dims that are padded or, for a negative number, cropped: two numbers per dim, the last dim first.

    >>> padded_dims(3, [0, 0, 2, 1])
    [1]
    """
    return [ndim - 1 - i // 2 for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]]


def constant_pad(query: RuleQuery) -> Iterator[PlacementRule]:
    """The reduction of equal paddings of all ranks must return the padding value."""
    puts = any(number > 0 for number in query["pad"])
    yield from partial_rules(query, [0], reductions_keeping(query["value"]) if puts else KINDS)
    ndim = query.tensors[0].ndim
    yield from dim_map_rules(query, unchanged_dims(ndim, *padded_dims(ndim, query["pad"])))


def copying_pad(query: RuleQuery) -> Iterator[PlacementRule]:
    """Padding with rows of the dim itself.  The ops reject empty tensors, so no piece may be empty."""
    yield from partial_rules(query, [0])
    ndim = query.tensors[0].ndim
    yield from dim_map_rules(query, unchanged_dims(ndim, *padded_dims(ndim, query["padding"])), "filled")


def copying_pad_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The gradient of a row is the sum of those of its copies; only the shape of the padded tensor matters."""
    yield from partial_rules(query, [0], LINEAR)
    ndim = query.tensors[0].ndim
    for dim, _ in unchanged_dims(ndim, *padded_dims(ndim, query["padding"])):
        yield shard_rule(query, {0: dim, 1: dim}, dim, "filled")


_COPIES = [f"aten.{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]

RULES: tuple[OpRule, ...] = with_variants(
    rules(FAMILY, _JOINED, ["aten.cat.default"], cat),
    rules(FAMILY, "a new dim, of one row for each tensor, is whole", ["aten.stack.default", "aten._stack.default"],
          stack),
    rules(FAMILY, "a dim that is repeated is whole", ["aten.repeat.default"], repeat),
    rules(FAMILY, _TURNED, ["aten.roll.default"], roll),
    rules(FAMILY, _TURNED, ["aten.flip.default"], flip),
    rules(FAMILY, _TURNED, ["aten.rot90.default"], rot90),
    rules(FAMILY, "zeros beside what is given", ["aten.block_diag.default"], block_diag),
    rules(FAMILY, "a triangle takes its matrix whole", ["aten.tril.default", "aten.triu.default"], tril_or_triu),
    rules(FAMILY, "a dim that is padded is whole", ["aten.constant_pad_nd.default"], constant_pad),
    rules(FAMILY, "a dim that is padded is whole", [f"{op}.default" for op in _COPIES], copying_pad),
    rules(FAMILY, "the gradients of copies add up", [f"{op}_backward.default" for op in _COPIES], copying_pad_backward),
)  # fmt: skip

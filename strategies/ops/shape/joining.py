"""Rules of joining, repeating, flipping, masking and padding: the affected dims are replicated, and elements do not change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from strategies.ops.lib.dim_maps import KINDS, LINEAR, filled_with, mapped, other_dims, pending, sharded
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "joining"


def joined(query: Ask) -> Iterator[Line]:
    """All tensors sharded along another dim.  The joined dim may be sharded if only one tensor has rows.

    `cat` ignores tensors of shape (0,), whatever the shape of the others.
    """
    leaves = query.leaves("tensors")
    yield from pending(query, leaves)
    result = query.outputs[0]
    if result is None or result.ndim == 0:
        return
    dim = query["dim"] % result.ndim
    real = [leaf for leaf in leaves if result.ndim == 1 or query.tensors[leaf].shape != (0,)]
    for other, _ in other_dims(result.ndim, dim):
        yield sharded(query, dict.fromkeys(leaves, 0) | dict.fromkeys(real, other), other)
    full = [leaf for leaf in real if query.tensors[leaf].shape[dim] > 0]
    if len(full) == 1:
        yield sharded(query, {full[0]: dim}, dim)


def stacked(query: Ask) -> Iterator[Line]:
    leaves = query.leaves("tensors")
    yield from pending(query, leaves)
    ndim = query.tensors[leaves[0]].ndim
    new = query["dim"] % (ndim + 1)
    for dim in range(ndim):
        yield sharded(query, dict.fromkeys(leaves, dim), dim + (dim >= new))


def repeated(query: Ask) -> Iterator[Line]:
    """A dim that is repeated once, or empty, may be sharded; the pieces of several copies would interleave."""
    yield from pending(query, [0])
    ndim, times = query.tensors[0].ndim, query["repeats"]
    new = len(times) - ndim
    result = query.outputs[0]
    if result is not None:
        once = [dim for dim in range(ndim) if times[dim + new] == 1 or result.shape[dim + new] == 0]
        yield from mapped(query, [(dim, dim + new) for dim in once])


def rolled(query: Ask) -> Iterator[Line]:
    """Without dims, the flattened tensor is rolled."""
    given, shifts = query.tensors[0], query["shifts"]
    yield from pending(query, [0])
    dims = query.dims("dims") if any(shifts) else ()
    yield from mapped(query, other_dims(given.ndim, *dims))


def flipped(query: Ask) -> Iterator[Line]:
    """A flip of at most one row changes nothing."""
    given = query.tensors[0]
    yield from pending(query, [0])
    dims = [dim % max(given.ndim, 1) for dim in query["dims"]]
    yield from mapped(
        query, other_dims(given.ndim, *(dim for dim in dims if dim < given.ndim and given.shape[dim] > 1))
    )


def turned(query: Ask) -> Iterator[Line]:
    """Both dims of the rotated plane are replicated."""
    yield from pending(query, [0])
    ndim = query.tensors[0].ndim
    yield from mapped(query, other_dims(ndim, *(dim % ndim for dim in query["dims"])))


def in_blocks(query: Ask) -> Iterator[Line]:
    """Zeros beside the blocks are equal on all ranks, which every reduction keeps."""
    yield from pending(query, query.leaves("tensors"))


def triangle(query: Ask) -> Iterator[Line]:
    """Elements beyond the diagonal become zero, which every reduction keeps; matrices are replicated."""
    yield from pending(query, [0])
    yield from mapped(query, [(dim, dim) for dim in range(query.tensors[0].ndim - 2)])


_JOINED = "rows of several tensors one after the other: the joined dim is whole"
_TURNED = "a dim whose rows change places is whole"


def padded(ndim: int, pad: Sequence[int]) -> list[int]:
    """The dims that are padded or, for a negative number, cropped: two numbers per dim, the last dim first.

    >>> padded(3, [0, 0, 2, 1])
    [1]
    """
    return [ndim - 1 - i // 2 for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]]


def with_constant(query: Ask) -> Iterator[Line]:
    """The reduction of equal paddings of all ranks must return the padding value."""
    puts = any(number > 0 for number in query["pad"])
    yield from pending(query, [0], filled_with(query["value"]) if puts else KINDS)
    ndim = query.tensors[0].ndim
    yield from mapped(query, other_dims(ndim, *padded(ndim, query["pad"])))


def with_copies(query: Ask) -> Iterator[Line]:
    """Padding with rows of the dim itself.  The ops reject empty tensors, so no piece may be empty."""
    yield from pending(query, [0])
    ndim = query.tensors[0].ndim
    yield from mapped(query, other_dims(ndim, *padded(ndim, query["padding"])), "filled")


def from_copies(query: Ask) -> Iterator[Line]:
    """The gradient of a row is the sum of those of its copies; only the shape of the padded tensor matters."""
    yield from pending(query, [0], LINEAR)
    ndim = query.tensors[0].ndim
    for dim, _ in other_dims(ndim, *padded(ndim, query["padding"])):
        yield sharded(query, {0: dim, 1: dim}, dim, "filled")


_COPIES = [f"aten.{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]

RULES: tuple[Entry, ...] = with_variants(
    rules(FAMILY, _JOINED, ["aten.cat.default"], joined),
    rules(FAMILY, "a new dim, of one row for each tensor, is whole", ["aten.stack.default", "aten._stack.default"],
          stacked),
    rules(FAMILY, "a dim that is repeated is whole", ["aten.repeat.default"], repeated),
    rules(FAMILY, _TURNED, ["aten.roll.default"], rolled),
    rules(FAMILY, _TURNED, ["aten.flip.default"], flipped),
    rules(FAMILY, _TURNED, ["aten.rot90.default"], turned),
    rules(FAMILY, "zeros beside what is given", ["aten.block_diag.default"], in_blocks),
    rules(FAMILY, "a triangle takes its matrix whole", ["aten.tril.default", "aten.triu.default"], triangle),
    rules(FAMILY, "a dim that is padded is whole", ["aten.constant_pad_nd.default"], with_constant),
    rules(FAMILY, "a dim that is padded is whole", [f"{op}.default" for op in _COPIES], with_copies),
    rules(FAMILY, "the gradients of copies add up", [f"{op}_backward.default" for op in _COPIES], from_copies),
)  # fmt: skip

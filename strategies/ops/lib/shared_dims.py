"""Lines for ops that treat some dims of their arguments alike: the words in which rules of whole rooms are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.partials import agreed
from strategies.ops.semantics.rulebook import Ask, Cut, Line

LINEAR = ("sum", "avg")


def along(
    ask: Ask, inputs: Mapping[str, int | None], outputs: Sequence[int | Placement | None], cut: Cut = "any"
) -> Line:
    """The line that shards each named argument on its dim, and each result on its own.

    None is a replica, and what the call was not given is left out; so is a result that is masked off.
    """
    shards = {ask.leaf(name): Shard(dim) for name, dim in inputs.items() if dim is not None}
    made: dict[int, Placement] = {leaf: placement for leaf, placement in shards.items() if leaf is not None}
    return ask.line(made, ask.masked([_placed(dim) for dim in outputs]), cut)


def _placed(dim: int | Placement | None) -> Placement:
    return Replicate() if dim is None else Shard(dim) if isinstance(dim, int) else dim


def parts_of(
    ask: Ask, names: Sequence[str], outputs: Sequence[bool] = (), kinds: Sequence[str] = LINEAR
) -> Iterator[Line]:
    """For each kind the line from partial arguments of these names to partial results: the op is linear in all of them
    at once.  `outputs` says which results are: the others do not look at these arguments' values.  All, if it is empty.
    """
    leaves = [leaf for name in names for leaf in ask.leaves(name)]
    if not leaves or not all(_real(ask, leaf) for leaf in leaves):
        return
    which = outputs or [True] * len(ask.outputs)
    for kind in (kind for kind in kinds if all(agreed(kind, ask.tensors[leaf].dtype) for leaf in leaves)):
        whole = [Partial(kind) if partial else Replicate() for partial in which]
        yield ask.line({leaf: Partial(kind) for leaf in leaves}, ask.masked(whole))


def _real(ask: Ask, leaf: int) -> bool:
    """Integers round where they are divided: what is linear for numbers is not for them."""
    dtype = ask.tensors[leaf].dtype
    return dtype.is_floating_point or dtype.is_complex

"""Rows put in order, and numbers looked up in what is in order: the dim that is sorted is whole."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.ops.lib.dim_maps import mapped, other_dims, shifted
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rulebook import Ask, Entry, Line, rules

FAMILY = "sorting"


def ordered(ask: Ask) -> Iterator[Line]:
    """Each row along the dim is sorted by itself.  Of parts nobody knows the order."""
    ndim = ask.tensors[0].ndim
    yield from mapped(ask, other_dims(ndim, ask["dim"] % max(ndim, 1)))


def picked(ask: Ask) -> Iterator[Line]:
    """One element of each row, and its place: the dim goes, or has one row left.

    An op that refuses to pick from nothing does so only along the dim itself.
    """
    ndim = ask.tensors[0].ndim
    dim = ask["dim"] % max(ndim, 1)
    yield from mapped(ask, other_dims(ndim, dim) if ask["keepdim"] else shifted(ndim, dim))


def bucketized(ask: Ask) -> Iterator[Line]:
    """A number's bucket is how many boundaries lie below it: some on each rank, and together all.

    Buckets grow with the numbers.  NaN is above all, as the greatest of numbers with NaN among them is NaN; the least
    is NaN, too, and has the highest bucket and not the lowest.
    """
    bounds, given = ask.leaf("boundaries"), ask.leaf("self")
    if bounds is not None:
        yield ask.line({bounds: Shard(0)}, [Partial("sum")])
    if given is not None:
        yield from mapped(ask, other_dims(ask.tensors[given].ndim), leaf=given)
        yield from _monotone(ask, given)


def _monotone(ask: Ask, given: int) -> Iterator[Line]:
    yield ask.line({given: Partial("max")}, [Partial("max")])
    if not ask.tensors[given].dtype.is_floating_point:
        yield ask.line({given: Partial("min")}, [Partial("min")])


def searched(ask: Ask) -> Iterator[Line]:
    """As `bucketize`, with a row of boundaries for each row of numbers, or one for all.

    A sorter says where in the whole row the boundaries lie, so then the row is not cut.
    """
    row, given, sorter = ask.leaf("sorted_sequence"), ask.leaf("self"), ask.leaf("sorter")
    if row is None:
        return
    last = ask.tensors[row].ndim - 1
    if sorter is None:
        yield ask.line({row: Shard(last)}, [Partial("sum")])
    if given is None:
        return
    yield from _monotone(ask, given) if sorter is None else ()
    ndim = ask.tensors[given].ndim
    for dim in range(ndim):
        rows = {} if last == 0 or dim == ndim - 1 else {leaf: Shard(dim) for leaf in (row, sorter) if leaf is not None}
        yield ask.line({given: Shard(dim), **rows}, [Shard(dim)])


def counted(ask: Ask) -> Iterator[Line]:
    """Counts add up if all ranks count in the same bins: limits that are equal stand for the least and the greatest."""
    if ask["min"] != ask["max"]:
        for dim in range(ask.tensors[0].ndim):
            yield ask.line({0: Shard(dim)}, [Partial("sum")])


def counted_between(ask: Ask) -> Iterator[Line]:
    """As `histc`, with edges that are given, or follow from limits that are; weights are cut with their numbers."""
    edges, weight = ask.leaf("bins"), ask.leaf("weight")
    if ask["density"] or (edges is None and ask["range"] is None):
        return
    if weight is not None and ask.tensors[weight].shape != ask.tensors[0].shape:
        return
    for dim in range(ask.tensors[0].ndim):
        yield ask.line({leaf: Shard(dim) for leaf in (0, weight) if leaf is not None}, [Partial("sum"), Replicate()])
    if weight is not None:
        yield ask.line({weight: Partial("sum")}, [Partial("sum"), Replicate()])


def among(ask: Ask) -> Iterator[Line]:
    """An element is among some if it is among those of any rank; it is not if it is among those of none.

    The op asks for a row of them without gaps, which a piece of a table is not.
    """
    element, tests = ask.leaf("elements"), ask.leaf("test_elements")
    if element is not None:
        yield from mapped(ask, other_dims(ask.tensors[element].ndim), leaf=element)
    if tests is not None and ask.tensors[tests].ndim == 1:
        yield ask.line({tests: Shard(0)}, [Partial("min" if ask["invert"] else "max")])


_AMONG = ("Tensor_Tensor", "Tensor_Scalar")
_SORTED = "the dim that is sorted is whole"

RULES: tuple[Entry, ...] = with_variants(
    rules(FAMILY, _SORTED, ["aten.sort.default", "aten.sort.stable", "aten.topk.default"], ordered),
    rules(FAMILY, _SORTED, ["aten.argsort.stable", "aten.argsort.default"], ordered),
    rules(FAMILY, "each row has its own order", ["aten.kthvalue.default"], picked),
    rules(FAMILY, "numbers go by themselves", ["aten.bucketize.Tensor", "aten.bucketize.Scalar"], bucketized),
    rules(FAMILY, "rows go by themselves", ["aten.searchsorted.Tensor", "aten.searchsorted.Scalar"], searched),
    rules(FAMILY, "counts add up", ["aten.histc.default"], counted),
    rules(FAMILY, "counts add up", ["aten.histogram.bins_tensor", "aten.histogram.bin_ct"], counted_between),
    rules(FAMILY, "elements go by themselves", [f"aten.isin.{which}" for which in _AMONG], among),
)  # fmt: skip

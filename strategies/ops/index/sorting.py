"""Rules of sorting, searching, histograms and membership: the sorted dim is replicated."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.ops.lib.elementwise import dim_map_rules, dims_after_removal, unchanged_dims
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import OpRule, PlacementRule, RuleQuery, rules

FAMILY = "sorting"


def sort(query: RuleQuery) -> Iterator[PlacementRule]:
    """Each row is sorted independently.  The order of partial values is unknown."""
    ndim = query.tensors[0].ndim
    yield from dim_map_rules(query, unchanged_dims(ndim, query["dim"] % max(ndim, 1)))


def kthvalue(query: RuleQuery) -> Iterator[PlacementRule]:
    """One element of each row, and its position: the dim is dropped, or kept with size 1."""
    ndim = query.tensors[0].ndim
    dim = query["dim"] % max(ndim, 1)
    yield from dim_map_rules(query, unchanged_dims(ndim, dim) if query["keepdim"] else dims_after_removal(ndim, dim))


def bucketize(query: RuleQuery) -> Iterator[PlacementRule]:
    """A bucket is the number of boundaries below a number: with sharded boundaries, a partial sum.

    Buckets are monotone in the numbers.  NaN has the highest bucket, which agrees with P(max), and not with P(min).
    """
    bounds, given = query.leaf("boundaries"), query.leaf("self")
    if bounds is not None:
        yield query.line({bounds: Shard(0)}, [Partial("sum")])
    if given is not None:
        yield from dim_map_rules(query, unchanged_dims(query.tensors[given].ndim), leaf=given)
        yield from _monotone(query, given)


def _monotone(query: RuleQuery, given: int) -> Iterator[PlacementRule]:
    yield query.line({given: Partial("max")}, [Partial("max")])
    if not query.tensors[given].dtype.is_floating_point:
        yield query.line({given: Partial("min")}, [Partial("min")])


def searchsorted(query: RuleQuery) -> Iterator[PlacementRule]:
    """As `bucketize`, with a row of boundaries for each row of numbers, or one for all.

    A sorter has positions in the whole row of boundaries, which is then replicated.
    """
    row, given, sorter = query.leaf("sorted_sequence"), query.leaf("self"), query.leaf("sorter")
    if row is None:
        return
    last = query.tensors[row].ndim - 1
    if sorter is None:
        yield query.line({row: Shard(last)}, [Partial("sum")])
    if given is None:
        return
    yield from _monotone(query, given) if sorter is None else ()
    ndim = query.tensors[given].ndim
    for dim in range(ndim):
        rows = {} if last == 0 or dim == ndim - 1 else {leaf: Shard(dim) for leaf in (row, sorter) if leaf is not None}
        yield query.line({given: Shard(dim), **rows}, [Shard(dim)])


def histc(query: RuleQuery) -> Iterator[PlacementRule]:
    """Counts add up if all ranks have the same bins; equal limits mean the minimum and maximum of the data."""
    if query["min"] != query["max"]:
        for dim in range(query.tensors[0].ndim):
            yield query.line({0: Shard(dim)}, [Partial("sum")])


def histogram(query: RuleQuery) -> Iterator[PlacementRule]:
    """As `histc`, if the edges are given or follow from given limits; weights are sharded with their numbers."""
    edges, weight = query.leaf("bins"), query.leaf("weight")
    if query["density"] or (edges is None and query["range"] is None):
        return
    if weight is not None and query.tensors[weight].shape != query.tensors[0].shape:
        return
    for dim in range(query.tensors[0].ndim):
        yield query.line({leaf: Shard(dim) for leaf in (0, weight) if leaf is not None}, [Partial("sum"), Replicate()])
    if weight is not None:
        yield query.line({weight: Partial("sum")}, [Partial("sum"), Replicate()])


def isin(query: RuleQuery) -> Iterator[PlacementRule]:
    """An element is in a sharded set if it is in the shard of any rank.  The set must have one dim to be contiguous."""
    element, tests = query.leaf("elements"), query.leaf("test_elements")
    if element is not None:
        yield from dim_map_rules(query, unchanged_dims(query.tensors[element].ndim), leaf=element)
    if tests is not None and query.tensors[tests].ndim == 1:
        yield query.line({tests: Shard(0)}, [Partial("min" if query["invert"] else "max")])


_SORTED = "the dim that is sorted is whole"

RULES: tuple[OpRule, ...] = with_variants(
    rules(FAMILY, _SORTED, ["aten.sort.default", "aten.sort.stable", "aten.topk.default"], sort),
    rules(FAMILY, _SORTED, ["aten.argsort.stable", "aten.argsort.default"], sort),
    rules(FAMILY, "each row has its own order", ["aten.kthvalue.default"], kthvalue),
    rules(FAMILY, "numbers go by themselves", ["aten.bucketize.Tensor", "aten.bucketize.Scalar"], bucketize),
    rules(FAMILY, "rows go by themselves", ["aten.searchsorted.Tensor", "aten.searchsorted.Scalar"], searchsorted),
    rules(FAMILY, "counts add up", ["aten.histc.default"], histc),
    rules(FAMILY, "counts add up", ["aten.histogram.bins_tensor", "aten.histogram.bin_ct"], histogram),
    rules(FAMILY, "elements go by themselves", ["aten.isin.Tensor_Tensor", "aten.isin.Tensor_Scalar"], isin),
)  # fmt: skip

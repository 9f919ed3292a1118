"""Rules of batched linear algebra, distances and Fourier transforms.

Each matrix of a batch is independent.  A row of `MATRIX_DIMS` has, for each tensor, the number of its last dims that
belong to a matrix; the dims before are the batch, aligned from the right.  Operands of batch size 1, or without that
dim, are replicated (DTensor 2.13 shards them).  Distances are sharded by batch, by row of either side, and summed over
columns where a distance is a sum.  For Fourier transforms, which are linear, every dim that is not transformed is a
batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from strategies.ops.lib.elementwise import linear_partial_rules, named_shard_rule, sharded_operands
from strategies.ops.lib.overload_variants import with_variants
from strategies.ops.semantics.rule_registry import Meta, OpRule, PlacementRule, RuleQuery, rules

MATRIX_DIMS = {
    "cholesky": ("2", "2"), "cholesky_inverse": ("2", "2"), "cholesky_solve": ("22", "2"),
    "geqrf": ("2", "21"), "inverse": ("2", "2"), "linalg_cholesky_ex": ("2", "20"), "linalg_eig": ("2", "12"),
    "_linalg_eigvals": ("2", "1"), "_linalg_eigh": ("2", "12"), "_linalg_det": ("2", "021"),
    "_linalg_slogdet": ("2", "0021"), "_linalg_svd": ("2", "212"), "linalg_householder_product": ("21", "2"),
    "linalg_inv_ex": ("2", "20"), "linalg_ldl_factor_ex": ("2", "210"), "linalg_ldl_solve": ("212", "2"),
    "linalg_lu": ("2", "222"), "linalg_lu_factor_ex": ("2", "210"), "linalg_lu_solve": ("212", "2"),
    "linalg_matrix_exp": ("2", "2"), "linalg_qr": ("2", "22"), "linalg_solve_triangular": ("22", "2"),
    "lu_unpack": ("21", "222"), "ormqr": ("212", "2"), "triangular_solve": ("22", "22"),
}  # fmt: skip
"""The number of matrix dims of each tensor argument, in order, and of each result; a result may be omitted, then empty."""
LINEAR = {"cholesky_solve": "self", "linalg_ldl_solve": "B", "linalg_lu_solve": "B", "linalg_solve_triangular": "B"}
"""The right-hand sides of systems, in which the solution is linear."""
REDUCTION_BY_ORDER = {0.0: "sum", 1.0: "sum", math.inf: "max"}
"""The reduction over columns of a distance, by the order of the norm; for other orders only powers add."""
MATRIX_DIMS_BY_NAME = {"linalg_pinv.atol_rtol_tensor": ({"self": 2, "atol": 0, "rtol": 0}, "2")}


@dataclass(frozen=True, slots=True)
class Batched:
    """The numbers of matrix dims of tensors and results, and the placement rules for each batch dim."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def lines(self, query: RuleQuery) -> Iterator[PlacementRule]:
        depths = [meta.ndim - own for meta, own in zip(query.tensors, self.inputs, strict=True)]
        for back in range(1, max(depths, default=0) + 1):
            size = max(_size(m, d, back) for m, d in zip(query.tensors, depths, strict=True))
            placed: list[Placement] = [
                Shard(d - back) if _size(m, d, back) == size else Replicate()
                for m, d in zip(query.tensors, depths, strict=True)
            ]
            made = [self._result(meta, own, back) for meta, own in zip(query.outputs, self.outputs, strict=True)]
            if any(isinstance(p, Shard) for p in placed):
                yield PlacementRule(tuple(placed), tuple(made))

    def _result(self, meta: Meta | None, own: int, back: int) -> Placement | None:
        """The placement of a result; an omitted one is an empty tensor of one dim."""
        if meta is None:
            return None
        return Shard(meta.ndim - own - back) if meta.ndim >= own + back else Replicate()


def _size(meta: Meta, depth: int, back: int) -> int:
    """The size of the batch dim at `back` from the end; -1 if the tensor does not have it."""
    return meta.shape[depth - back] if depth >= back else -1


def batched(query: RuleQuery) -> Iterator[PlacementRule]:
    """The rule of a row of `MATRIX_DIMS` or `MATRIX_DIMS_BY_NAME`."""
    _, packet, which = query.op.split(".")
    if f"{packet}.{which}" in MATRIX_DIMS_BY_NAME:
        named, outputs = MATRIX_DIMS_BY_NAME[f"{packet}.{which}"]
        given = {query.leaf(name): own for name, own in named.items()}
        inputs = [given[leaf] for leaf in range(len(query.tensors))]
    else:
        of_inputs, outputs = MATRIX_DIMS[packet]
        inputs = [int(own) for own in of_inputs]
    yield from Batched(tuple(inputs), tuple(map(int, outputs))).lines(query)
    if packet in LINEAR:
        yield from linear_partial_rules(query, [LINEAR[packet]])


def solve(query: RuleQuery) -> Iterator[PlacementRule]:
    """The right-hand side is a batch of vectors if it has the shape of the matrices without their last dim."""
    a, b = query.meta("A"), query.meta("B")
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    own = 1 if vector else 2
    yield from Batched((2, own), (own, 2, 1, 0)).lines(query)
    yield from linear_partial_rules(query, ["B"], [True, False, False, False])


def cross(query: RuleQuery) -> Iterator[PlacementRule]:
    """Vectors along one dim; all other dims are a batch, broadcast.  Linear in each operand."""
    result = query.outputs[0]
    for here in range(result.ndim if result is not None else 0):
        if result is not None and here != query["dim"] % result.ndim:
            inputs = sharded_operands(query, result, here)
            if inputs:
                yield query.line(inputs, [Shard(here)])
    for name in ("self", "other"):
        yield from linear_partial_rules(query, [name])


def cdist(query: RuleQuery) -> Iterator[PlacementRule]:
    """`(..., P, M)` and `(..., R, M)` to `(..., P, R)`; the dims before are broadcast."""
    one, two = query.meta("x1"), query.meta("x2")
    ndim = max(one.ndim, two.ndim)
    for dim in range(ndim - 2):
        owned = {name: dim - ndim + query.meta(name).ndim for name in ("x1", "x2")}
        sizes = {name: query.meta(name).shape[own] for name, own in owned.items() if own >= 0}
        largest = {name: owned[name] for name in sizes if sizes[name] == max(sizes.values())}
        yield named_shard_rule(query, largest, [dim], "filled")
    yield named_shard_rule(query, {"x1": one.ndim - 2}, [ndim - 2], "filled")
    yield named_shard_rule(query, {"x2": two.ndim - 2}, [ndim - 1], "filled")
    kind = REDUCTION_BY_ORDER.get(float(query["p"]))
    if kind:
        yield named_shard_rule(query, {"x1": one.ndim - 1, "x2": two.ndim - 1}, [Partial(kind)], "filled")


def cdist_backward(query: RuleQuery) -> Iterator[PlacementRule]:
    """The gradient of x1, a sum over the rows of x2; linear in the gradient of the distances."""
    ndim = query.meta("x1").ndim
    grad = "grad_output" if query.leaf("grad") is None else "grad"  # renamed in torch 2.14
    if {query.meta(name).ndim for name in (grad, "x1", "x2", "cdist")} != {ndim}:
        return
    rows, columns = ndim - 2, ndim - 1
    for dim in range(ndim - 2):
        if len({query.meta(name).shape[dim] for name in (grad, "x1", "x2", "cdist")}) == 1:
            yield named_shard_rule(query, {grad: dim, "x1": dim, "x2": dim, "cdist": dim}, [dim], "filled")
    yield named_shard_rule(query, {grad: rows, "x1": rows, "cdist": rows}, [rows], "filled")
    yield named_shard_rule(query, {grad: columns, "x2": rows, "cdist": columns}, [Partial("sum")], "filled")
    yield named_shard_rule(query, {"x1": columns, "x2": columns}, [columns], "filled")
    yield from linear_partial_rules(query, [grad])


def fft(query: RuleQuery) -> Iterator[PlacementRule]:
    """Shards of batch dims must not be empty: the FFT libraries reject empty tensors."""
    ndim = query.meta("self").ndim
    taken = {dim % max(ndim, 1) for dim in query["dim"]}
    for dim in range(ndim):
        if dim not in taken:
            yield named_shard_rule(query, {"self": dim}, [dim], "filled")
    yield from linear_partial_rules(query, ["self"])


def checked(query: RuleQuery) -> Iterator[PlacementRule]:
    """The check that no matrix of a batch failed: it returns nothing, and each rank checks its shard."""
    return (query.line({0: Shard(dim)}, []) for dim in range(query.meta("info").ndim))


RULES: tuple[OpRule, ...] = with_variants(
    rules("linalg", "each matrix of a batch by itself", [
        *(f"aten.{packet}.default" for packet in MATRIX_DIMS), *(f"aten.{op}" for op in MATRIX_DIMS_BY_NAME),
    ], batched),
    rules("linalg", "each system of a batch by itself", ["aten._linalg_solve_ex.default"], solve),
    rules("linalg", "each matrix of a batch is checked by itself", ["aten._linalg_check_errors.default"], checked),
    rules("linalg", "each vector by itself", ["aten.linalg_cross.default"], cross),
    rules("distances", "a distance is of two rows", ["aten._cdist_forward.default"], cdist),
    rules("distances", "a row's gradient is a sum over pairs", ["aten._cdist_backward.default"], cdist_backward),
    rules("fft", "lines along one dim are transformed each by itself",
          ["aten._fft_c2c.default", "aten._fft_c2r.default", "aten._fft_r2c.default"], fft),
)  # fmt: skip

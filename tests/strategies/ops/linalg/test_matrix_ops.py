"""Batches of matrices, lines to transform, rows with distances: every dim that is no operand's own."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from strategies.model.rule import Call, Leaf, Sample
from strategies.ops.linalg import matrix_ops
from strategies.ops.validation.claims import own_claims, validate_rule

ENTRY = {entry.op: entry for room in (matrix_ops, matrix_ops, matrix_ops) for entry in room.RULES}


def made(op, tensors, args=(), **kwargs):
    leaves = tuple(Leaf(i) for i in range(len(tensors)))
    return Sample(Call(f"aten.{op}", (*leaves, *args), tuple(kwargs.items())), tuple(tensors), "made here")


def matrices(*shape):
    torch.manual_seed(sum(shape))
    x = torch.randn(shape, dtype=torch.float64)
    return x @ x.mT + 3 * torch.eye(shape[-2], dtype=torch.float64) if shape[-1] == shape[-2] else x


CALLS = [
    made("linalg_cholesky_ex.default", [matrices(4, 5, 3, 3)]),
    made("linalg_inv_ex.default", [matrices(4, 3, 3)]),
    made("_linalg_eigh.default", [matrices(5, 3, 3)]),
    made("_linalg_svd.default", [matrices(5, 4, 3)]),
    made("_linalg_svd.default", [matrices(5, 4, 3)], (False, False)),
    made("_linalg_det.default", [matrices(4, 3, 3)]),
    made("linalg_qr.default", [matrices(4, 4, 3)], ("r",)),
    made("linalg_lu.default", [matrices(5, 3, 3)]),
    made("linalg_solve_triangular.default", [matrices(1, 3, 3).tril(), matrices(4, 3, 2)], upper=False),
    made("linalg_solve_triangular.default", [matrices(4, 3, 3).tril(), matrices(3, 2)], upper=False),
    made("_linalg_solve_ex.default", [matrices(4, 3, 3), matrices(4, 3)]),
    made("_linalg_solve_ex.default", [matrices(4, 3, 3), matrices(4, 3, 2)]),
    made("linalg_cross.default", [matrices(4, 3), matrices(1, 3)], dim=1),
    made("_fft_r2c.default", [matrices(4, 6)], ([1], 0, True)),
    made("_fft_c2c.default", [matrices(4, 6).to(torch.complex128)], ([0], 0, True)),
    made("_cdist_forward.default", [matrices(2, 4, 5), matrices(2, 6, 5)], (1.0, None)),
    made("_cdist_forward.default", [matrices(2, 4, 5), matrices(2, 6, 5)], (float("inf"), None)),
    made("_cdist_forward.default", [matrices(4, 5), matrices(6, 5)], (2.0, None)),
]


@pytest.mark.parametrize("sample", CALLS, ids=lambda sample: f"{sample.op} {sample.arguments()}")
def test_every_line_is_right(sample):
    found = validate_rule(ENTRY[sample.op], ranks=(2, 3), given=[sample])
    assert not found.wrong and found.sound


def placements(sample):
    return [claim.rule for claim in own_claims(ENTRY[sample.op], sample, 2, sample.call(sample.tensors))]


def test_an_operand_that_broadcasts_is_whole_on_each_rank():
    one = made("linalg_solve_triangular.default", [matrices(1, 3, 3).tril(), matrices(4, 3, 2)], upper=False)
    assert (Replicate(), Shard(0)) in [rule.inputs for rule in placements(one)]
    two = made("linalg_solve_triangular.default", [matrices(4, 3, 3).tril(), matrices(1, 3, 2)], upper=False)
    assert placements(two)[0].inputs == (Shard(0), Replicate())
    assert all(Shard(0) not in rule.inputs for rule in placements(two)[1:])  # DTensor 2.13: R, S(0)


def test_the_dims_of_a_matrix_are_never_cut():
    rules = placements(made("linalg_inv_ex.default", [matrices(4, 3, 3)]))
    assert [rule.inputs for rule in rules] == [(Shard(0),)]


def test_a_transformed_dim_is_never_cut():
    rules = placements(made("_fft_r2c.default", [matrices(4, 6)], ([1], 0, True)))
    assert [p for rule in rules for p in rule.inputs if isinstance(p, Shard)] == [Shard(0)]


def test_distances_add_over_columns_only_where_the_norm_does():
    def parts(p):
        rules = placements(made("_cdist_forward.default", [matrices(4, 6), matrices(5, 6)], (p, None)))
        return [rule.outputs[0] for rule in rules if isinstance(rule.outputs[0], Partial)]

    assert (parts(1.0), parts(float("inf")), parts(2.0)) == ([Partial("sum")], [Partial("max")], [])

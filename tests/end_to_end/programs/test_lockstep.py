"""Whole programs in lockstep give what they give on rank threads: those of the other families, and some of our own.

The ones that cannot run in one control flow stand in `REFUSED`, with what they are told.
"""

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from localtensor.errors import LocalTensorError, NotInLockstep, RanksDiverge
from tests.device import ON_CPU
from tests.end_to_end.programs import (
    checkpoints,
    context_parallel,
    data_parallel_programs,
    lockstep_programs,
    optimizers,
    pipelines,
    random_programs,
    redistributions,
    tensor_parallel_programs,
)
from tests.end_to_end.programs.lockstep_ways import assert_both, in_lockstep
from tests.end_to_end.programs.test_optimizers import LAYOUTS
from tests.end_to_end.programs.test_redistributions import GRID, ROW, STRIDED, every_pair
from tests.torch_here import before_2_14

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP will be deprecated"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
F32, F64, C64, BF16 = torch.float32, torch.float64, torch.complex64, torch.bfloat16

# Name, then program and arguments.  Products of matrices may differ in the last bits: those are close, the others equal.
CLOSE = {
    "an mlp": (tensor_parallel_programs.mlp, (4,)),
    "attention": (tensor_parallel_programs.attention, (4,)),
    "a sequence-parallel block": (tensor_parallel_programs.sequence_parallel_block, (4,)),
    "an mlp whose hidden units divide badly": (tensor_parallel_programs.uneven_mlp, (4,), 6),
    "an mlp with a rank that has no hidden unit": (tensor_parallel_programs.uneven_mlp, (4,), 3),
    "a transformer learns": (tensor_parallel_programs.language_model, (4,), 1),
    "fully sharded": (data_parallel_programs.fully_sharded, (4,), True, F64),
    "fully sharded, kept after forward": (data_parallel_programs.fully_sharded, (4,), False, F64),
    "hybrid sharded": (data_parallel_programs.hybrid_sharded, (2, 2)),
    "sharded in two ways": (data_parallel_programs.sharded_in_two_ways, (2, 2)),
    "sharded and recomputed": (data_parallel_programs.recomputed, (4,)),
    "sharded, two batches a gradient": (data_parallel_programs.accumulated, (4,), "sharded"),
    "dropout remembers": (random_programs.dropout, (4,), 11, "remembers"),
    "dropout recomputes": (random_programs.dropout, (4,), 11, "recomputes"),
    "context parallel": (context_parallel.sharded_buffers, 16, "MATH", False, True),
    "context parallel, masked": (context_parallel.sharded_buffers, 16, "MATH", True, True),
    "data and tensor parallel by hand": (lockstep_programs.data_and_tensor_parallel,),
    "inputs and outputs": (lockstep_programs.inputs_and_outputs,),
    "a distributed module": (lockstep_programs.distributed_module,),
    "local_map": (lockstep_programs.local_maps,),
    "checkpointed": (lockstep_programs.checkpointed,),
    "attention on shards of heads": (lockstep_programs.attention,),
    "losses and norms": (lockstep_programs.losses,),
    **{f"optimizers, {name}": (optimizers.train, ("SGD", "AdamW"), *LAYOUTS[name], 2) for name in LAYOUTS},
    "optimizers over uneven shards": (lockstep_programs.foreach_optimizers,),
}
EQUAL = {
    "logits cut by class": (tensor_parallel_programs.cross_entropy, (4,), "mean", 1, 8, 3),
    "logits cut by class, each loss": (tensor_parallel_programs.cross_entropy, (4,), "none", 1, 8, 3),
    "logits cut by row": (tensor_parallel_programs.cross_entropy, (4,), "sum", 0, 5, 3),
    "logits cut by row, mean": (tensor_parallel_programs.cross_entropy, (4,), "mean", 0, 8, 3),
    "walks on a row": (
        redistributions.walks, (4,), tuple(((5, 3), dtype, every_pair(ROW)) for dtype in (F64, C64, BF16, torch.bool))),
    "walks on a grid": (redistributions.walks, (2, 2),
        tuple((*case, every_pair(GRID)) for case in [((8, 4), C64), ((5, 3), F32), ((1, 7), F32)])),
    "strided walks": (redistributions.walks, (2, 2),
        tuple((shape, F64, (STRIDED, end, STRIDED)) for shape, end in product([(8, 4), (5, 3)], GRID))),
    "there and back": (redistributions.there_and_back, (2, 2),
        tuple(((8, 4), F64, path) for path in [("S(0), S(1)", "R, R", "S(1), S(0)"), (STRIDED, "S(0), S(0)")])),
    "draws of what all have": (random_programs.draws, None, [1, 2, 3, 4]),
    "kaiming of rows": (random_programs.kaiming, 0),
    "kaiming of columns": (random_programs.kaiming, 1),
    "a model from meta, sharded": (random_programs.fresh_weights, "sharded"),
    "a model from meta, tensor parallel": (random_programs.fresh_weights, "tensor parallel"),
    "rows that a rank holds": (data_parallel_programs.rows_held, (3,)),
    "collectives of a block, counted": (tensor_parallel_programs.collectives_of_block, (4,)),
    "collectives of uneven shards, counted": (lockstep_programs.counted,),
    "an op of one's own": (lockstep_programs.custom_op,),
    "copied, saved and loaded": (lockstep_programs.copied_and_saved,),
    "printed": (lockstep_programs.printed,),
}  # fmt: skip


def ranks_of(program):
    return 3 if program is data_parallel_programs.rows_held else 4


SLOW = {
    "sharded in two ways",
    "hybrid sharded",
    "walks on a grid",  # on rank threads and gloo by default
    "optimizers, strided",
    "optimizers, two by two",
    "fully sharded, kept after forward",
    "sharded and recomputed",
}
CPU_KERNELS = {"context parallel", "context parallel, masked", "attention on shards of heads"}


MARKS = dict.fromkeys(SLOW, pytest.mark.slow) | dict.fromkeys(CPU_KERNELS, ON_CPU)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in CLOSE])
def test_close(name):
    program, *args = CLOSE[name]
    assert len(assert_both(program, *args, ranks=ranks_of(program), exact=False)) == 4


@pytest.mark.few(5)
@pytest.mark.parametrize("name", [pytest.param(n, marks=MARKS.get(n, ())) for n in EQUAL])
def test_equal(name):
    program, *args = EQUAL[name]
    assert len(assert_both(program, *args, ranks=ranks_of(program))) == ranks_of(program)


def one_flat_parameter():
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


DRAWS_UNTIL = "trunc_normal_ draws until all is well"
REFUSED = {
    "DDP: its reducer is C++": (NotInLockstep, "DistributedDataParallel", data_parallel_programs.replicated, (4,)),
    "FSDP1: one flat parameter": (NotInLockstep, "fully_shard works", one_flat_parameter),
    "a pipeline: each rank has modules of its own": (RanksDiverge, "", pipelines.train, "1F1B", 4, 1, 1),
    "a checkpoint: rank 0 alone plans it": (RanksDiverge, "dcp.save", checkpoints.train, "unused", 1),
    "a branch on the rank": (RanksDiverge, "4: False on rank 3", redistributions.walks, (4,), (((5, 3), F64, ("P(sum)",)),)),
    "a picture that rank 0 alone prints": (RanksDiverge, "visualize_sharding", lockstep_programs.shown_shards),
    DRAWS_UNTIL: (RanksDiverge, "trunc_normal_", random_programs.draws, 0, [7] * 4),
    "a list that is indexed by rank": (RanksDiverge, "batches[rank]", data_parallel_programs.unused, (4,), "by hand", 4),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[before_2_14, ON_CPU]) if n == DRAWS_UNTIL else n for n in REFUSED]
)
def test_refused(name):
    kind, words, program, *args = REFUSED[name]
    with pytest.raises(kind) as told:
        in_lockstep(program, *args, ranks=4)
    assert words in str(told.value)
    assert "localtensor.run(fn, ranks=...)" in str(told.value)


def test_after_a_refusal_the_next_program_runs():
    with pytest.raises(LocalTensorError):
        in_lockstep(data_parallel_programs.replicated, (4,), ranks=4)
    assert len(assert_both(tensor_parallel_programs.mlp, (4,), ranks=4, exact=False)) == 4

"""What needs a GPU: attention kernels, generators and streams of CUDA, and symmetric memory that processes share.

Skipped without one; `make cuda` runs them, and with LOCALTENSOR_TEST_DEVICE=cuda the other tests of this folder, too.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import localtensor as lt
from tests.device import DEVICE, normal
from tests.end_to_end.programs.lockstep_ways import assert_both
from tests.tools.symmetric import measure, right  # noqa: F401  # registers the programs
from tests.tools.symmetric.labels import RIGHT

pytestmark = pytest.mark.skipif(DEVICE != "cuda" or not torch.cuda.is_available(), reason="needs a GPU: make cuda")
SEQUENCE = 2
"""The dim of the sequence."""

EFFICIENT = pytest.param(
    "EFFICIENT_ATTENTION",
    marks=pytest.mark.xfail(
        reason="on torch 2.11 a fifth of the queries' gradient is wrong; other kernels go the same way"
    ),
)
NOT_ON_ONE_GPU = {
    "order_by_a_message": "gloo sends no memory of a GPU",
    "order_by_a_chain_of_messages": "gloo sends no memory of a GPU",
    "experts_by_all_to_all_vdev": "NVSHMEM alone has it",
    "put_with_signal_and_wait": "NVSHMEM alone has it",
}


def output_and_gradients(tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = functional.scaled_dot_product_attention(*leaves, is_causal=True)
    out.float().square().sum().backward()
    return [out.detach(), *[x.grad for x in leaves]]


def queries_keys_and_values():
    torch.manual_seed(11)
    return list(torch.randn(3, 2, 2, 256, 64, dtype=torch.bfloat16, device="cuda"))


def attention_in_pieces(kernel, rotate):
    """Output and gradients of q, k, v, put together again."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    ring.set_rotate_method(rotate)
    tensors = queries_keys_and_values()
    with (
        sdpa_kernel(getattr(SDPBackend, kernel)),
        context_parallel(mesh, buffers=tensors, buffer_seq_dims=[SEQUENCE] * 3),
    ):
        parts = output_and_gradients(tensors)
        return ring.context_parallel_unshard(mesh, parts, [SEQUENCE] * 4)


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", EFFICIENT, "CUDNN_ATTENTION"])
def test_context_parallel_attention_is_that_of_one_device(kernel, rotate):
    with sdpa_kernel(getattr(SDPBackend, kernel)):
        expected = output_and_gradients(queries_keys_and_values())
    for parts in lt.run(attention_in_pieces, kernel, rotate, ranks=2, device="cuda"):
        torch.testing.assert_close(parts, expected, rtol=5e-2, atol=5e-2)


def drawn(placements):
    """What this rank has of random tensors of DTensor, and what it draws afterwards by itself."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(5)
    x = distribute_tensor(torch.zeros(8, 6, device="cuda"), mesh, placements)
    kinds = [torch.rand_like(x), torch.randn_like(x), functional.dropout(x + 1, 0.4), x.clone().uniform_()]
    return [y.to_local() for y in kinds], torch.rand(3, device="cuda"), torch.rand(3, device="cpu")


@pytest.mark.parametrize("placements", [(Replicate(),), (Shard(0),), (Shard(1),)], ids=str)
def test_random_tensors_are_those_of_real_processes(placements):
    threads = lt.run(drawn, placements, ranks=4, device="cuda")
    gloo = lt.run(drawn, placements, ranks=4, on="gloo", device="cuda")
    torch.testing.assert_close(list(threads), list(gloo), rtol=0, atol=0)
    drawn_alike = torch.equal(threads[0][0][0], threads[1][0][0])
    assert drawn_alike == placements[0].is_replicate()


@pytest.mark.parametrize("placements", [(Replicate(),), (Shard(0),), (Shard(1),)], ids=str)
def test_random_tensors_in_lockstep_are_those_of_rank_threads(placements):
    assert_both(drawn, placements, ranks=4)


def on_a_stream_of_its_own():
    """Each rank computes on its own stream across collectives at which ranks take turns."""
    stream, x = torch.cuda.Stream(), torch.full((1 << 20,), float(dist.get_rank() + 1), device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            x = x * 2
            dist.all_reduce(x)
            assert torch.cuda.current_stream() == stream
            x = x / 4
    torch.cuda.current_stream().wait_stream(stream)
    return x[:3].cpu()


def test_each_rank_has_its_own_current_stream():
    threads = lt.run(on_a_stream_of_its_own, ranks=3, device="cuda")
    gloo = lt.run(on_a_stream_of_its_own, ranks=3, on="gloo", device="cuda")
    torch.testing.assert_close(list(threads), list(gloo), rtol=0, atol=0)


def compiled_step():
    def step(x, w):
        return torch.nn.functional.gelu(x @ w).sum(0)

    torch.manual_seed(dist.get_rank())
    x, w = torch.randn(16, 8, device="cuda"), torch.randn(8, 4, device="cuda")
    here = torch.compile(step)(x, w)
    dist.all_reduce(here)
    alone = step(x, w)
    dist.all_reduce(alone)
    return here, alone


def test_inductor_compiles_for_the_gpu_on_rank_threads():
    for here, alone in lt.run(compiled_step, ranks=2, device="cuda"):
        torch.testing.assert_close(here, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_functions_in_lockstep_are_right_on_the_gpu(backend):
    def step(x, w):
        return functional.gelu(x @ w).sum(0)

    torch.compiler.reset()
    with lt.LocalTensorMode(4):
        x = lt.rank_map(lambda rank: normal(16, 8, seed=rank, dtype=torch.float32))
        w = torch.linspace(-1, 1, 32).view(8, 4).cuda().requires_grad_()
        compiled = lt.all_reduce(torch.compile(step, backend=backend)(x, w), "sum")
        compiled.sum().backward()
        gradient, w.grad = w.grad, None
        eager = lt.all_reduce(step(x, w), "sum")
        eager.sum().backward()
        for one, other in ((compiled, eager), (gradient, w.grad)):
            for rank in range(4):
                assert one.on(rank).is_cuda
                torch.testing.assert_close(one.on(rank), other.on(rank), rtol=1e-4, atol=1e-4)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def in_parallel(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


def block_on_the_gpu():
    return Block().cuda()


def batch_on_the_gpu():
    return torch.randn(8, 16, device="cuda")


def squared(out):
    return out.square().mean()


@pytest.mark.parametrize("on", ["threads", "lockstep", "gloo"])
def test_a_parallel_step_is_compared_with_one_device_on_the_gpu(on):
    done = lt.compare(
        block_on_the_gpu,
        in_parallel,
        batch_on_the_gpu,
        mesh={"dp": 2, "tp": 2},
        loss=squared,
        optimizer=torch.optim.AdamW,
        steps=2,
        on=on,
    )
    assert "S(1)" in str(done.layouts["output of up, step 0"])


def test_a_traced_run_names_the_collectives_of_tensors_on_the_gpu():
    def body():
        dist.all_reduce(torch.ones(4, device="cuda"))

    run = lt.run(body, ranks=2, device="cuda", trace=True)
    calls = [event for event in run.recording.events if "all_reduce" in str(event)]
    assert len(calls) >= 2
    assert "cuda" in str(calls)


def on_real_symmetric_memory(name):
    """A program of the corpus on CUDA's symmetric memory, in a process that shares the one GPU with the others."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    [program] = [program for program in RIGHT if program.name == name]
    program.body()
    torch.cuda.synchronize()
    return "ended"


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.name)
def test_a_right_program_is_right_on_real_symmetric_memory(program):
    if program.name in NOT_ON_ONE_GPU:
        pytest.skip(NOT_ON_ONE_GPU[program.name])
    run = lt.run(on_real_symmetric_memory, program.name, ranks=program.ranks, on="gloo", device="cuda", timeout=30)
    assert run.values == ("ended",) * program.ranks


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.name)
def test_a_right_program_is_right_on_rank_threads_with_cuda_tensors(program):
    assert measure.run(program, "round_robin").error is None

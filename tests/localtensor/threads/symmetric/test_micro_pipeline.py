"""Async tensor parallelism: torch's micro-pipeline pass on traced programs, run on rank threads."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed._symmetric_memory as symm_mem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import localtensor as lt

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def passes():
    """Torch's modules of the pass and of what runs before it are there: importing them takes seconds, without which tests are collected."""
    for name in ("micro_pipeline_tp", "post_grad"):
        pytest.importorskip(f"torch._inductor.fx_passes.{name}")


def gather(x, dim=0):
    return fc.all_gather_tensor(x, dim, dist.group.WORLD)


def scatter(x, op="sum", dim=0):
    return fc.reduce_scatter_tensor(x, op, dim, dist.group.WORLD)


def two_products(x, w, v):
    whole = gather(x)
    return scatter((whole @ w * (whole @ w + 1)) @ v)


def of_dtensors(x, w, v, *, mesh):
    """Sequence in parts, the first weight by columns, the second by rows."""
    x, w, v = (DTensor.from_local(part, mesh, [Shard(dim)], run_check=False) for part, dim in zip((x, w, v), (0, 1, 0)))
    hidden = torch.relu(x.redistribute(mesh, [Replicate()]) @ w)
    return (hidden @ v).redistribute(mesh, [Shard(0)]).to_local()


# Each with the fused ops that the pass is expected to make of it.
PROGRAMS = {
    "column then row": (
        lambda x, w, v: scatter(torch.relu(gather(x) @ w) @ v),
        ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"],
    ),
    "two products of one gather": (two_products, ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]),
    "average": (lambda x, w, v: scatter(torch.relu(gather(x) @ w) @ v, "avg"), ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]),
    "DTensors": (of_dtensors, ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]),
    "gather alone": (lambda x, w, v: gather(x) @ w @ v, ["fused_all_gather_matmul"]),
    "scatter alone": (lambda x, w, v: scatter(x @ w @ v), ["fused_matmul_reduce_scatter"]),
}  # fmt: skip


def both(name, dtype, exact):
    """The results of a program as it is and with the pass, and the names of its fused ops."""
    from torch._inductor.fx_passes import micro_pipeline_tp, post_grad

    symm_mem.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    generator = torch.Generator().manual_seed(dist.get_rank())
    draw = torch.randint if exact else torch.randn
    shapes = [(8, 16), (16, 12), (12, 16)]
    parts = [draw(*((-4, 5) if exact else ()), shape, generator=generator).to(dtype) for shape in shapes]
    program, _ = PROGRAMS[name]
    if program is of_dtensors:
        program = partial(of_dtensors, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    module = make_fx(program, tracing_mode="fake")(*parts)
    post_grad.remove_noop_ops(module.graph)
    post_grad.view_to_reshape(module)
    micro_pipeline_tp.micro_pipeline_tp_pass(module.graph)
    module.recompile()
    fused = [str(node.target).split(".")[1] for node in module.graph.nodes if "symm_mem" in str(node.target)]
    return program(*parts).clone(), module(*parts).clone(), fused


@pytest.mark.few(4)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_fused_program_equals_the_plain_one_bit_for_bit_in_float64(name, ranks):
    for schedule in ("round_robin", "shuffled:3"):
        for plain, fused, ops in lt.run(both, name, torch.float64, True, ranks=ranks, schedule=schedule):
            assert ops == PROGRAMS[name][1]
            assert torch.equal(plain, fused)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_float64_random_numbers_differ_by_the_order_of_additions_only(name):
    """The pipeline adds the ranks' parts in another order than gloo; what adds nothing is equal bit for bit."""
    for plain, fused, ops in lt.run(both, name, torch.float64, False, ranks=4):
        assert ops == PROGRAMS[name][1]
        if "fused_matmul_reduce_scatter" in ops:
            assert (plain - fused).abs().max() <= 4 * torch.finfo(torch.float64).eps * plain.abs().max()
        else:
            assert torch.equal(plain, fused)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_fused_program_is_within_the_noise_of_bfloat16(name):
    """The tolerance is measured: how far the plain program in bfloat16 is from the same in float64."""
    exact = lt.run(both, name, torch.float64, False, ranks=4).values
    for (plain, fused, _), (right, _, _) in zip(lt.run(both, name, torch.bfloat16, False, ranks=4), exact, strict=True):
        noise = (plain.double() - right).abs().max()
        assert noise > 0
        assert (fused.double() - right).abs().max() <= 2 * noise

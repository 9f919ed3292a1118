"""Transforms and plans of torch in lockstep: torch.func, forward mode, torch.export, tied weights, random numbers, context parallel."""

import copy
import inspect
import io
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from tests.localtensor.both_ways import check_both_ways

RANKS = 3
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*rng state:UserWarning"
)


def rows():
    return torch.arange(6.0).view(2, 3) * (dist.get_rank() + 1)


class Tied(nn.Module):
    """An embedding and an output layer of one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(6, 3), nn.Linear(3, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, index):
        return self.out(self.embed(index))


def layer():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


# -- torch.func


def vmapped():
    other = torch.arange(3.0) * (dist.get_rank() + 1)
    changed = rows()
    vmap(lambda row: row.mul_(2))(changed)
    return [
        vmap(lambda row: row * 2 + (row * other).sum() + dist.get_rank())(rows()),
        vmap(vmap(lambda a, b: a * b, (0, None)), (None, 0))(other, torch.arange(2.0)),
        vmap(lambda row, at: row.gather(0, at))(rows(), torch.tensor([[0, 1], [2, 2]])),
        vmap(lambda row: torch.where(row.sum() > 12, row, -row), out_dims=1)(rows()),
        changed,
    ]


def vmapped_with_random_numbers():
    torch.manual_seed(dist.get_rank())
    return [vmap(lambda row: row + torch.rand(3), randomness=how)(rows()) for how in ("same", "different")]


def derived():
    x = rows()
    return [
        grad(lambda x: (x * x).sum())(x), *grad_and_value(lambda x: x.sin().sum())(x), hessian(lambda x: (x**3).sum())(x[0]),
        jacrev(torch.sin)(x[0]), jacfwd(torch.sin)(x[0]), *jvp(lambda x: x.exp() @ x, (x[0],), (torch.ones(3),)),
        vjp(torch.sin, x)[1](torch.ones(2, 3))[0], torch.func.linearize(torch.sin, x)[1](torch.ones(2, 3)),
    ]  # fmt: skip


def derived_through_a_collective():
    def doubled(x):
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) * 1

    return [*jvp(doubled, (rows(),), (torch.ones(2, 3),))]


def derived_forwards():
    with forward_ad.dual_level():
        return [*forward_ad.unpack_dual(forward_ad.make_dual(rows(), torch.ones(2, 3)).sin())]


def per_sample():
    module = layer()
    weights = {name: weight.detach() for name, weight in module.named_parameters()}

    def loss(weights, row):
        return functional_call(module, weights, (row[None],)).pow(2).sum()

    return vmap(grad(loss), (None, 0))(weights, rows())


def ensembles():
    weights, buffers = stack_module_state([layer() for _ in range(3)])
    base = nn.Linear(3, 2, device="meta")
    return [vmap(lambda w, b, x: functional_call(base, (w, b), (x,)), (0, 0, None))(weights, buffers, rows())]


def called_with_other_weights():
    mesh, module, tied = init_device_mesh("cpu", (RANKS,)), nn.Linear(3, 6), Tied()
    weight = torch.ones(6, 3) * (dist.get_rank() + 1)
    sharded = {
        "weight": distribute_tensor(torch.arange(18.0).view(6, 3), mesh, [Shard(0)]),
        "bias": distribute_tensor(torch.ones(6), mesh, [Shard(0)]),
    }
    x = distribute_tensor(torch.ones(2, 3), mesh, [Replicate()])
    both = [
        functional_call(tied, {"embed.weight": weight}, (torch.tensor([1, 2]),), tie_weights=how)
        for how in (True, False)
    ]
    return [*both, functional_call(module, sharded, (x,)).full_tensor()]


# -- torch.export


class Doubled(nn.Module):
    def forward(self, x):
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) * x.shape[0]


def exported():
    module, file = Doubled(), io.BytesIO()
    programs = [
        torch.export.export(module, (rows(),)),
        torch.export.export(module, (rows(),), dynamic_shapes={"x": {0: torch.export.Dim("rows")}}),
    ]
    programs.append(torch.export.export(layer(), (rows(),)).run_decompositions())
    torch.export.save(programs[-1], file)
    file.seek(0)
    names = [[str(node.target) for node in program.graph.nodes if node.op == "call_function"] for program in programs]
    longer = torch.cat([rows(), rows()])
    return [
        programs[0].module()(rows()),
        programs[1].module()(longer),
        torch.export.load(file).module()(longer[:2]),
        names,
    ]


# -- tied weights


def trained_tied():
    module = Tied()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.tensor([1, 2]) + dist.get_rank()).pow(2).sum().backward()
        for weight in module.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.embed.weight.mul_(dist.get_rank() + 2)
    return [
        module.out.weight.detach(),
        twin.out.weight.detach(),
        len([*twin.parameters()]),
        twin.out.weight is twin.embed.weight,
    ]


def loaded_tied():
    """The two names of a state are views of one memory, in the file, too."""
    module, file = Tied(), io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    state["embed.weight"].add_(dist.get_rank())
    module.load_state_dict(state, assign=True)
    return [state["out.weight"], module.out.weight.detach(), module.out.weight is module.embed.weight]


def sharded_tied():
    mesh, found = init_device_mesh("cpu", (RANKS,)), []
    split = {"embed": RowwiseParallel(input_layouts=Replicate()), "out": ColwiseParallel(output_layouts=Replicate())}
    for module in (fully_shard(Tied(), mesh=mesh), parallelize_module(Tied(), mesh, split)):
        module(torch.tensor([1, 5])).sum().backward()
        found += [
            part for weight in module.parameters() for part in (weight.to_local().detach(), weight.grad.full_tensor())
        ]
    return found


# -- random numbers, files, tensors that wait


def forked():
    torch.manual_seed(dist.get_rank())
    drawn = [torch.rand(2)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        drawn.append(torch.rand(2))
        with torch.random.fork_rng(devices=[]):
            drawn.append(torch.rand(2))
        drawn.append(torch.rand(2))
    state = torch.get_rng_state()
    with torch.random.fork_rng(enabled=False):
        drawn.append(torch.rand(2))
    torch.set_rng_state(state)
    return [*drawn, torch.rand(2)]


def loaded():
    found = []
    for how in ({}, {"map_location": "cpu"}, {"weights_only": False}):
        file = io.BytesIO()
        torch.save({"x": rows(), "names": ["a"], "half": torch.ones(2).half()}, file)
        file.seek(0)
        found.append(torch.load(file, **{"weights_only": True, **how}))
    module = layer()
    module.load_state_dict({"weight": rows(), "bias": torch.ones(2)}, assign=True)
    return [found, module(rows()).detach()]


def waiting():
    waits = functional.AsyncCollectiveTensor
    both = functional.all_reduce_coalesced([rows(), rows() * 2], "sum", dist.group.WORLD)
    shards = DTensor.from_local(rows(), init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    whole = shards.redistribute(placements=[Replicate()], async_op=True).to_local()
    flags = [isinstance(one, waits) for one in (*both, whole, whole + 1, whole.wait())]
    return [flags, [one + 0 for one in both], whole + 1]


# -- plans of context parallel


class Attention(nn.Module):
    def forward(self, query, key, value, **given):
        if given:
            return flex_attention.flex_attention(query, key, value, **given)
        with sdpa_kernel(SDPBackend.MATH):
            return nn.functional.scaled_dot_product_attention(query, key, value)


def planned(kind, block):
    torch.manual_seed(0)
    mesh, length = init_device_mesh("cpu", (2,)), 4 * block
    tensors = [*torch.randn(3, 1, 1, length, 4)]
    balancer = ring._create_default_load_balancer(length, 2, "cpu")
    plan = ring._ContextParallel(2, getattr(ring._ContextParallel.AttentionType, kind))
    module = parallelize_module(Attention(), mesh, plan)
    given = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of FlexAttention, which is not compiled
        if kind == "FLEX":
            make = ring._create_cp_block_mask
            sizes = (
                {"BLOCK_SIZE": (128, 128)} if "BLOCK_SIZE" in inspect.signature(make).parameters else {}
            )  # since 2.15
            given["block_mask"] = make(lambda b, h, i, j: i >= j, 1, 1, length, length, device_mesh=mesh, **sizes)
        local = ring._context_parallel_shard(mesh, tensors, [2] * 3, balancer if given else None)
        out = module(*local, **given)
    whole = ring.context_parallel_unshard(mesh, [out], [2], balancer if given else None)[0]
    wanted = nn.functional.scaled_dot_product_attention(*tensors, is_causal=bool(given))
    return [out, whole, torch.allclose(whole, wanted, atol=1e-5)]


PROGRAMS = [
    vmapped, vmapped_with_random_numbers, derived, derived_through_a_collective, derived_forwards, per_sample, ensembles,
    called_with_other_weights, exported, trained_tied, loaded_tied, sharded_tied, forked, loaded, waiting,
]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_it_is_that_of_rank_threads(program):
    found = check_both_ways(program, RANKS)
    assert found


@pytest.mark.parametrize(("kind", "block"), [("SDPA", 4), ("FLEX", 128)])
def test_plans_of_context_parallel_are_those_of_rank_threads(kind, block, monkeypatch):
    monkeypatch.setattr(ring, "_dispatch_mode", ring._dispatch_mode)  # a plan sets these for the process
    monkeypatch.setattr(ring._cp_options, "enable_load_balance", ring._cp_options.enable_load_balance)
    assert check_both_ways(lambda: planned(kind, block), 2)[-1]

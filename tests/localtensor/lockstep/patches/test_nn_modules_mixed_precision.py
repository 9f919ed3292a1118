"""Mixed precision in lockstep: autocast, half-precision parameters and gradient scaling, on each rank as alone."""

import pytest
import torch
from torch import nn

from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.values.local_tensor import LocalTensor

RANKS = 3


def data(rank, step=0):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * rank + step))


def check_same(program, rtol=1e-4, atol=1e-6):
    """The program, which takes what gives the data of a step, leaves on each rank what it leaves there alone."""
    with LocalTensorMode(RANKS):
        mine = program(lambda step: rank_map(lambda rank: data(rank, step)))
    for rank in range(RANKS):
        wanted = program(lambda step, rank=rank: data(rank, step))
        for name, want in wanted.items():
            got = mine[name].on(rank) if isinstance(mine[name], LocalTensor) else torch.as_tensor(mine[name])
            assert got.dtype == torch.as_tensor(want).dtype
            torch.testing.assert_close(
                got.detach(),
                torch.as_tensor(want).detach(),
                rtol=rtol,
                atol=atol,
                msg=lambda m, name=name: f"{name}: {m}",
            )
    return mine


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, cache):
    def program(data_of):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, cache_enabled=cache):
                out = net(data_of(step))
                kept = net[0](data_of(step)).relu() @ torch.ones(8, 2)  # the weight is used twice
            (out.float().pow(2).mean() + kept.float().mean()).backward()
            optimizer.step()
        return dict(net.named_parameters()) | {"out": out, "kept": kept, "grad": net[0].weight.grad}

    mine = check_same(program, rtol=2e-2, atol=2e-2)
    assert mine["out"].dtype == mine["kept"].dtype == dtype and mine["grad"].dtype == torch.float32
    assert mine["0.weight"]._partition.rows == RANKS


def test_autocast_within_which_some_of_it_is_off():
    def program(data_of):
        net = model()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = net[0](data_of(0))
            with torch.autocast("cpu", enabled=False):
                second = net[1:](first.float())
            third = torch.softmax(first, -1)
        return {"first": first, "second": second, "third": third}

    mine = check_same(program, rtol=2e-2, atol=2e-2)
    assert [x.dtype for x in mine.values()] == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_half_parameters_with_a_master_copy(how):
    def program(data_of):
        net = model()
        masters = [p.detach().clone().requires_grad_() for p in net.parameters()]
        net = net.to(torch.bfloat16)
        optimizer = torch.optim.AdamW(masters, 0.01, **how)
        for step in range(3):
            net(data_of(step).bfloat16()).float().pow(2).mean().backward()
            for p, master in zip(net.parameters(), masters, strict=True):
                master.grad, p.grad = p.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for p, master in zip(net.parameters(), masters, strict=True):
                    p.copy_(master)
        return {f"master {n}": x for n, x in enumerate(masters)} | dict(net.named_parameters())

    mine = check_same(program, rtol=5e-2, atol=5e-2)
    assert mine["0.weight"].dtype == torch.bfloat16 and mine["master 0"]._partition.rows == RANKS


def scaled(data_of, broken):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    for step in range(3):
        optimizer.zero_grad()
        loss = net(data_of(step)).pow(2).mean()
        scaler.scale(loss * (broken if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return dict(net.named_parameters()) | {"norm": norm, "scale": scaler.get_scale()}


@pytest.mark.parametrize("broken", [1.0, float("inf")])
def test_grad_scaler_where_all_ranks_agree_whether_to_step(broken):
    mine = check_same(lambda data_of: scaled(data_of, broken))
    assert mine["0.weight"]._partition.rows == RANKS
    assert mine["scale"] == (2.0**5 if broken == 1 else 2.0**3)


def test_moving_a_whole_model_to_another_dtype_and_back():
    def program(data_of):
        net = model()
        net.half()
        net.double()
        out = net(data_of(0).double())
        out.sum().backward()
        return dict(net.named_parameters()) | {"out": out, "grad": net[3].weight.grad}

    mine = check_same(program, rtol=1e-6, atol=1e-8)
    assert mine["0.weight"].dtype == torch.float64 and isinstance(mine["0.weight"], nn.Parameter)

"""Training in lockstep: after a few steps each rank's parameters and buffers are those that its own plain loop leaves.

Ranks start alike and have data of their own, so that gradients and then parameters differ between them.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from localtensor.lockstep.mode import LocalTensorMode, rank_map
from localtensor.lockstep.values.local_tensor import LocalTensor

RANKS = 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(-2))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        return self.used(x)


MODELS = {
    "linear": (lambda: nn.Linear(6, 4), (5, 6)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)), (5, 6)),
    "convolution and batch norm": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2)),
        (3, 2, 5, 5)),
    "group norm": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU()), (3, 2, 7)),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2)), (5, 6)),
    "attention": (Attention, (2, 5, 8)),
    "lstm": (lambda: nn.LSTM(4, 3), (5, 2, 4)),
    "a part that is not used": (Unused, (4, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), (2, 5, 8)),
}  # fmt: skip
OPTIMIZERS = {
    "SGD": lambda p, **how: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **how),
    "Adam": lambda p, **how: torch.optim.Adam(p, 0.01, amsgrad=True, **how),
    "AdamW": lambda p, **how: torch.optim.AdamW(p, 0.01, **how),
}
HOW = {"a loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def data(shape, rank, step=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * rank + step))


def steps(make, data_of, change=lambda model, step: None, optimizer=OPTIMIZERS["SGD"], seed=4):
    """A model after three steps on this data; `change` sees the gradients before each step is taken."""
    torch.manual_seed(seed)
    model = make()
    optimizer = optimizer(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        found = model(data_of(step))
        loss = (found[0] if isinstance(found, tuple) else found).pow(2).mean()
        loss.backward()
        change(model, step)
        optimizer.step()
    return model, loss


def state(model):
    named = [
        *model.named_parameters(),
        *model.named_buffers(),
        *((f"{n}.grad", p.grad) for n, p in model.named_parameters()),
    ]
    return dict(named)


def check_same(program, shape):
    """A program, which takes what gives the data of a step, leaves on each rank what it leaves there alone."""
    with LocalTensorMode(RANKS):
        mine = program(lambda step: rank_map(lambda rank: data(shape, rank, step)))
    for rank in range(RANKS):
        wanted = program(lambda step, rank=rank: data(shape, rank, step))
        assert mine.keys() == wanted.keys()
        for name, want in wanted.items():
            got = mine[name]
            if want is None or got is None:
                assert got is None and want is None, name
                continue
            got = got.on(rank) if isinstance(got, LocalTensor) else got
            torch.testing.assert_close(
                got.detach(), want.detach(), rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
            )
            assert got.shape == want.shape and got.dtype == want.dtype and got.requires_grad == want.requires_grad
    return mine


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_trained_as_on_each_rank_alone(name):
    make, shape = MODELS[name]
    mine = check_same(lambda data_of: state(steps(make, data_of)[0]), shape)
    assert any(isinstance(x, LocalTensor) and x._partition.rows == RANKS for x in mine.values())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_in_each_of_its_ways(optimizer, how):
    make, shape = MODELS["mlp"]

    def make_optimizer(parameters):
        return OPTIMIZERS[optimizer](parameters, **HOW[how])

    mine = check_same(lambda data_of: state(steps(make, data_of, optimizer=make_optimizer)[0]), shape)
    assert mine["0.weight"]._partition.rows == RANKS


def test_embedding_and_cross_entropy():
    def program(data_of):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 11))
        for step in range(2):
            tokens = (data_of(step) * 100).long().abs() % 11
            loss = nn.functional.cross_entropy(
                model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=3
            )
            loss.backward()
        return state(model) | {"loss": loss}

    assert check_same(program, (2, 6))["0.weight"]._partition.uniform


def test_backward_runs_once_for_all_ranks():
    calls = []
    with LocalTensorMode(64):
        model = nn.Linear(4, 2)
        model.weight.register_hook(calls.append)
        model(rank_map(lambda rank: torch.full((3, 4), float(rank)))).sum().backward()
    assert len(calls) == 1 and calls[0]._partition.rows == 64
    assert model.bias.grad._partition.uniform  # what does not depend on the data is held once


def test_the_same_data_on_all_ranks_keeps_one_value_throughout():
    with LocalTensorMode(64):
        model, loss = steps(*[MODELS["mlp"][0]], lambda step: data((5, 6), 0, step), optimizer=OPTIMIZERS["AdamW"])
    assert all(x._partition.uniform for x in [*state(model).values(), loss])


def test_a_model_from_outside_is_read_and_its_gradients_differ():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    before = copy.deepcopy(model)
    with LocalTensorMode(RANKS):
        x = rank_map(lambda rank: data((3, 4), rank))
        grads = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for rank in range(RANKS):
        before.zero_grad()
        before(data((3, 4), rank)).sum().backward()
        torch.testing.assert_close(grads[0].on(rank), before.weight.grad)


def test_a_copy_of_a_model_from_outside_is_trained_in_the_mode():
    torch.manual_seed(0)
    outside = nn.Linear(6, 2)

    def program(data_of):
        model = nn.Linear(6, 2)
        model.load_state_dict(outside.state_dict())
        found = steps(lambda: model, data_of)[0]
        return state(found)

    assert check_same(program, (3, 6))["weight"]._partition.rows == RANKS


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    def program(data_of):
        torch.manual_seed(0)
        first, second = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh()), nn.Linear(8, 2)
        x = data_of(0).requires_grad_()
        second(checkpoint(first, x, use_reentrant=reentrant)).pow(2).sum().backward()
        return state(first) | {"x": x.grad, "last": second.weight.grad}

    assert check_same(program, (3, 6))["x"]._partition.rows == RANKS


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.save_for_backward(x)
        ctx.by = by
        return x**3 * by

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad * ctx.by, None


def hooked(x):
    y = x * 2
    y.register_hook(lambda grad: grad.clamp(max=3))
    y.retain_grad()
    (y * y).sum().backward()
    return {"x": x.grad, "y": y.grad}


def twice(x):
    (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (grad * x).sum().backward()
    return {"x": x.grad, "first": grad}


def kept_graph(x):
    loss = (x.exp() * x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return {"x": x.grad}


def own_function(x):
    Cube.apply(x, 2).sum().backward()
    return {"x": x.grad}


def in_place(x):
    y = x.clone()
    y[:, 0] = 3
    y[1:].mul_(x[:-1])
    y.t().add_(1)
    (y * x).sum().backward()
    return {"x": x.grad, "y": y}


def no_gradient(x):
    with torch.no_grad():
        y = x * 2
    with torch.inference_mode():
        z = nn.functional.linear(x, x)[0]
        z.add_(1)
        w = z.view(-1)[1:].clone()
    with torch.enable_grad():
        (x * y).sum().backward()
    return {"x": x.grad, "y": y, "z": z, "w": w}


def clipped(x):
    (x**2).sum().backward()
    norm = nn.utils.clip_grad_norm_([x], 1.0)
    return {"x": x.grad, "norm": norm}


def clipped_by_value(x):
    (x**2).sum().backward()
    nn.utils.clip_grad_value_([x], 0.5)
    return {"x": x.grad}


def averaged(x):
    mean, teacher = torch.zeros_like(x), nn.Linear(6, 2)
    for weight in (0.1, 0.2):
        mean.lerp_(x.detach(), weight)
    torch._foreach_lerp_([mean], [x.detach()], 0.3)
    mean.mul_(0.9).add_(x.detach(), alpha=0.1)
    return {"mean": mean, "teacher": teacher(mean).detach()}


def of_pieces(x):
    parts = x.unbind(0)
    found = torch.stack([part * number for number, part in enumerate(parts)]).cumsum(0)
    torch.cat([found, x.sort(1).values], 0).max(dim=1).values.sum().backward()
    return {"x": x.grad}


def of_indices(x):
    top = x.topk(2, dim=1)
    (x.gather(1, top.indices) * x[x > 0].sum()).sum().backward()
    return {"x": x.grad, "indices": top.indices}


def functional(x):
    model = nn.Linear(6, 2)
    parameters = {name: value.detach() * 2 for name, value in model.named_parameters()}
    torch.func.functional_call(model, parameters, (x,)).pow(2).sum().backward()
    return {"x": x.grad}


PROGRAMS = [
    hooked, twice, kept_graph, own_function, in_place, no_gradient, clipped, clipped_by_value, averaged, of_pieces,
    of_indices, functional,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_autograd(program):
    def seeded(data_of):
        torch.manual_seed(1)
        return program(data_of(0).requires_grad_())

    mine = check_same(seeded, (4, 6))
    assert any(x._partition.rows == RANKS for x in mine.values())


def test_clipping_the_whole_model_and_a_scheduler():
    make, shape = MODELS["mlp"]

    def program(data_of):
        norms = {}

        def clip(model, step):
            norms[f"norm {step}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.05)

        def optimizer(parameters):
            made = torch.optim.AdamW(parameters, 0.01)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, 3)
            made.register_step_post_hook(lambda *_: schedule.step())
            return made

        return state(steps(make, data_of, clip, optimizer)[0]) | norms

    assert check_same(program, shape)["norm 2"]._partition.rows == RANKS


def test_an_optimizer_is_saved_and_goes_on():
    def program(data_of):
        torch.manual_seed(0)
        model, kept = nn.Linear(6, 2), {}
        for step in range(3):
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            if step:
                model.load_state_dict(kept["model"])
                optimizer.load_state_dict(kept["optimizer"])
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(data_of(step)).pow(2).sum().backward()
            optimizer.step()
            kept = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        return state(model) | {"average": kept["optimizer"]["state"][0]["exp_avg"]}

    assert check_same(program, (3, 6))["average"]._partition.rows == RANKS


def test_a_batch_of_another_size_on_each_rank():
    def program(data_of):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2):
            x = data_of(step)
            model(x[x[:, 0] > 0]).pow(2).sum().backward()
            optimizer.step()
        return state(model)

    assert check_same(program, (9, 6))["0.weight"]._partition.rows == RANKS

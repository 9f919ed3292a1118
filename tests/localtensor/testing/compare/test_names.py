"""Parameters that the ranks call otherwise, or fuse, are found by their values, and compared."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import localtensor as lt
from localtensor.errors import Diverged
from tests.tools.compare.layers import Copy, Reduce

WIDTH, HEADS = 8, 4


class Attention(nn.Module):
    """Queries of more columns than keys and values have, if `groups` is less than HEADS."""

    def __init__(self, groups=HEADS):
        super().__init__()
        small = WIDTH * groups // HEADS
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, small), nn.Linear(WIDTH, small)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.o(attend(self.q(x), self.k(x), self.v(x)))


class Model(nn.Module):
    def __init__(self, groups=HEADS):
        super().__init__()
        self.layers = nn.ModuleList([Attention(groups), Attention(groups)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def attend(q, k, v):
    q, k, v = (x.unflatten(-1, (-1, WIDTH // HEADS)) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-2] // x.shape[-2], -2) for x in (k, v))
    return (torch.softmax(q * k, -1) * v).flatten(-2)  # within each head


def linear(weight, bias):
    made = nn.Linear(weight.shape[1], weight.shape[0])
    made.weight, made.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return made


class FusedAttention(nn.Module):
    """Query, key and value in one matrix, each whole."""

    def __init__(self, whole):
        super().__init__()
        each = (whole.q, whole.k, whole.v)
        self.sizes = [one.out_features for one in each]
        self.qkv = linear(torch.cat([one.weight for one in each]), torch.cat([one.bias for one in each]))
        self.proj = linear(whole.o.weight, whole.o.bias)

    def forward(self, x):
        return self.proj(attend(*self.qkv(x).split(self.sizes, -1)))


class OtherNames(nn.Module):
    def __init__(self, model, layer=FusedAttention):
        super().__init__()
        self.blocks = nn.ModuleList(map(layer, model.layers))
        self.output = linear(model.head.weight, model.head.bias)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.output(x)


def averaged(model, group):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=group))
    return model


def fused(model, mesh):
    return averaged(OtherNames(model), mesh.get_group("dp"))


def fused_and_sharded(model, mesh):
    made = OtherNames(model)
    for block in made.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(made, mesh=mesh)


class Summed(nn.Linear):
    """A row-parallel layer."""

    def __init__(self, whole, rank, ranks, group):
        super().__init__(whole.in_features // ranks, whole.out_features)
        self.weight = nn.Parameter(whole.weight.chunk(ranks, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.clone())
        self.group = group

    def forward(self, x):
        return Reduce.apply(nn.functional.linear(x, self.weight), self.group) + self.bias


class ColumnFused(nn.Module):
    """Each rank has its heads' rows of query, key and value, one below the other."""

    def __init__(self, whole, mesh, *, faulty=False):
        super().__init__()
        rank, self.group, self.faulty = mesh.get_rank(), mesh.get_group("tp"), faulty
        each = (whole.q, whole.k, whole.v)
        weights = torch.cat([one.weight.chunk(2)[rank] for one in each])
        self.qkv = linear(weights, torch.cat([one.bias.chunk(2)[rank] for one in each]))
        self.sizes = [one.out_features // 2 for one in each]
        self.proj = Summed(whole.o, rank, 2, self.group)

    def forward(self, x):
        x = x if self.faulty else Copy.apply(x, self.group)
        q, k, v = self.qkv(x).split(self.sizes, -1)
        return self.proj(attend(q, k, v))


def tensor_parallel(model, mesh, *, faulty=False):
    return OtherNames(model, functools.partial(ColumnFused, mesh=mesh, faulty=faulty))


TRAINED = {
    "loss": lambda y: y.square().mean(), "optimizer": functools.partial(torch.optim.AdamW, lr=0.01), "steps": 2,
    "batch": lambda: torch.randn(4, WIDTH),
}  # fmt: skip


def of_parameters(names):
    """The values of parameters among these, without their layouts at the start."""
    kinds = ("gradient of ", "gradient in the step of ", "parameter after the step of ", "optimizer's exp_avg of ")
    return [name for name in names if name.startswith(kinds) and "the output" not in name]


@pytest.mark.few(2)
@pytest.mark.parametrize("groups", [HEADS, 1])
@pytest.mark.parametrize("parallelize", [fused, fused_and_sharded])
def test_a_fused_model_with_other_names_is_compared_whole(parallelize, groups):
    done = lt.compare(lambda: Model(groups), parallelize, mesh={"dp": 2}, **TRAINED)
    assert len(of_parameters(done.layouts)) == 4 * 2 * 10 and of_parameters(done.not_compared) == []
    assert {"gradient of blocks.0.qkv.weight, step 1", "gradient of layers.1.o.bias, step 1"} <= {*done.layouts}
    assert "output of layers.1, step 0" in done.layouts  # its module is called blocks.1 on the ranks
    assert any(note.startswith("by its values, on the ranks ") for note in done.notes)
    assert any("blocks.0.proj.weight is layers.0.o.weight" in note for note in done.notes)


@pytest.mark.parametrize(("groups", "blocks"), [(HEADS, "3 blocks"), (2, "3 blocks of 8:4:4")])
def test_each_rank_may_hold_its_heads_of_all_three(groups, blocks):
    done = lt.compare(lambda: Model(groups), tensor_parallel, mesh={"tp": 2}, **TRAINED)
    assert done.layouts["gradient of blocks.1.qkv.weight, step 1"] == f"S(0) in {blocks}"
    assert of_parameters(done.not_compared) == []


def test_a_fault_is_named_by_the_name_of_one_device():
    with pytest.raises(Diverged) as told:
        lt.compare(Model, functools.partial(tensor_parallel, faulty=True), mesh={"tp": 2}, **TRAINED)
    found = told.value.comparison
    assert (
        str(found.divergence.key) == "gradient of the output of layers.0.o, step 0"
    )  # called blocks.0.proj on the ranks
    assert "test_names.py" in found.calls[0] and "in forward" in found.calls[0]


def test_what_one_device_has_fused_the_ranks_may_have_apart():
    def apart(model, mesh):
        return averaged(Apart(model), mesh.get_group("dp"))

    class Apart(nn.Module):
        def __init__(self, packed):
            super().__init__()
            self.layers = nn.ModuleList(map(ApartAttention, packed.blocks))
            self.head = packed.output

        forward = Model.forward

    class ApartAttention(Attention):
        def __init__(self, packed):
            super().__init__()
            for one, weight, bias in zip(
                (self.q, self.k, self.v), packed.qkv.weight.chunk(3), packed.qkv.bias.chunk(3), strict=True
            ):
                one.weight, one.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
            self.o = packed.proj

    done = lt.compare(lambda: OtherNames(Model()), apart, mesh={"dp": 2}, **TRAINED)
    assert "gradient of blocks.0.qkv.weight, step 1" in done.layouts and of_parameters(done.not_compared) == []


def test_layers_of_equal_values_are_distinguished_by_their_names():
    def equal_layers():
        model = Model()
        model.layers[1].load_state_dict(model.layers[0].state_dict())
        for layer in model.layers:
            nn.init.zeros_(layer.o.bias)
        return model

    class TheLastFirst(OtherNames):
        def __init__(self, model):
            super().__init__(model)
            self.blocks = nn.ModuleDict({"1": self.blocks[1], "0": self.blocks[0]})

        def forward(self, x):
            for name in ("0", "1"):
                x = x + self.blocks[name](x)
            return self.output(x)

    def other_order(model, mesh):
        return averaged(TheLastFirst(model), mesh.get_group("dp"))

    done = lt.compare(equal_layers, other_order, mesh={"dp": 2}, **TRAINED)
    assert of_parameters(done.not_compared) == []
    assert "output of layers.0, step 1" in done.layouts and "gradient of layers.1.o.bias, step 1" in done.layouts

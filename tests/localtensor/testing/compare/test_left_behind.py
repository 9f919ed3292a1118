"""`lt.compare`: what a program leaves behind, as buffers, an optimizer's state, small updates, written arguments, numbers."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import localtensor as lt
from localtensor.errors import Diverged


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Counting(Mlp):
    """Counts rows, and keeps their running mean, in buffers that nothing reads."""

    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x):
        rows, total = torch.tensor(len(x)), x.sum(0)
        if self.group is not None:
            dist.all_reduce(rows, group=self.group)
            dist.all_reduce(total, group=self.group)
        self.rows += rows
        self.mean.lerp_(total / rows, 0.1)
        return super().forward(x)


def replicated(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


TRAINED = {
    "parallelize": replicated, "batch": lambda: torch.randn(8, 8), "mesh": {"dp": 2}, "loss": lambda y: y.square().mean(),
}  # fmt: skip


def on_ranks(there, alone):
    return there if dist.is_initialized() else alone


def diverged(*args, **options):
    with pytest.raises(Diverged) as caught:
        lt.compare(*args, **options)
    return caught.value.comparison


@pytest.mark.parametrize("steps", [1, 2])
def test_buffers_that_each_rank_keeps_for_itself_are_a_divergence_after_the_last_step_too(steps):
    done = diverged(Counting, optimizer=torch.optim.SGD, steps=steps, **TRAINED)
    assert str(done.divergence.key) == "buffer of mean, step 1"
    assert done.layouts["buffer of rows, step 1"] == "P(sum)"  # each rank counts its own rows


def test_buffers_of_all_rows_are_right():
    def shared(model, mesh):
        model.group = mesh.get_group("dp")
        return replicated(model, mesh)

    done = lt.compare(Counting, optimizer=torch.optim.SGD, **{**TRAINED, "parallelize": shared})
    assert done.layouts["buffer of mean, step 1"] == "R" and not done.not_compared


class ClearedAtTheEnd(torch.optim.AdamW):
    """Loses what it keeps, after a step that is right."""

    def step(self, closure=None):
        super().step(closure)
        for kept in self.state.values() if dist.is_initialized() else ():
            kept["exp_avg_sq"].zero_()


def test_the_state_of_an_optimizer_counts_without_a_step_that_would_read_it():
    done = diverged(Mlp, optimizer=ClearedAtTheEnd, **TRAINED)
    assert (done.divergence.key.kind, done.divergence.key.name) == ("optimizer's exp_avg_sq", "up.weight")


@pytest.mark.parametrize("optimizer", [
    lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=on_ranks(0.0, 0.1)),
    lambda p: torch.optim.AdamW(p, lr=1e-5, betas=(0.9, on_ranks(0.99, 0.999))),
    lambda p: torch.optim.SGD(p, lr=on_ranks(2e-6, 1e-6)),
], ids=["weight decay", "beta", "rate"])  # fmt: skip
def test_an_update_that_is_small_beside_the_parameter_is_compared_as_an_update(optimizer):
    assert "step" in str(diverged(Mlp, optimizer=optimizer, steps=3, **TRAINED).divergence.key)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_small_updates_that_are_right_pass(kind):
    done = lt.compare(Mlp, optimizer=partial(kind, lr=1e-5), steps=3, **TRAINED)
    assert done.layouts["parameter after the step of up.weight, step 2"] == "R"


def inputs():
    return torch.randn(8, 4), torch.zeros(4)


def adds(x, total):
    total += x.sum(0)
    return x * 2


def adds_twice(x, total):
    total += 2 * x.sum(0)
    return x * 2


def adds_its_rows(x, total, mesh):
    part = x.chunk(2)[mesh.get_rank()].sum(0)
    dist.all_reduce(part)
    total += part


def test_what_functions_write_to_their_arguments_is_compared():
    done = diverged(adds, adds_twice, inputs, mesh={"dp": 2})
    assert str(done.divergence.key) == "input number 1 of arguments after the call, step 0"
    assert "2 times too large" in done.divergence.what


def test_an_argument_that_only_the_ranks_write_to_is_no_divergence():
    def in_place(x, _):
        return x.mul_(2)

    done = lt.compare(lambda x, _: x * 2, in_place, inputs, mesh={"dp": 2})
    assert done.not_compared == {
        "input of arguments after the call, step 0": "arguments that the ranks write to, and one device does not"
    }


def test_functions_that_only_write_to_their_arguments_can_be_compared():
    def alone(x, total):
        total += x.sum(0)

    assert lt.compare(alone, adds_its_rows, inputs, mesh={"dp": 2}).divergence is None


@pytest.mark.parametrize(("parallel", "words"), [
    (lambda x, _: (x * 2, 0.5), "output number 1"),
    (lambda x, _: (x * 2,), "no rank has this result"),
    (lambda x, _: (x * 2, None), "no rank has this result"),
], ids=["another number", "one less", "nothing"])  # fmt: skip
def test_numbers_and_results_that_are_missing_are_compared(parallel, words):
    done = diverged(lambda x, _: (x * 2, float(x.sum())), parallel, inputs, mesh={"dp": 2})
    assert words in str(done) and done.divergence.key.leaf == 1


def test_numbers_that_are_right_pass():
    done = lt.compare(
        lambda x, _: (x * 2, float(x.sum()), 3), lambda x, _: (x * 2, float(x.sum()), 3), inputs, mesh={"dp": 2}
    )
    assert done.layouts["output number 2 of the whole model, step 0"] == "R"


class Reversed(Mlp):
    """Takes its rows in the other order, which differs for the rows of a rank, and puts them back."""

    def forward(self, x):
        return super().forward(x.flip(0)).flip(0)


def bias_after_the_sum(model, mesh):
    rank = mesh.get_rank()
    for layer, dim in ((model.up, 0), (model.down, 1)):
        layer.weight = nn.Parameter(layer.weight.detach().chunk(2, dim)[rank].clone())
    model.up.bias = nn.Parameter(model.up.bias.detach().chunk(2)[rank].clone())
    model.bias, model.down.bias = model.down.bias, None

    def forward(x):
        y = model.down(nn.functional.gelu(model.up(x)))
        dist.all_reduce(y)
        return y + model.bias

    model.forward = forward


def test_another_value_between_modules_is_no_divergence_if_all_that_comes_of_it_is_right():
    done = lt.compare(Reversed, optimizer=torch.optim.SGD, **TRAINED)
    assert "between modules" in done.not_compared["input of up, step 0"]


def test_a_bias_that_is_added_after_the_sum_is_right():
    def whole():
        return Mlp().requires_grad_(False)

    def cut(model, mesh):
        bias_after_the_sum(model, mesh)
        model.requires_grad_(False)

    done = lt.compare(whole, cut, lambda: torch.randn(8, 8), mesh={"tp": 2})
    assert "between modules" in done.not_compared["output of down, step 0"]


class Scaled(Mlp):
    """A second result that only one rank has otherwise, of no dims."""

    def forward(self, x):
        y = super().forward(x)
        size = self.up.weight.square().sum()
        return y, size * 0 if dist.is_initialized() and dist.get_rank() else size


def test_a_divergence_among_tensors_of_unlike_dims_is_reported():
    done = diverged(
        Scaled, optimizer=torch.optim.SGD, **{**TRAINED, "loss": lambda y: y[0].square().mean() + 0.01 * y[1]}
    )
    assert done.divergence.key.kind == "output" and done.divergence.key.leaf == 1

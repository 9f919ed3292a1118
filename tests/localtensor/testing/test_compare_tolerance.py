"""What other runs say of the values of a reference, and which values of ranks are kept as parts of it."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from localtensor.layout.tolerance import measured_slack, widen_slack
from localtensor.testing.compare import api, programs
from localtensor.testing.compare.divergence import Sides, first_divergence
from localtensor.testing.compare.find_layout import find_layout
from localtensor.testing.compare.watch import Key, Observation, Watch
from localtensor.testing.compare_tolerance import Noise, Repeated, Settled, Slacks, parts_of_whole

KEY, OTHER = Key(0, "output", "a"), Key(0, "output", "b")
X = torch.linspace(-1, 1, 40)


def reference(**values):
    return Watch(seen={Key(0, "output", name): Observation(x) for name, x in values.items()})


def test_slacks_are_those_of_all_runs_together():
    noisy = [X + 1e-7 * seed * torch.arange(40).remainder(3) for seed in (1, 2)]
    exact = X.double() + 1e-6
    slacks = Slacks(reference(a=X))
    for one in reversed(noisy):  # the larger first
        slacks.take(reference(a=one, c=one))
    slacks.take(reference(a=exact), double=True)
    want = widen_slack(measured_slack(X, noisy), X, exact)
    assert set(slacks.found) == {KEY} and torch.equal(slacks.found[KEY], want)


def test_of_several_values_of_a_key_the_last_counts():
    slacks = Slacks(reference(a=X))
    with slacks.of_run() as take:
        take(KEY, X + 1)
        take(KEY, X)
    assert torch.equal(slacks.found[KEY], measured_slack(X, [X]))
    again = Repeated(reference(a=X, b=X))
    again.take(KEY, X)
    assert again.other == OTHER
    again.take(OTHER, X)
    assert again.other is None
    again.take(KEY, X + 1)
    assert again.other == KEY


def test_nan_is_equal_to_nan():
    x = torch.tensor([1.0, torch.nan])
    again = Repeated(reference(a=x))
    again.take(KEY, x.clone())
    assert again.other is None


WHOLE, EXACT = torch.arange(96.0).view(12, 8), torch.zeros(())


def cut_along(x, sizes, dims, order):
    """What each rank has: axis after axis in this order cuts its dim; None is no cut."""
    held = {}
    for rank in itertools.product(*map(range, sizes)):
        part = x
        for axis in order:
            part = part if dims[axis] is None else part.tensor_split(sizes[axis], dims[axis])[rank[axis]]
        held[rank] = part
    return [held[rank] for rank in itertools.product(*map(range, sizes))]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("dims", list(itertools.product((None, 0, 1), repeat=2)))
@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2)])
def test_the_parts_of_ranks_are_views_of_the_whole(sizes, dims, order):
    views = cut_along(WHOLE, sizes, dims, order)
    held = [one.clone() for one in views]
    layout, parts = parts_of_whole(held, sizes, WHOLE, EXACT)
    assert [one.data_ptr() for one in parts] == [one.data_ptr() for one in views]
    assert all(torch.equal(one, other) for one, other in zip(parts, held, strict=True))
    assert find_layout(held, sizes, WHOLE, EXACT) in (layout, None)
    ranks = tuple(Watch(seen={KEY: Observation(one)}) for one in held)
    sides = Sides(reference(a=WHOLE), {KEY: EXACT}, ranks, dict(zip("ab", sizes, strict=True)), ())
    assert first_divergence(sides).layouts == {KEY: layout}


@pytest.mark.parametrize(
    "held",
    [
        [WHOLE[:6], WHOLE[6:] + 1],
        [WHOLE[6:], WHOLE[:6]],
        [WHOLE / 2, WHOLE / 2],
        [WHOLE, WHOLE + 1e-2],  # replicas that differ by more than rounding
        [WHOLE[:5], WHOLE[6:]],
        [WHOLE.double(), WHOLE.double()],
        [WHOLE.flatten(), WHOLE.flatten()],
    ],
)
def test_what_is_no_part_of_the_whole_is_none(held):
    assert parts_of_whole(held, [2], WHOLE, EXACT + 0.1) is None


def test_a_tolerance_of_each_element_is_cut_as_the_whole_is():
    slack = torch.zeros(12, 8)
    slack[7] = torch.inf
    held = [one.clone() for one in WHOLE.chunk(2)]
    held[1][1] += 9
    assert str(parts_of_whole(held, [2], WHOLE, slack)[0]) == "S(0)"
    held[1][2] += 9
    assert parts_of_whole(held, [2], WHOLE, slack) is None


def test_a_value_is_settled_when_all_ranks_have_it_and_again_if_it_is_replaced():
    settled = Settled(reference(a=X, b=X), {KEY: EXACT, OTHER: EXACT}, [2])
    watches = [Watch(), Watch()]
    takes = [settled.of_rank(rank) for rank in range(2)]

    def seen(rank, key, value):
        watches[rank].seen[key] = Observation(value)
        takes[rank](watches[rank], key)

    seen(0, KEY, X[:20].clone())
    assert not settled.layouts and watches[0].seen[KEY].value.data_ptr() != X.data_ptr()
    seen(1, KEY, X[20:].clone())
    assert str(settled.layouts[KEY]) == "S(0)" and watches[0].seen[KEY].value.data_ptr() == X.data_ptr()
    for rank in range(2):
        seen(rank, KEY, X + 1)
        seen(rank, OTHER, X.clone())
    assert {key: str(layout) for key, layout in settled.layouts.items()} == {OTHER: "R"}
    assert torch.equal(watches[0].seen[KEY].value, X + 1)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def two_ways(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])


def test_ranks_keep_only_what_is_not_the_reference_s():
    given = (
        Halves,
        two_ways,
        lambda: torch.randn(4, 8),
        {"dp": 2, "tp": 2},
        lambda y: y.square().mean(),
        torch.optim.AdamW,
    )
    program = programs.TrainingProgram(*given, 2, ("dp",), 0)
    few, full = (api._run_both(program, programs.start_of(program), settle=settle)[0] for settle in (True, False))
    found, wanted = first_divergence(few), first_divergence(full)
    assert found.divergence is None and found.layouts == wanted.layouts and not full.settled
    kept = {one.value.untyped_storage().data_ptr() for one in few.reference.seen.values()}
    own = [
        key
        for rank in few.ranks
        for key, one in rank.seen.items()
        if one.value.untyped_storage().data_ptr() not in kept
    ]
    assert {key.kind for key in own} == {"gradient of the output", "loss"}  # which have a factor, or are averaged


def test_noise_is_the_same_whatever_the_default_device_is():
    x = torch.linspace(0, 1, 9)
    expected = Noise(3)(x)
    with torch.device("meta"):  # a generator of the CPU does not draw there
        found = Noise(3)(x)
    assert torch.equal(found, expected)
    assert not torch.equal(found, x)

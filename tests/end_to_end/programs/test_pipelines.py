"""Pipelines on rank threads, on gloo, and on one device."""

import pytest
import torch

import localtensor as lt
from tests.device import DEVICE
from tests.end_to_end.programs.pipelines import batches, model, relay, train, train_in_columns, train_on_one_device
from tests.end_to_end.programs.three_ways import assert_same_bits, on_both, on_threads

CLOSE = {"rtol": 1e-9, "atol": 1e-11}  # float64; the order of sums differs: microbatches, kernels for other shapes


def merged(per_rank):
    """The weights of all ranks, by name; a name that several ranks have means the same on each."""
    weights = {}
    for result in per_rank:
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, weights.setdefault(name, weight), **CLOSE)
    return weights


def check_as_one_device(per_rank, steps):
    alone = train_on_one_device(steps)
    [last] = [result for result in per_rank if result["losses"]]
    torch.testing.assert_close(torch.stack(last["losses"]).mean(1), torch.stack(alone["losses"]), **CLOSE)
    torch.testing.assert_close(last["outputs"], alone["outputs"], **CLOSE)
    torch.testing.assert_close(merged(per_rank), dict(alone["weights"]), **CLOSE)


@pytest.mark.parametrize(
    ("schedule", "ranks", "blocks_per_stage"),
    [
        pytest.param("GPipe", 4, 1, marks=pytest.mark.slow),
        ("GPipe", 2, 2),
        ("1F1B", 4, 1),
        ("LoopedBFS", 2, 1),
        ("Interleaved1F1B", 2, 1),
        ("InterleavedZeroBubble", 2, 1),
    ],
)
def test_a_pipeline_trains_as_one_device_does(schedule, ranks, blocks_per_stage):
    per_rank = on_both(train, schedule, 4, blocks_per_stage, 2, ranks=ranks)
    check_as_one_device(per_rank, 2)


def test_more_microbatches_than_stages():
    check_as_one_device(on_both(train, "1F1B", 8, 2, 2, ranks=2), 2)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_pipelines_side_by_side_average_their_gradients(schedule):
    per_rank = on_both(train_in_columns, schedule, 2, 2, ranks=4)
    alone = train_on_one_device(2)
    torch.testing.assert_close(merged(per_rank), dict(alone["weights"]), **CLOSE)
    losses = torch.stack([torch.stack(result["losses"]).mean(1) for result in per_rank if result["losses"]])
    torch.testing.assert_close(losses.mean(0), torch.stack(alone["losses"]), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 4), ("Interleaved1F1B", 2)])
def test_who_runs_when_changes_nothing(schedule, ranks):
    usual = on_threads(train, schedule, 4, 1, 2, ranks=ranks)
    for seed in range(3):
        assert_same_bits(
            usual, list(lt.run(train, schedule, 4, 1, 2, ranks=ranks, schedule=lt.shuffled(seed), device=DEVICE))
        )


def test_a_mask_that_is_split_otherwise_would_be_seen():
    [(x, _, mask)] = batches(1)
    outputs = [model()(x, mask).detach() for mask in (mask, mask.roll(2, 0), mask | True)]
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def test_a_token_goes_around():
    per_rank = on_both(relay, 3, ranks=3)
    assert per_rank == [[0, 3, 6], [1, 4, 7], [3, 6, 9]]

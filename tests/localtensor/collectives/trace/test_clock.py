"""The modelled clock: what it gives by hand counts, and the bubbles of pipeline schedules by their papers' formulas."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from localtensor.collectives.trace.clock import set_clock
from localtensor.collectives.trace.recorder import Recorder
from localtensor.concurrency.schedule import round_robin
from localtensor.layout.links import Links, Network, Rates
from localtensor.threads.run import run_in_threads

FREE = Links(ranks_per_node=1024, inner=Network(0.0, 0.0))


def modelled(program, ranks, links, rates):
    recorder = Recorder(ranks, rates)
    with recorder.hooked():
        run_in_threads(program, ranks, round_robin(), 0, 300.0, observer=recorder)
    return recorder.recording, set_clock(recorder.recording, links)


def computes(flops):
    """An op of so many operations: a product of matrices."""
    torch.mm(torch.ones(1, flops // 2), torch.ones(flops // 2, 1))


RATES = Rates(flops=1e6, bytes=float("inf"), launch=0.0)
"""A microsecond an operation."""


def test_a_collective_starts_when_the_last_rank_calls_it_and_takes_its_price():
    def program(rank):
        computes(1000 * (rank + 1))  # ms
        dist.all_reduce(torch.ones(500))
        computes(100)

    links = Links(inner=Network(1e-4, 1e-6))
    recording, clock = modelled(program, 2, links, RATES)
    price = 2 * (1e-4 + 2000 / 2 * 1e-6)  # Rabenseifner's, of two ranks
    assert links.inner.seconds("all_reduce", 2, 2000) == pytest.approx(price)
    assert clock.seconds == pytest.approx(2e-3 + price + 1e-4)
    assert clock.compute == pytest.approx([1.1e-3, 2.1e-3]) and clock.waiting == pytest.approx([1e-3 + price, price])
    assert all(event.begins == pytest.approx(2e-3) for event in recording.of("call"))


def test_what_overlaps_does_not_cost():
    def program(rank):
        work = dist.all_reduce(torch.ones(500), async_op=True)
        computes(1000)
        work.wait()

    links = Links(inner=Network(1e-4, 1e-6))
    _, clock = modelled(program, 2, links, RATES)
    price = links.inner.seconds("all_reduce", 2, 2000)
    assert price > 1e-3 and clock.seconds == pytest.approx(price)
    assert clock.waiting == pytest.approx([price - 1e-3] * 2)


def test_messages_of_nodes_far_apart_take_the_outer_link():
    def program(rank):
        x = torch.ones(250)
        for to in (1, 2):
            if rank == 0:
                dist.send(x, to)
            elif rank == to:
                dist.recv(x, 0)

    links = Links(2, inner=Network(1e-3, 0.0), outer=Network(5e-3, 1e-6))
    recording, clock = modelled(program, 3, links, RATES)
    assert clock.seconds == pytest.approx(1e-3 + 5e-3 + 1000 * 1e-6)
    assert {round(event.ends - event.begins, 9) for event in recording.of("call")} == {1e-3, 6e-3}


class Stage(nn.Module):
    """A product whose backward is twice its forward: one for the input's gradient, one for the weight's."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.linear(x)


WIDTH, ROWS = 32, 8


def pipeline(make, ranks, microbatches, stages_of_rank):
    def program(rank):
        stages = [
            PipelineStage(Stage(WIDTH), rank + ranks * number, ranks * stages_of_rank, torch.device("cpu"))
            for number in range(stages_of_rank)
        ]
        single = stages_of_rank == 1 and make is not ScheduleInterleavedZeroBubble
        schedule = make(stages[0] if single else stages, microbatches, loss_fn=lambda y, t: y.sum())
        x = torch.ones(ROWS * microbatches, WIDTH, requires_grad=True)
        for _ in range(2):  # the first step of a pipeline asks for shapes
            dist.barrier()
            if rank == 0:
                schedule.step(x)
            elif rank == ranks - 1:
                schedule.step(target=x)
            else:
                schedule.step()

    return program


def bubble(make, ranks, microbatches, stages_of_rank=1):
    """The share of the second step in which ranks are idle."""
    recording, clock = modelled(pipeline(make, ranks, microbatches, stages_of_rank), ranks, FREE, RATES)
    last = max(event.exchange for event in recording.of("call") if event.name == "barrier")
    start = max(event.begins for event in recording.of("call") if event.exchange == last)
    before = sum(event.busy_start for event in recording.of("call") if event.exchange == last)
    return 1 - (sum(clock.compute) - before) / (ranks * (clock.seconds - start))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8)])
@pytest.mark.parametrize("make", [ScheduleGPipe, Schedule1F1B])
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_the_papers(make, ranks, microbatches):
    formula = (ranks - 1) / (microbatches + ranks - 1)
    assert bubble(make, ranks, microbatches) == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize(("ranks", "microbatches", "stages"), [(2, 4, 2), (4, 8, 2)])
def test_the_bubble_of_interleaved_1f1b_is_that_of_the_paper(ranks, microbatches, stages):
    formula = (ranks - 1) / (stages * microbatches + ranks - 1)
    assert bubble(ScheduleInterleaved1F1B, ranks, microbatches, stages) == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize(("ranks", "microbatches", "stages"), [(4, 8, 1), (2, 4, 2), (4, 8, 2)])
def test_the_bubble_of_zero_bubble_schedules_is_that_of_the_paper(ranks, microbatches, stages):
    """ZB-H1's is (p - 1) (F + B - W), where forward, the input's gradient and the weight's take one unit each."""
    formula = (ranks - 1) / (3 * stages * microbatches + ranks - 1)
    assert bubble(ScheduleInterleavedZeroBubble, ranks, microbatches, stages) == pytest.approx(formula, rel=0.02)


def test_a_slower_stage_makes_a_larger_bubble():
    """The clock is no formula: what a rank computes more is in it."""

    def uneven(rank):
        pipeline(Schedule1F1B, 2, 4, 1)(rank)
        computes(1_000_000 * (1 - rank))

    _, even = modelled(pipeline(Schedule1F1B, 2, 4, 1), 2, FREE, RATES)
    _, clock = modelled(uneven, 2, FREE, RATES)
    assert clock.seconds == pytest.approx(even.seconds + 1) and clock.idle_share > even.idle_share

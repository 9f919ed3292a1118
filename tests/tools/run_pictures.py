"""Four programs on eight ranks, and the time line of each as a picture of docs/trace.md: `make pictures` draws them."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import localtensor as lt
from localtensor.collectives.trace.clock import Modelled, set_clock
from localtensor.collectives.trace.events import Recording
from localtensor.layout.links import Links, Network
from localtensor.runner.trace.page import page_of

RANKS, WIDTH, ROWS, EXPERTS = 8, 256, 64, 8
LINKS = Links(8, inner=Network(3e-6, 1 / 300e9))


class Feed(nn.Module):
    """Two linear layers with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def fsdp_and_tp() -> None:
    """A training step of four blocks, sharded over dp by FSDP2 and over tp by DTensor."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*[Feed() for _ in range(4)])
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(ROWS, WIDTH)).square().mean().backward()
    optimizer.step()


def pipeline() -> None:
    """Steps of 1F1B with eight stages and sixteen micro-batches."""
    rank = dist.get_rank()
    schedule = Schedule1F1B(PipelineStage(Feed(), rank, RANKS, torch.device("cpu")), 16, loss_fn=lambda y, t: y.sum())
    x = torch.ones(16 * ROWS, WIDTH)
    arguments: dict[str, Tensor] = {"target": x} if rank == RANKS - 1 else {}
    for _ in range(2):  # in the first step the stages ask for shapes: the picture has the second
        schedule.step(*([x] if rank == 0 else []), **arguments)


class Attention(nn.Module):
    """The scores of a rank's queries for some keys, and what they take of the values."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.exp(query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1]))
        return scores @ values, scores.sum(-1, keepdim=True)


def ring_attention() -> None:
    """Attention over a sequence that is cut into eight: keys and values go round while the scores are computed."""
    rank, heads = dist.get_rank(), 8
    torch.manual_seed(rank)
    query, keys, values = (torch.randn(heads, 4 * ROWS, WIDTH // heads) for _ in range(3))
    total, weight = torch.zeros_like(query), torch.zeros(heads, 4 * ROWS, 1)
    attention = Attention()
    for step in range(RANKS):
        works: list[dist.Work] = []
        after = [torch.empty_like(keys), torch.empty_like(values)]
        if step < RANKS - 1:
            ops = [dist.P2POp(dist.isend, x, (rank + 1) % RANKS) for x in (keys, values)]
            ops += [dist.P2POp(dist.irecv, x, (rank - 1) % RANKS) for x in after]
            works = dist.batch_isend_irecv(ops)
        more, sums = attention(query, keys, values)
        total, weight = total + more, weight + sums
        for work in works:
            work.wait()
        keys, values = after
    total / weight  # the result


class Experts(nn.Module):
    """One expert a rank: rows go to the expert that the gate chooses by an all-to-all, and come back by another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(WIDTH, EXPERTS), Feed()

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1).sort()
        sent = torch.bincount(chosen.values, minlength=EXPERTS)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        there, here = sent.tolist(), got.tolist()
        mine = funcol.all_to_all_single_autograd(x[chosen.indices].contiguous(), here, there, dist.group.WORLD)
        back = funcol.all_to_all_single_autograd(self.expert(mine).contiguous(), there, here, dist.group.WORLD)
        return torch.empty_like(x).index_copy(0, chosen.indices, back)


def mixture_of_experts() -> None:
    """Two layers of experts, forward and backward: ranks whose expert gets more rows let the others wait."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(Experts(), Experts())
    model(torch.randn(16 * ROWS, WIDTH)).square().mean().backward()


PROGRAMS: dict[str, Callable[[], None]] = {
    "trace_fsdp_tp": fsdp_and_tp, "trace_pipeline": pipeline, "trace_ring": ring_attention, "trace_experts": mixture_of_experts,
}  # fmt: skip


def recorded(program: Callable[[], None]) -> tuple[Recording, Modelled]:
    """The recording of a program, on the clock of one node."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran = lt.run(program, ranks=RANKS, trace=True)
    assert ran.recording is not None
    return ran.recording, set_clock(ran.recording, LINKS)


def photograph_runs(folder: Path) -> None:
    """Writes the pictures."""
    from playwright.sync_api import sync_playwright

    from tests.end_to_end.browser.conftest import CHROMIUM, FLAGS

    if CHROMIUM is None:
        raise SystemExit("there is no Chromium on this machine: apt-get install chromium")
    with tempfile.TemporaryDirectory() as pages, sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, program in PROGRAMS.items():
            file = Path(pages) / f"{name}.html"
            file.write_text(page_of(*recorded(program)), encoding="utf-8")
            page = chromium.new_page(viewport={"width": 1180, "height": 1400}, color_scheme="light")
            page.goto(file.as_uri())
            for button in ("in", "right") if program is pipeline else ():
                page.click(f"button[data-zoom={button}]")
            page.evaluate("document.querySelector('section[aria-labelledby=line] .controls').remove()")
            page.locator("section[aria-labelledby=line]").screenshot(path=folder / f"{name}.png")
            page.close()
        chromium.close()

"""What a comparison costs: processor time and memory beside those of the two plain programs, each in a process of its own.

    python -m tests.tools.compare.cost [--width 256] [--layers 4] [--ranks 8] [--steps 3]

The program is a transformer with FSDP2 over the data axis and parallelize_module over the other, trained with AdamW.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import localtensor as lt

VOCAB, LENGTH, ROWS = 128, 32, 8
PLAIN, COMPARED, IMPORTED = "plain", "compared", "imported"


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parallelize(model: Transformer, mesh: Any) -> nn.Module:
    plan: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {name: RowwiseParallel() for name in ("o", "down")}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def loss(logits: Tensor) -> Tensor:
    return logits.float().logsumexp(-1).mean()


def batch() -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH))


def train(model: nn.Module, batches: list[Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in batches:
        loss(model(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain(build: Any, mesh: dict[str, int], steps: int) -> None:
    """The program on one device, and on the ranks."""
    train(build(), [batch() for _ in range(steps)])

    def rank() -> None:
        from torch.distributed.device_mesh import init_device_mesh

        made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        parts = [batch().chunk(mesh["dp"])[made.get_local_rank("dp")] for _ in range(steps)]
        train(parallelize(build(), made), parts)

    lt.run(rank, ranks=mesh["dp"] * mesh["tp"], leftovers="ignore")


def measure(what: str, asked: argparse.Namespace) -> dict[str, float]:
    """Seconds of the processor and of the clock, and MiB of the process at its largest."""
    build = partial(Transformer, asked.width, asked.layers)
    mesh = {"dp": 2, "tp": asked.ranks // 2}
    started, used = time.perf_counter(), time.process_time()
    if what == PLAIN:
        plain(build, mesh, asked.steps)
    elif what == COMPARED:
        done = lt.compare(
            build, parallelize, batch, mesh=mesh, loss=loss, optimizer=torch.optim.AdamW, steps=asked.steps
        )
        print(f"{len(done.layouts)} values equal, {len(done.not_compared)} not compared", file=sys.stderr)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"processor": time.process_time() - used, "clock": time.perf_counter() - started, "memory": peak}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.compare.cost", description=__doc__)
    for name, value in (("width", 256), ("layers", 4), ("ranks", 8), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", choices=(PLAIN, COMPARED, IMPORTED), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.only:
        print(json.dumps(measure(asked.only, asked)))
        return 0
    found = {}
    for what in (IMPORTED, PLAIN, COMPARED):
        command = [sys.executable, "-m", "tests.tools.compare.cost", "--only", what]
        command += [f"--{name}={getattr(asked, name)}" for name in ("width", "layers", "ranks", "steps")]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[what] = json.loads(done.stdout.splitlines()[-1])
        print(f"{what:9} {found[what]['processor']:6.1f} s of the processor, {found[what]['clock']:6.1f} s, "
              f"{found[what]['memory']:6.0f} MiB", flush=True)  # fmt: skip
    both, compared = found[PLAIN], found[COMPARED]
    print(f"a comparison takes {compared['processor'] / both['processor']:.1f} times the processor time of both programs, "
          f"and {compared['memory'] / both['memory']:.1f} times their memory")  # fmt: skip
    return 0 if compared["processor"] <= 3 * both["processor"] and compared["memory"] <= 2 * both["memory"] else 1


if __name__ == "__main__":
    sys.exit(main())

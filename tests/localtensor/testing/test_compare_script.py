"""The torchrun script of a divergence: what is written, and that it shows the difference until the program is repaired."""

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import localtensor as lt
from localtensor.errors import Diverged
from localtensor.testing.compare_script import NoScript, _Writer
from tests.tools import warm

PROGRAM = """
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())

def split(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Partial())})

def compare(script):
    import localtensor as lt
    rows = 4
    lt.compare(Mlp, split, lambda: torch.randn(rows, 8), mesh={"tp": 2}, loss=lambda y: y.square().mean(), script=script)

if __name__ == "__main__":
    compare("differs.py")
"""


def run(folder, *command):
    done = warm.run(command, cwd=folder)
    return done.returncode, done.stdout.replace("[rank 0] ", ""), done.stderr


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "differs.py")
THREADS = (sys.executable, "-m", "localtensor", "run", "-n", "2", "differs.py")


@pytest.mark.parametrize(
    "command", [THREADS, pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["threads", "torchrun"]
)
def test_the_script_shows_the_difference_until_the_program_is_repaired(command, tmp_path):
    (tmp_path / "split_mlp.py").write_text(PROGRAM)
    code, _, error = run(tmp_path, sys.executable, "split_mlp.py")
    assert code == 1
    assert "run it: torchrun --nproc-per-node 2 differs.py" in error
    assert "localtensor" not in (tmp_path / "differs.py").read_text()
    code, said, _ = run(tmp_path, *command)
    assert code == 1
    assert said.splitlines()[0] == "output of down, step 0"
    assert "differs: assembles as {'tp': 'P(sum)'}" in said
    (tmp_path / "split_mlp.py").write_text(PROGRAM.replace("output_layouts=Partial()", "output_layouts=Replicate()"))
    code, said, error = run(tmp_path, *command)
    assert (code, said.splitlines()[-1]) == (0, "equal: assembles as {'tp': 'R'}"), error


def summed(model, mesh):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))


def test_the_smallest_program_is_written(tmp_path):
    with pytest.raises(Diverged) as told:
        lt.compare(
            partial(nn.Linear, 4, 1), summed, lambda: torch.randn(8, 4), mesh={"dp": 2}, steps=2, shrink=True,
            loss=lambda y: y.square().mean(), optimizer=torch.optim.SGD, script=tmp_path / "differs.py",
        )  # fmt: skip
    assert told.value.comparison.notes[-1] == f"run it: torchrun --nproc-per-node 2 {tmp_path / 'differs.py'}"
    text = (tmp_path / "differs.py").read_text()
    assert "STEPS, SEED, BOUND = 1, 0" in text
    assert "build = partial(module_0.Linear, 4, 1)" in text
    assert "batch = partial(narrowed, partial(narrowed, function_0, 0, 8, 4), 0, 4, 2)" in text
    assert f"parallelize = module_1.{summed.__name__}" in text


def test_a_function_that_no_text_makes_again_is_named(tmp_path):
    held = torch.ones(4)
    with pytest.raises(Diverged) as told:
        lt.compare_functions(
            lambda x: x + held, lambda x: x, lambda: (torch.ones(4),), mesh={"dp": 2}, script=tmp_path / "differs.py"
        )
    assert (
        "no script was written: tensor([1., 1., 1., 1.]) is a value, and a script needs"
        in told.value.comparison.notes[-1]
    )
    assert not (tmp_path / "differs.py").exists()


def rebuilt(value):
    writer = _Writer()
    text = writer.expression(value)
    scope = {}
    exec("import importlib, sys\nfrom functools import partial\n" + "\n".join(writer.lines), scope)
    return eval(text, scope)


def test_functions_are_imported_or_copied_with_what_they_close_over():
    width, twice = 3, (lambda x: 2 * x, lambda x: x + width)

    def inner(x, more=1):
        return twice[1](x) * width + more

    def scaled(x, more=1):
        return x * width + more

    assert rebuilt(nn.Linear) is nn.Linear
    assert rebuilt(partial(nn.Linear, 2, bias=False))(1).bias is None
    assert [rebuilt(one)(5) for one in (*twice, scaled)] == [10, 8, 16]
    with pytest.raises(NoScript, match="has no text"):
        rebuilt(inner)  # closes over functions in a tuple
    with pytest.raises(NoScript, match="2 functions of line"):
        rebuilt([lambda x: x, lambda x: x][0])


STAGES = """
import copy
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(8, 8) for i in range(4)})

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x

class Other(Layers):
    def forward(self, x):
        return super().forward(x) * FACTOR

FACTOR = 1.5

def loss(y, target=None):
    return y.square().mean()

def stages(model, mesh):
    rank, part = mesh.get_rank(), copy.deepcopy(model)
    part.__class__ = Other if rank else Layers
    for name in list(part.layers):
        if int(name) // 2 != rank:
            del part.layers[name]
    return Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu"), group=mesh.get_group("pp")), 4, loss_fn=loss)

def batch():
    return torch.randn(8, 8)

if __name__ == "__main__":
    import localtensor as lt
    lt.compare(Layers, stages, batch, mesh={"pp": 2}, loss=loss, optimizer=torch.optim.SGD, script="differs.py")
"""

RENAMED = """
import torch
import torch.distributed as dist
from torch import nn

class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x):
        return self.q(x) * self.k(x) + self.v(x)

FACTOR = 1.5

class Fused(nn.Module):
    def __init__(self, model, mesh):
        super().__init__()
        rank, whole = mesh.get_rank(), [one.weight.detach() for one in (model.q, model.k, model.v)]
        self.qkv = nn.Parameter(torch.cat([x.chunk(2)[rank] for x in whole]))
        self.qkv.register_hook(lambda grad: grad * FACTOR)

    def forward(self, x):
        q, k, v = (x @ self.qkv.T).chunk(3, -1)
        return q * k + v

def fused(model, mesh):
    return Fused(model, mesh)

def loss(y):
    return y.square().sum()

def batch():
    return torch.randn(8, 4)

if __name__ == "__main__":
    import localtensor as lt
    lt.compare(Alone, fused, batch, mesh={"tp": 2}, loss=loss, optimizer=torch.optim.SGD, script="differs.py")
"""


@pytest.mark.parametrize(
    ("program", "first"),
    [(STAGES, "output of the whole model, step 0"), (RENAMED, "gradient of qkv, step 0")],
    ids=["pipeline", "fused"],
)
@pytest.mark.parametrize(
    "command", [THREADS, pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["threads", "torchrun"]
)
def test_a_pipeline_and_fused_parameters_have_a_script(program, first, command, tmp_path):
    (tmp_path / "program.py").write_text(program)
    code, _, error = run(tmp_path, sys.executable, "program.py")
    assert code == 1 and "run it: torchrun --nproc-per-node 2 differs.py" in error
    assert first in error
    code, said, error = run(tmp_path, *command)
    assert (code, said.splitlines()[0]) == (1, first), error
    (tmp_path / "program.py").write_text(program.replace("FACTOR = 1.5", "FACTOR = 1.0"))
    code, said, error = run(tmp_path, *command)
    assert code == 0 and said.splitlines()[-1].startswith("equal: assembles as"), said + error

"""The command on scripts of a user: its exit codes, what it prints, and the file that it writes."""

import json

import pytest
from typer.testing import CliRunner

from strategies.cli import app as cli

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn

class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad

class Block(nn.Module):
    def __init__(self, rank, ranks):
        super().__init__()
        up, down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
        rows = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        self.up, self.down = nn.Linear(4, 8 // ranks, bias=False), nn.Linear(8 // ranks, 4, bias=False)
        self.up.weight.data.copy_(up.weight[rows])
        self.down.weight.data.copy_(down.weight[:, rows])

    def forward(self, x):
        y = self.down(self.up(Half.apply(x)).relu())
        if "forgotten" not in sys.argv:
            y = y.clone()
            dist.all_reduce(y)
        return y

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Block(dist.get_rank(), dist.get_world_size())
torch.manual_seed(1)
x = torch.randn(6, 4)
with torch.no_grad():
    model(x)
"""


@pytest.fixture
def compare(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "empty.py").write_text("print('no model')\n")
    (tmp_path / "dies.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(cli.app, ["compare", "-q", *words])


def test_an_equal_script_is_0_and_says_how_much_was_compared(compare):
    done = compare("train.py", "-n", "2")
    assert done.exit_code == 0, done.output
    assert "computes what train.py -n 1 computes" in done.stdout and "compared" in done.stdout


def test_a_forgotten_all_reduce_is_1_and_named(compare, tmp_path):
    done = compare("train.py", "-n", "2", "--json", "out.json", "--html", "out.html", "--", "forgotten")
    assert done.exit_code == 1, done.output
    assert "P(sum)" in done.stdout and "all_reduce" in done.stdout and "train.py:" in done.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["divergence"]["layout"] == "P(sum)"
    assert "differs from train.py -n 1" in (tmp_path / "out.html").read_text()
    assert "localtensor compare: the page is in out.html.\n" in done.output


@pytest.mark.parametrize(("words", "said"), [
    (["train.py"], "-n: 1: the script would be compared with itself. Pass -n 2"),
    (["train.py", "-n", "2", "--reference", "train.py -n 2"], "-n: 2: the script would be compared with itself"),
    (["nowhere.py", "-n", "2"], "nowhere.py: there is no such file"),
    (["train.py", "-n", "2", "--reference", "'"], "--reference"),
    (["train.py", "-n", "2", "--reference", "nowhere.py"], "--reference: nowhere.py: there is no such file"),
    (["train.py", "-n", "2", "--reference", "train.py -n 0"], "--reference: ranks=0: a group has at least one rank"),
    (["train.py", "-n", "2", "--mesh", "dp=3"], "mesh"),
    (["train.py", "-n", "2", "--on", "mpi"], "on='mpi': there is no such way to run"),
])  # fmt: skip
def test_a_usage_error_is_2_and_one_sentence(compare, words, said):
    done = compare(*words)
    assert done.exit_code == 2 and said in done.stderr, done.output
    assert done.stderr.startswith("localtensor compare: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["empty.py", "dies.py"])
def test_nothing_compared_is_3(compare, script):
    done = compare(script, "-n", "2")
    assert done.exit_code == 3 and done.stderr.startswith("localtensor compare: ") and not done.stdout, done.output

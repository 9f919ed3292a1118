"""`localtensor compare`: two scripts, the parallel one right or wrong in one line; and scripts that cannot be compared."""

import json
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn

import localtensor as lt
from localtensor.errors import NotComparable
from localtensor.runner.torchrun import TorchrunOptions
from localtensor.testing.compare.divergence import Sides
from localtensor.testing.compare.script_watch import ScriptWatch
from localtensor.testing.compare.scripts import _batch_axes, compare_scripts
from localtensor.testing.compare.watch import Key, Observation, Watch

TENSOR_PARALLEL = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Linear(nn.Module):
    def __init__(self, rows, columns, dim):
        super().__init__()
        whole, self.dim = torch.randn(rows, columns), dim
        self.weight = nn.Parameter(whole.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())

    def forward(self, x):
        if self.dim == 0:
            return F.linear(x if "no_grad_sum" in sys.argv else SumGradient.apply(x), self.weight)
        y = F.linear(x, self.weight)
        return y if "no_sum" in sys.argv else Sum.apply(y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), Linear(16, 8, 0), Linear(8, 16, 1)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = Block()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
criterion = nn.MSELoss()
for step in range(2):
    x = torch.randn(4, 8)
    criterion(model(x), torch.zeros(4, 8)).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""

DATA_PARALLEL = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cpu", (int(sys.argv[1]),), mesh_dim_names=("dp",))
rank, size = mesh.get_rank(), mesh.size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
if "plain" not in sys.argv:
    model = DistributedDataParallel(model, process_group=mesh.get_group())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    batch = torch.randn(8, 4)
    rows = batch.chunk(size)[rank]
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path):
    def made(text, *arguments, ranks=1, name="train.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return TorchrunOptions(str(path), tuple(map(str, arguments)), ranks)

    return made


ZERO_BUT_FOR_ROUNDING = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
if mesh.size() > 1:
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
data = torch.Generator().manual_seed(1)
for step in range(3):
    x, _ = torch.randn(2, 4, 8, generator=data)  # numbers with which some elements do not jump
    optimizer.zero_grad()
    model(x).softmax(-1).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_gradients_that_are_zero_but_for_rounding_are_not_compared(script):
    done = compare_scripts(script(ZERO_BUT_FOR_ROUNDING), script(ZERO_BUT_FOR_ROUNDING, ranks=2))
    assert done.divergence is None and len(done.layouts) > len(done.not_compared) > 0, str(done)


def test_a_tensor_parallel_script_is_equal_to_one_rank(script):
    done = compare_scripts(script(TENSOR_PARALLEL), script(TENSOR_PARALLEL, ranks=2))
    assert done.divergence is None and done.mesh == {"ranks": 2} and not done.not_compared
    assert (
        done.layouts["output of up, step 1"] == "S(1)"
        and done.layouts["parameter after the step of up.weight, step 1"] == "S(0)"
    )
    assert done.layouts["the loss, step 0"] == done.layouts["output of MSELoss, step 0"] == "R"


RENAMED = TENSOR_PARALLEL.replace("self.up", "self.wide").replace("self.down", "self.narrow")


def test_a_script_may_call_its_parameters_otherwise(script):
    done = compare_scripts(script(TENSOR_PARALLEL), script(RENAMED, ranks=2, name="renamed.py"))
    assert done.divergence is None and not done.not_compared
    assert done.layouts["output of up, step 1"] == "S(1)"
    assert done.layouts["gradient of down.weight, step 0"] == "S(1)"
    assert "by its values, on the ranks wide.weight is up.weight, narrow.weight is down.weight" in done.notes
    found = compare_scripts(script(TENSOR_PARALLEL), script(RENAMED, "no_sum", ranks=2, name="renamed.py")).divergence
    assert found.key == Key(0, "output", "down") and "all_reduce over ranks is missing" in found.what


def test_a_missing_all_reduce_is_named_with_its_line(script):
    done = compare_scripts(script(TENSOR_PARALLEL), script(TENSOR_PARALLEL, "no_sum", ranks=2))
    found = done.divergence
    assert (
        found.key == Key(0, "output", "down")
        and found.layout == "P(sum)"
        and "all_reduce over ranks is missing" in found.what
    )
    assert found.place is not None and found.place.file.endswith("train.py") and "train.py -n 1" in str(done)
    assert done.calls and done.calls[0].startswith("mm, train.py:")  # of the parallel script, run once more
    written = json.loads(json.dumps(done.as_json()))
    assert not written["equal"] and written["divergence"]["name"] == "down" and "one device" not in json.dumps(written)


def test_a_missing_reduction_of_a_gradient_is_named_by_its_parameter(script):
    done = compare_scripts(script(TENSOR_PARALLEL), script(TENSOR_PARALLEL, "no_grad_sum", ranks=2))
    assert done.divergence is not None and "norm" in done.divergence.key.name and "missing" in done.divergence.what


def test_two_configurations_compare_what_the_reference_holds_whole(script):
    done = compare_scripts(script(TENSOR_PARALLEL, ranks=2), script(TENSOR_PARALLEL, ranks=4))
    assert done.divergence is None and done.layouts["output of the whole model, step 1"] == "R"
    assert done.not_compared["output of up, step 0"] == "values that the ranks of the reference hold in parts"
    wrong = compare_scripts(script(TENSOR_PARALLEL, ranks=2), script(TENSOR_PARALLEL, "no_sum", ranks=4))
    assert wrong.divergence is not None


def test_a_data_parallel_script_has_its_rows_by_the_first_argument(script):
    done = compare_scripts(script(DATA_PARALLEL, 1), script(DATA_PARALLEL, 2, ranks=2))
    assert (
        done.divergence is None
        and done.mesh == {"ranks": 2}
        and done.layouts["input of the whole model, step 0"] == "S(0)"
    )
    wrong = compare_scripts(script(DATA_PARALLEL, 1), script(DATA_PARALLEL, 2, "plain", ranks=2))
    assert (
        wrong.divergence.key.kind == "gradient"
        and "all_reduce of the gradient over ranks is missing" in wrong.divergence.what
    )


ACCUMULATED = """
import sys
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model = fully_shard(model) if "fsdp" in sys.argv else DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    turns = 1 if "once" in sys.argv else 2
    for turn, rows in enumerate(torch.randn(8, 4).chunk(turns)):
        last = turn == turns - 1 and "never" not in sys.argv
        if "fsdp" in sys.argv:
            model.set_requires_gradient_sync(last)
        with model.no_sync() if "fsdp" not in sys.argv and not last else nullcontext():
            (model(rows.chunk(size)[rank]).square().mean() / turns).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_that_are_accumulated_without_communication_are_right(script, kind):
    done = compare_scripts(script(ACCUMULATED, kind), script(ACCUMULATED, kind, ranks=2))
    assert done.divergence is None and done.layouts["gradient in the step of 0.weight, step 1"] == (
        "S(0)" if kind == "fsdp" else "R"
    )


def test_losses_of_another_number_of_backward_passes_are_not_compared(script):
    done = compare_scripts(script(ACCUMULATED, "ddp", "once"), script(ACCUMULATED, "ddp", ranks=2))
    assert done.divergence is None and done.layouts["gradient in the step of 0.weight, step 1"] == "R"
    assert "several backward passes in a step" in done.not_compared["the loss, step 0"]


def test_replicas_that_part_in_a_step_are_a_divergence_and_do_not_end_the_script(script):
    text = DATA_PARALLEL.replace("lr=0.1", "lr=0.1 * (1 + rank)")
    found = compare_scripts(script(text, 1), script(text, 2, ranks=2)).divergence
    assert str(found.key).startswith("parameter after the step of 0.weight")
    assert found.what == "replicas along ranks differ: right at 0, wrong at 1"


def test_gradients_that_are_never_reduced_are_reported(script):
    done = compare_scripts(script(ACCUMULATED, "ddp"), script(ACCUMULATED, "ddp", "never", ranks=2))
    assert done.divergence is not None and "all_reduce of the gradient over ranks is missing" in done.divergence.what


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import os, torch\ntorch.nn.Linear(2, 2)(torch.tensor([[1.0, int.from_bytes(os.urandom(3), 'big')]]))", "two runs from one seed"),
        ("import torch\nprint(torch.ones(2))", "no value of one has its counterpart in the other"),
        ("import torch, sys\nm = torch.nn.Linear(2, 2)\nm(torch.ones(2))\nif int(__import__('os').environ['WORLD_SIZE']) > 1: raise ValueError('lost')", "ValueError: lost"),
        ("import argparse\nargparse.ArgumentParser('train.py').parse_args(['--size'])", "error: unrecognized arguments: --size"),
        ("import torch, sys\nm = torch.nn.Linear(2, 2)\nm(torch.ones(2))\nprint('some words', file=sys.stderr)\nraise ValueError('lost')", "rank 0: ValueError: lost at train.py:5"),
        ("import os, torch\nm = (torch.nn.Linear if os.environ['WORLD_SIZE'] == '1' else torch.nn.ReLU)(*[2, 2][: 2 * (os.environ['WORLD_SIZE'] == '1')])\nif os.environ['WORLD_SIZE'] == '1': m(torch.ones(2))", "no value of one has its counterpart in the other"),
    ],
    ids=["not deterministic", "no modules", "a rank dies", "a usage error", "a rank prints and dies", "no counterpart"],
)  # fmt: skip
def test_what_cannot_be_compared_is_said_in_one_sentence(script, text, problem):
    with pytest.raises(NotComparable, match=problem) as refused:
        compare_scripts(script(text), script(text, ranks=2))
    assert "\n" not in str(refused.value)


ROWS = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.places, self.head = nn.Embedding(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(x + self.places(torch.arange(4).expand(len(x), 4)))


model = Model()
if "nan" in sys.argv:
    model.head.weight.data[0, 0] = torch.nan
model = DistributedDataParallel(model)
batch = torch.randn(16 if "larger" in sys.argv and ranks == 4 else 8, 4, 8)
if "dies" in sys.argv and rank == 1:
    raise ValueError("lost")
model(batch.chunk(ranks)[rank]).square().mean().backward()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("values", ["", "nan"])
def test_rows_that_are_equal_on_the_ranks_of_a_reference_are_no_whole(script, values):
    done = compare_scripts(script(ROWS, values, ranks=2), script(ROWS, values, ranks=4))
    assert done.divergence is None
    assert "parts" in done.not_compared["output of places, step 0"] and len(done.layouts) >= 4
    assert any("NaN or infinity in both" in note for note in done.notes) == bool(values)


def test_batches_of_two_configurations_that_have_other_sizes_are_noted(script):
    done = compare_scripts(script(ROWS, "larger", ranks=2), script(ROWS, "larger", ranks=4))
    said = "the batches have different sizes: 16 different rows on the ranks, and 8 on train.py -n 2"
    assert done.divergence is not None and any(note.startswith(said[:-14]) for note in done.notes)
    assert not any("sizes" in note for note in compare_scripts(script(ROWS, ranks=2), script(ROWS, ranks=4)).notes)


def test_a_rank_thread_that_dies_is_one_sentence(script):
    with pytest.raises(NotComparable) as refused:
        compare_scripts(script(ROWS), script(ROWS, "dies", ranks=2))
    said = str(refused.value)
    assert "-n 2: rank 1: ValueError: lost at train.py:28 in <module>: so there is nothing to compare with." in said
    assert "\n" not in said and "RankRaised" not in said


def test_real_processes_give_the_report_of_rank_threads(script):
    both = script(TENSOR_PARALLEL), script(TENSOR_PARALLEL, "no_sum", ranks=2)
    threads, gloo = (compare_scripts(*(replace(one, on=on) for one in both)) for on in ("threads", "gloo"))
    assert gloo.divergence.layout == "P(sum)" and any("all_reduce sum over ranks" in line for line in gloo.collectives)
    first, second = (one.as_json() for one in (gloo, threads))
    for said in (first, second):  # in one run of the whole suite something in these two differed; not found again
        said.pop("text"), said.pop("divergence")
    assert first == second
    key, what = gloo.divergence.key, gloo.divergence.what
    assert (key, what) == (threads.divergence.key, threads.divergence.what)


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        ("os.kill(os.getpid(), 9)", "rank 1 on gloo: its process ended by signal SIGKILL: "),
        ("raise ValueError('lost')", "rank 1 on gloo: ValueError: lost, at train.py:6 in <module>: "),
        ("raise SystemExit(3)", "rank 1 on gloo: it left with exit code 3: "),
    ],
    ids=["killed", "raises", "leaves"],
)
def test_a_real_rank_that_dies_is_one_sentence(script, last, problem):
    text = f"""
    import os, torch
    torch.manual_seed(0)
    torch.nn.Linear(2, 2)(torch.ones(2))
    if os.environ["RANK"] == "1":
        {last}
    """
    with pytest.raises(NotComparable) as refused:
        compare_scripts(replace(script(text), on="gloo"), replace(script(text, ranks=2), on="gloo"))
    assert problem in str(refused.value) and "\n" not in str(refused.value)
    assert "localtensor run --on gloo -n 2 " in str(refused.value)


def test_nothing_but_nan_in_both_is_no_pass(script):
    text = "import torch\ntorch.manual_seed(0)\ntorch.nn.Linear(2, 2)(torch.full((2,), torch.nan))"
    with pytest.raises(NotComparable, match="nothing but NaN or infinity in both"):
        compare_scripts(script(text), script(text, ranks=2))


def test_other_batches_are_noted(script):
    text = """
    import os, torch
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    torch.manual_seed(int(os.environ["WORLD_SIZE"]))
    model(torch.randn(4, 2))
    """
    done = compare_scripts(script(text), script(text, ranks=2))
    assert done.divergence.key.kind == "input" and any("global batches differ" in note for note in done.notes)


@pytest.mark.parametrize(
    ("held", "axes"), [(lambda x: x.chunk(2), ("ranks",)), (lambda x: x.chunk(2, 1), ()), (lambda x: [x, x], ())]
)
def test_the_axes_of_the_batch_are_those_that_cut_the_rows_of_the_first_argument(held, axes):
    x, key = torch.randn(4, 6), Key(0, "input", "")
    ranks = tuple(Watch(seen={key: Observation(one)}) for one in held(x))
    assert _batch_axes(Sides(Watch(seen={key: Observation(x)}), {}, ranks, {"ranks": 2}, ())) == axes


def test_the_groups_of_a_rank_are_where_we_look():
    def groups():
        seen = ScriptWatch(Watch())
        from torch.distributed.device_mesh import init_device_mesh

        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with seen.hooks():
            nn.Linear(1, 1)(torch.ones(1))
        return {ranks: name for ranks, name in seen.groups.items() if name.startswith("mesh_")}

    assert lt.run(groups, ranks=4, leftovers="ignore").values[0] == {(0, 1): "mesh_tp", (0, 2): "mesh_dp"}


TWO_WAYS = """
import os, sys
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ranks = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cpu", (max(ranks // 2, 1), min(ranks, 2)), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
if "slice" not in sys.argv:
    fully_shard(model, mesh=mesh["dp"])
rows = torch.randn(8, 4).chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
(model(rows).square().mean() * (3 if "scaled" in sys.argv and ranks == 4 else 1)).backward()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reference_on_a_mesh_of_two_axes_is_put_together(script, ranks):
    done = compare_scripts(script(TWO_WAYS, ranks=ranks), script(TWO_WAYS, ranks=4))
    assert done.divergence is None and not {
        one for one in done.not_compared if one.startswith(("gradient of 0.weight", "parameter"))
    }
    found = compare_scripts(script(TWO_WAYS, "scaled", ranks=ranks), script(TWO_WAYS, "scaled", ranks=4)).divergence
    assert found is not None


def test_a_reference_with_tensors_on_a_slice_of_its_mesh_is_no_false_alarm(script):
    with pytest.raises(NotComparable, match=r"hold in parts.* Take a reference of one rank"):
        compare_scripts(script(TWO_WAYS, "slice", ranks=4), script(TWO_WAYS, "slice", ranks=2))

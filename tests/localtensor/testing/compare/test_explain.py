"""What a difference looks like: halos, copies of a tied parameter, buffers, elements left out, sizes, the ranks that differ."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import localtensor as lt
from localtensor.errors import Diverged, NotComparable
from localtensor.testing.compare.divergence import Sides
from localtensor.testing.compare.explain import halo_layout
from localtensor.testing.compare.find_layout import ranks_text, values_text
from localtensor.testing.compare.watch import Watch

EXACT = torch.zeros(())


def sides(**mesh):
    ranks = tuple(Watch() for _ in range(torch.Size(mesh.values()).numel()))
    return Sides(Watch(), {}, ranks, mesh, ())


def compare(parallelize, mesh, build=lambda: nn.Linear(4, 4), **options):
    given = {"batch": lambda: torch.randn(4, 4), "loss": lambda y: y.square().mean(), "optimizer": torch.optim.SGD}
    return lt.compare(build, parallelize, mesh=mesh, **given | options)


def divergence(*args, **options):
    with pytest.raises(Diverged) as told:
        compare(*args, **options)
    return told.value.comparison.divergence


X = torch.arange(24.0).view(2, 12)


@pytest.mark.parametrize(
    ("windows", "found"),
    [
        ([(0, 5), (3, 9), (7, 12)], "S(1) with halo"),
        ([(0, 5), (5, 9), (7, 12)], "S(1) with halo"),
        ([(0, 5), (6, 9), (7, 12)], "None"),  # one place is left out
        ([(0, 5), (0, 5), (5, 12)], "None"),
        ([(1, 5), (3, 9), (7, 12)], "None"),
    ],
)
def test_shards_with_a_halo_overlap_and_leave_nothing_out(windows, found):
    held = [X[:, a:b] for a, b in windows]
    assert str(halo_layout(sides(cp=3), held, X, EXACT)) == found
    both = [x for x in held for _ in range(2)]
    assert str(halo_layout(sides(cp=3, tp=2), both, X, EXACT)) == (found if found == "None" else f"{found}, R")


def test_ranks_are_named_by_what_they_share():
    mesh = sides(dp=2, tp=2)
    assert ranks_text(mesh, [3]) == "rank 3 (dp=1, tp=1)"
    assert ranks_text(mesh, [1, 3]) == "ranks 1, 3 (tp=1)" and ranks_text(mesh, [0, 3]) == "ranks 0, 3"


def test_values_are_of_the_rank_that_differs():
    held = [X[:1], X[:1], X[1:], X[1:] + 1]
    said = "13 where one device gives 12 at [1, 0], on rank 3 (dp=1, tp=1); 12 of 24 elements differ, by more than 0"
    assert values_text(sides(dp=2, tp=2), held, X, EXACT) == said
    assert values_text(sides(tp=2), [X, X], X, EXACT) == "each rank is right by itself"
    assert values_text(sides(tp=2), [X[0], X[0]], X, EXACT) == "shapes (12,) where one device has (2, 12)"


class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        x = x if self.emb is None else self.emb(x)
        return x if self.head is None else self.head(x)


def square(y, target=None):
    return y.square().mean()


class Tied(torch.optim.SGD):
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            if getattr(one, "tied", False):
                dist.all_reduce(one.grad)
        return super().step(closure)


def ends(tied):
    def parallelize(model, mesh):
        part, rank = copy.deepcopy(model), mesh.get_rank()
        part.emb, part.head = (part.emb, None) if rank == 0 else (None, part.head)
        part.get_submodule("emb" if rank == 0 else "head").weight.tied = tied
        stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        return ScheduleGPipe(stage, 2, loss_fn=square)

    return parallelize


def test_the_ends_of_a_pipeline_may_have_a_copy_each_of_a_tied_parameter():
    given = {"build": Ends, "batch": lambda: torch.randint(0, 8, (4, 3)), "loss": square, "optimizer": Tied}
    assert compare(ends(True), {"pp": 2}, **given).layouts["parameter after the step of emb.weight, step 0"] == "R"
    found = divergence(ends(False), {"pp": 2}, **given)
    assert str(found.key) == "gradient of emb.weight, step 0"
    assert found.what.endswith("and not on the ranks: the gradient that comes by head.weight is missing")


class Counting(nn.Module):
    """Takes the mean of what came before away."""

    def __init__(self, reads=True):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.reads = reads

    def forward(self, x):
        done = x - self.mean if self.reads else x.clone()
        with torch.no_grad():
            self.mean += x.detach().mean(0)
        return done


def local(model, mesh):
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())


@pytest.mark.parametrize("reads", [True, False])
def test_a_buffer_that_differs_is_the_fault_whether_it_is_read_or_not(reads):
    def build():
        return nn.Sequential(nn.Linear(4, 4), Counting(reads))

    def unsynchronised(model, mesh):
        for parameter in model.parameters():
            parameter.register_hook(_mean)

    found = divergence(unsynchronised, {"dp": 2}, build=build, steps=2)
    assert str(found.key) == "buffer of 1.mean, step 1"
    assert found.what == "the buffer differs between the ranks along dp"


def _mean(grad):
    grad = grad.clone()
    dist.all_reduce(grad)
    return grad / dist.get_world_size()


class Leaves(torch.optim.SGD):
    """Does not update the last element of a weight."""

    def step(self, closure=None):
        weight = self.param_groups[0]["params"][0]
        before = weight.detach().clone()
        super().step(closure)
        if getattr(weight, "last_left", False):
            with torch.no_grad():
                weight[-1, -1] = before[-1, -1]


def test_elements_that_a_step_leaves_out_are_stale():
    def parallelize(model, mesh):
        model.weight.last_left = True

    found = divergence(parallelize, {"tp": 2}, optimizer=Leaves)
    assert str(found.key) == "parameter after the step of weight, step 0"
    assert found.what == "1 of 16 elements are stale: the step has not updated them"


def test_a_loss_of_its_own_rows_that_is_a_sum_may_be_too_small():
    class Mean(nn.Module):
        def forward(self, x):
            return x.sum() / 16

    def build():
        return nn.Sequential(nn.Linear(4, 4), Mean())

    found = divergence(local, {"dp": 2}, build=build, loss=lambda y: y.square())
    assert found.what.startswith(
        "an all_reduce over dp is missing, or it is 2 times too small, as the ranks' mean counts"
    )


def test_functions_go_through_compare_as_well():
    def total(x):
        return x.sum(0)

    def parts(x, mesh):
        y = x.chunk(2)[mesh.get_rank()].sum(0)
        dist.all_reduce(y)
        return y

    seen = []
    assert lt.compare(total, parts, lambda: (torch.ones(4, 2),), mesh={"tp": 2}).divergence is None
    compare(lambda model, mesh: None, {"tp": 2}, progress=seen.append)
    assert seen == ["one device", "one device again", "one device with noise, and in double precision", "2 ranks"]


def test_the_collective_before_the_call_is_named():
    def parallelize(model, mesh):
        model.register_forward_hook(lambda module, args, y: _mean(y.detach()) + y - 2 * y.detach())

    with pytest.raises(Diverged) as told:
        compare(parallelize, {"tp": 2})
    done = told.value.comparison
    assert done.collective_before.startswith("all_reduce over tp, test_explain.py:")
    assert f"  after     {done.collective_before}" in str(done).splitlines()


def stack():
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Tanh())


class Rows(nn.Module):
    """A layer that is cut along its input; each of `ends` is what its calls do with their pending sum, in order."""

    def __init__(self, whole, mesh, *ends):
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(mesh.size(), 1)[mesh.get_rank()].clone())
        self.mesh, self.ends = mesh, list(ends)

    def forward(self, x):
        y = nn.functional.linear(x.chunk(self.mesh.size(), -1)[self.mesh.get_rank()], self.weight)
        return self.ends.pop(0)(y, self.mesh)


def reduced(y, mesh):
    return all_reduce(y, "sum", mesh)


def forgotten(y, mesh):
    return y


def declared(y, mesh):
    return DTensor.from_local(y, mesh, [Replicate()], run_check=False)


@pytest.mark.parametrize(
    ("first", "second", "key", "reason"),
    [
        ([forgotten], [reduced], "output of 0, step 0", "as what reads it takes it for whole"),
        ([reduced], [forgotten], "output of 2, step 0", "as that of 0"),
        ([reduced, forgotten], [reduced, reduced], "output of 0, step 1", "as in step 0"),
        ([reduced], [declared], "output of 2, step 0", "as its placements say"),
    ],
)
def test_the_layout_that_was_expected_is_named_with_the_reason(first, second, key, reason):
    def parallelize(model, mesh):
        model[0], model[2] = Rows(model[0], mesh, *first), Rows(model[2], mesh, *second)

    options = {"loss": None, "optimizer": None, "steps": len(first)}
    with pytest.raises(Diverged) as told, torch.no_grad():
        compare(parallelize, {"tp": 2}, stack, **options)
    found = told.value.comparison.divergence
    assert str(found.key) == key and found.layout == "P(sum)" and "an all_reduce over tp is missing" in found.what
    assert (found.expected.layout, found.expected.reason) == ("R", reason)
    assert f"assembles as P(sum) on tp where R was expected, {reason}\n" in str(told.value)


def test_a_gradient_is_expected_as_its_parameter_is():
    def columns(model, mesh):
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    found = divergence(columns, {"dp": 2, "tp": 2}, stack)
    assert (found.layout, str(found.key)) == ("P(avg), S(1)", "gradient of 2.weight, step 0")
    assert str(found.expected) == "P(avg) on dp where R was expected, as the parameter is"
    assert found.expected.layout == "R, S(1)"


def test_a_mean_of_means_over_uneven_rows_is_named():
    def parallelize(model, mesh):
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())

    found = divergence(parallelize, {"dp": 2}, batch=lambda: torch.randn(7, 4))
    what = "the ranks have 4, 3 rows, and each takes the mean of its own: the mean of these is not that of all rows"
    assert (str(found.key), found.what) == ("the loss, step 0", what)
    other = divergence(parallelize, {"dp": 2}, batch=lambda: torch.randn(7, 4), loss=lambda y: y.square().mean() ** 2)
    assert other.key == found.key and other.what == "wrong values"


def test_placements_that_are_wrong_are_noted_where_the_values_are_right():
    class Replicas(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
            return DTensor.from_local(y.chunk(2)[mesh.get_rank()], mesh, [Shard(1)], run_check=False)

    def parallelize(model, mesh):
        made = Replicas(4, 4)
        made.load_state_dict(model.state_dict())
        return made

    done = compare(parallelize, {"tp": 2}, loss=None, optimizer=None)
    assert "output of the whole model, step 0 assembles as S(0), and its placements say S(1)" in done.notes


def test_halves_that_are_equal_are_no_pending_sum():
    def parallelize(model, mesh):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: all_reduce(grad, "sum", mesh) / 4)

    found = divergence(parallelize, {"dp": 2})
    assert "2 times too small" in found.what and found.layout is None and found.expected is None


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())


def test_the_lines_that_set_up_are_those_that_make_the_model_parallel():
    def summed(model, mesh):
        fully_shard(model, mesh=mesh).set_gradient_divide_factor(1.0)

    with pytest.raises(Diverged) as told:
        compare(summed, {"dp": 2}, Pair)
    done = told.value.comparison
    assert "2 times too large" in done.divergence.what
    assert done.setup and all(line.endswith("in summed") for line in done.setup)


def test_a_factor_that_is_no_whole_number_is_not_taken_for_one():
    found = divergence(
        lambda model, mesh: model[0].register_forward_hook(lambda *a: a[-1] * 1.5) and None, {"tp": 2}, stack
    )
    assert (str(found.key), found.what) == ("output of 0, step 0", "wrong values")


def test_parameters_that_cannot_be_matched_are_the_reason():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(4, 4)

        def forward(self, x):
            return self.other(x)

    found = divergence(lambda model, mesh: Other(), {"tp": 2}, stack)
    assert found.what == "the parameters cannot be matched: the ranks have none of one device, by name or by value"


def test_a_script_in_no_folder_is_refused_before_anything_runs():
    with pytest.raises(NotComparable, match=r"script: /nowhere/x\.py lies in no folder that exists"):
        compare(lambda model, mesh: pytest.fail("it runs"), {"tp": 2}, script="/nowhere/x.py")


def reduced_by(reduce):
    def parallelize(model, mesh):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: reduce(p, mesh.get_group("dp")))

    return parallelize


def in_bfloat16(parameter, group):
    small = parameter.grad.bfloat16()
    dist.all_reduce(small, group=group)
    parameter.grad.copy_(small.float() / 2)


def test_a_gradient_that_is_cast_before_it_is_reduced_is_reported_by_its_dtype():
    """Numbers of bfloat16 are numbers of float16, too.  Nothing that is whole meets the pending sum."""
    with pytest.raises(Diverged) as told:
        compare(reduced_by(in_bfloat16), {"dp": 2})
    found = told.value.comparison
    assert found.divergence.what == "its elements are numbers of bfloat16: the dtype is lost on the way"
    assert (
        "_to_copy, " in found.calls[0]
        and ": it reads a pending sum, which is added up only later, in all_reduce, " in found.calls[0]
    )


def test_a_value_that_is_scaled_is_not_called_one_that_is_added_twice():
    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 2

    found = divergence(lambda model, mesh: Doubled(model), {"dp": 2}, lambda: nn.Sequential(nn.Linear(4, 4)))
    assert found.what == "it is 2 times too large, the number of ranks along dp: added once too often"


def test_replicas_that_part_in_a_step_are_a_divergence_and_no_error_of_the_run():
    def average(parameter, group):
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= 2

    def by_rank(parameters):
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return torch.optim.SGD(parameters, 0.1 if ranks == 1 else 0.1 * (1 + dist.get_rank()))

    found = divergence(reduced_by(average), {"dp": 2}, optimizer=by_rank, steps=2)
    assert str(found.key).startswith("parameter after the step") and found.what == (
        "replicas along dp differ: right at 0, wrong at 1"
    )


class Gelu(nn.Module):
    def __init__(self, approximate):
        super().__init__()
        self.up, self.down, self.approximate = nn.Linear(4, 16), nn.Linear(16, 4), approximate

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x), approximate=self.approximate))


def other_form(model, mesh):
    model.approximate = "tanh"


def test_what_differs_by_less_than_noise_is_found_at_its_own_line_in_double_precision():
    in_double = {"build": lambda: Gelu("none").double(), "batch": lambda: torch.randn(4, 4, dtype=torch.float64)}
    with pytest.raises(Diverged) as told:
        compare(other_form, {"dp": 2}, **in_double)
    found = told.value.comparison
    assert str(found.divergence.key).startswith("input of down") and found.calls[0].startswith("gelu, test_explain.py:")

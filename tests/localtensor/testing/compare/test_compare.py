"""`lt.compare`: right programs pass, each kind of fault is named with its module, line and words; bad input is one sentence."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import localtensor as lt
from localtensor.errors import Diverged, NotComparable, RankRaised, WrongType


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build():
    return nn.Sequential(Block(), nn.Dropout(0.5), Block())


PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
TRAINED = {
    "batch": lambda: torch.randn(4, 8), "loss": lambda y: y.square().mean(), "optimizer": torch.optim.AdamW, "steps": 2,
}  # fmt: skip


def replicated(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def two_ways(model, mesh):
    return fully_shard(parallelize_module(model, mesh["tp"], PLAN), mesh=mesh["dp"])


@pytest.mark.few(2)
@pytest.mark.parametrize(("parallelize", "mesh"), [
    (replicated, {"dp": 2}),
    (lambda model, mesh: parallelize_module(model, mesh, PLAN), {"tp": 2}),
    (two_ways, {"dp": 2, "tp": 2}),
], ids=["DDP", "tensor parallel", "FSDP and tensor parallel"])  # fmt: skip
def test_right_programs_pass_and_say_what_was_compared(parallelize, mesh):
    done = lt.compare(build, parallelize, mesh=mesh, **TRAINED)
    assert done.divergence is None and len(done.layouts) > 100 and not done.not_compared
    assert done.notes == ("dropout of 1 is off",)
    shards = {"dp": "S(0)", "tp": "R"}
    assert done.layouts["input of 0.up, step 1"] == ", ".join(shards[axis] for axis in mesh)
    assert "computes what one device computes" in str(done)


def test_constant_parameters_have_the_layout_that_their_placements_say():
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    done = lt.compare(Block, lambda model, mesh: fully_shard(model, mesh=mesh), mesh=mesh, **TRAINED)
    assert done.layouts["parameter of norm.weight, step 0"] == "R, S(0)" and not done.notes


def test_a_checkpointed_module_that_is_sharded_too_is_compared():
    def parallelize(model, mesh):
        model[0] = fully_shard(checkpoint_wrapper(model[0]), mesh=mesh)
        return fully_shard(model, mesh=mesh)

    done = lt.compare(build, parallelize, mesh={"dp": 2}, **TRAINED)
    assert done.layouts["output of 0, step 1"] == "S(0)" and not done.not_compared


class Drops(nn.Module):
    """Drops by functions, and inside of attention: the ranks, which have other rows, draw other numbers."""

    def __init__(self):
        super().__init__()
        self.up, self.attend = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        y = nn.functional.dropout(self.up(x), 0.5, self.training)
        y = y + self.attend(y, y, y, need_weights=False)[0]
        return nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.3)


@pytest.mark.few(1)
@pytest.mark.parametrize("on", ["threads", "gloo"])
def test_functions_that_drop_are_off_and_named(on):
    before = nn.functional.scaled_dot_product_attention, torch._VF.dropout
    done = lt.compare(Drops, replicated, mesh={"dp": 2}, batch=batch_of_rows, loss=mean_square, on=on)
    assert done.divergence is None
    assert done.notes == tuple(
        f"dropout by the function {n} is off" for n in ("dropout", "scaled_dot_product_attention")
    )
    assert (nn.functional.scaled_dot_product_attention, torch._VF.dropout) == before


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.rand(len(x), 1, 1)


def test_a_program_that_draws_by_itself_is_reported():
    with pytest.raises(Diverged) as told:
        lt.compare(partial(Noisy, 8, 8), replicated, batch_of_rows, mesh={"dp": 2}, loss=mean_square)
    assert "one device draws random numbers in the steps" in told.value.comparison.notes[0]


def batch_of_rows():
    return torch.randn(4, 3, 8)


def mean_square(y):
    return y.square().mean()


def diverged(parallelize, mesh, **options):
    with pytest.raises(Diverged) as told:
        lt.compare(build, parallelize, mesh=mesh, **{**TRAINED, **options})
    return told.value.comparison


class Reduced(torch.autograd.Function):
    """The sum over the ranks; its gradient passes through."""

    @staticmethod
    def forward(_, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_, grad):
        return grad


class Copied(torch.autograd.Function):
    """The same on every rank; the gradients are added."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Columns(nn.Module):
    def __init__(self, whole, mesh, first=0, copied=True):
        super().__init__()
        mine, self.copied = (mesh.get_rank() + first) % mesh.size(), copied
        self.weight = nn.Parameter(whole.weight.detach().chunk(mesh.size())[mine].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(mesh.size())[mine].clone())

    def forward(self, x):
        return nn.functional.linear(Copied.apply(x) if self.copied else x, self.weight, self.bias)


class Rows(nn.Module):
    def __init__(self, whole, mesh, reduced=True, early=False):
        super().__init__()
        self.reduced, self.early = reduced, early
        self.weight = nn.Parameter(whole.weight.detach().chunk(mesh.size(), 1)[mesh.get_rank()].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        y = nn.functional.linear(x, self.weight, self.bias if self.early else None)
        y = Reduced.apply(y) if self.reduced else y
        return y if self.early else y + self.bias


def by_hand(columns=None, rows=None):
    def parallelize(model, mesh):
        for block in (model[0], model[2]):
            block.up = Columns(block.up, mesh, **(columns or {}))
            block.down = Rows(block.down, mesh, **(rows or {}))

    return parallelize


def test_layers_by_hand_need_no_annotation():
    done = lt.compare(build, by_hand(), mesh={"tp": 2}, **TRAINED)
    assert done.layouts["output of 0.up, step 0"] == "S(1)"
    assert done.layouts["gradient of 2.down.weight, step 1"] == "S(1)"


@pytest.mark.few(2)
@pytest.mark.parametrize(("parallelize", "mesh", "at", "because"), [
    (lambda model, mesh: None, {"dp": 2}, "gradient of 2.down.bias", "an all_reduce of the gradient over dp is missing"),
    (by_hand(rows={"reduced": False}), {"tp": 2}, "output of 0.down", "an all_reduce over tp is missing"),
    (by_hand(rows={"early": True}), {"tp": 2}, "output of 0.down", "0.down.bias is added 2 times, once by each rank along tp"),
    (by_hand(columns={"first": 1}), {"tp": 2}, "parameter of 0.up.weight", "the wrong slice: rank 1 holds that of rank 0"),
    (by_hand(columns={"copied": False}), {"tp": 2}, "gradient of", "missing"),
], ids=["no DDP", "no all_reduce", "bias by each rank", "slices", "no gradient of the input"])  # fmt: skip
def test_faults_are_named(parallelize, mesh, at, because):
    found = diverged(parallelize, mesh).divergence
    assert str(found.key).startswith(at) and because in found.what, f"{found.key}: {found.what}"


def scaled_by(factor):
    def parallelize(model, mesh):
        def hook(parameter):
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
            parameter.grad *= factor

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    return parallelize


@pytest.mark.few(1)
@pytest.mark.parametrize(("factor", "because"), [
    (1.0, "2 times too large, the number of ranks along dp: summed and not averaged"),
    (0.25, "2 times too small, the number of ranks along dp: divided once too often"),
])  # fmt: skip
def test_gradients_that_are_scaled_are_reported_by_their_factor(factor, because):
    assert lt.compare(build, scaled_by(0.5), mesh={"dp": 2}, **TRAINED).divergence is None
    found = diverged(scaled_by(factor), {"dp": 2}).divergence
    assert found.key.kind == "gradient" and because in found.what


def test_a_reduction_over_the_wrong_group_is_reported():
    def parallelize(model, mesh):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, group=mesh.get_group("tp")))

    found = diverged(parallelize, {"dp": 2, "tp": 2}).divergence
    assert "it is reduced over tp instead of dp: the wrong group" in found.what


def test_replicas_that_differ_are_reported_by_their_place():
    def parallelize(model, mesh):
        with torch.no_grad():
            model[2].up.weight[0, 0] += mesh.get_rank()

    found = diverged(parallelize, {"dp": 2}).divergence
    assert (
        str(found.key).startswith("parameter of 2.up.weight")
        and found.what == "replicas along dp differ: right at 0, wrong at 1"
    )


def test_the_call_of_torch_inside_the_module_is_named_with_its_line():
    class Twisted(Block):
        def forward(self, x):
            y = nn.functional.gelu(self.up(self.norm(x)))
            y = torch.relu(y)  # not in the other
            return x + self.down(y)

    def parallelize(model, mesh):
        twisted = Twisted()
        twisted.load_state_dict(model[0].state_dict())
        model[0] = twisted

    found = diverged(parallelize, {"dp": 2})
    assert str(found.divergence.key).startswith("input of 0.down") and "test_compare.py" in str(found.divergence.place)


def test_a_dtype_that_is_lost_is_reported():
    def parallelize(model, mesh):
        model[0].up.to(torch.bfloat16)
        model[0].up.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        model[0].up.register_forward_hook(lambda module, args, y: y.float())

    found = diverged(parallelize, {"dp": 2}).divergence
    assert str(found.key).startswith("parameter of 0.up.weight")
    assert found.what == "the dtype is bfloat16 where one device has float32"


def noisy():
    import itertools

    count = itertools.count()
    return lambda: torch.full((4, 8), float(next(count)))


@pytest.mark.parametrize(("options", "words"), [
    ({"mesh": {}}, "a mesh of {}"),
    ({"mesh": {"dp": 0}}, "mesh: a mesh of"),
    ({"mesh": {"dp": 2}, "batch_axes": ["data"]}, "no mesh axis is called data"),
    ({"mesh": {"dp": 2}, "steps": 0}, "0 steps"),
    ({"mesh": [2]}, r"mesh: a mesh of \[2\]"),
    ({"mesh": {"dp": 8}}, "a tensor of 4 rows, for 8 parts along dp"),
    ({"mesh": {"dp": 2}, "loss": lambda y: y}, r"loss: it gives a tensor of shape \(4, 8\)"),
    ({"mesh": {"dp": 2}, "batch": lambda: [torch.ones(4, 8)]}, "batch: it gives list"),
    ({"mesh": {"dp": 2}, "batch": lambda: "rows"}, "batch: it gives str"),
    ({"mesh": {"dp": 2}, "build": lambda: None}, "build: it gives NoneType"),
    ({"mesh": {"dp": 2}, "optimizer": list}, "optimizer: it gives list"),
    ({"mesh": {"dp": 2}, "loss": lambda y: y.mean() * torch.rand(()) * next(iter([1])) + id(y) % 97}, "differs between two runs"),
])  # fmt: skip
def test_bad_input_is_one_sentence(options, words):
    with pytest.raises(NotComparable, match=words):
        lt.compare(**{"build": build, "parallelize": replicated, **TRAINED, **options})


@pytest.mark.parametrize(("argument", "value", "remedy"), [
    ("batch", [torch.ones(4, 8)], "Pass a tensor, a tuple of arguments, a dict of named ones, or a function"),
    ("optimizer", torch.optim.SGD([torch.ones(1)]), "Pass its class"),
    ("loss", 1, "Pass a function"),
])  # fmt: skip
def test_what_is_no_function_is_of_a_wrong_type(argument, value, remedy):
    with pytest.raises(WrongType, match=f"^compare: {argument}: .*it is not a function.*{remedy}"):
        lt.compare(build, replicated, **{**TRAINED, "mesh": {"dp": 2}, argument: value})


def test_a_model_in_place_of_what_makes_it_is_refused_with_both_ways_on():
    with pytest.raises(
        WrongType, match=r"^compare: build: .*Linear.* each run makes its own\. Pass what makes it, as lambda: "
    ):
        lt.compare(nn.Linear(4, 2), lambda model, _: model, lambda: torch.ones(2, 4), mesh={"tp": 2})
    layer = nn.Linear(4, 2)
    done = lt.compare_functions(layer, layer, (torch.ones(2, 4),), mesh={"tp": 2})
    assert done.divergence is None


@pytest.mark.parametrize("batch", [torch.ones(4, 8), (torch.ones(4, 8),), {"x": torch.ones(4, 8)}])
def test_a_batch_may_be_given_itself_and_stays_as_it_is(batch):
    class Writes(nn.Linear):
        def forward(self, x):
            return super().forward(x.add_(1))

    done = lt.compare(lambda: Writes(8, 8), lambda model, mesh: model, batch, mesh={"tp": 2})
    assert done.divergence is None and all((x == 1).all() for x in tree_leaves(batch))


def test_arguments_of_functions_may_be_given_themselves():
    given = (torch.arange(6.0), 2)
    done = lt.compare(lambda x, by: x * by, lambda x, by, mesh: x.mul_(by), given, mesh={"tp": 2})
    assert done.divergence is None and given[0].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(Diverged, match=r"no script was written: tensor.* is a value, and a script needs a function"):
        lt.compare(build, lambda model, mesh: build(), torch.ones(4, 8), mesh={"dp": 2}, script="differs.py")


def test_nothing_compared_is_no_pass():
    def parallelize(model, mesh):
        return nn.Sequential(nn.Identity())

    with pytest.raises((NotComparable, Diverged)):
        lt.compare(lambda: nn.Linear(8, 8), parallelize, mesh={"dp": 2}, batch=TRAINED["batch"])


def test_what_parallelize_gives_is_checked():
    with pytest.raises(NotComparable, match="parallelize: it gives list"):
        lt.compare(build, lambda model, mesh: [model], mesh={"dp": 2}, **TRAINED)


def test_a_lambda_is_no_function_of_a_real_process():
    with pytest.raises(NotComparable, match="parallelize: a real process does not find it: Can't pickle local") as no:
        lt.compare(build, lambda model, mesh: model, batch_of_rows, mesh={"dp": 2}, on="gloo")
    assert "top level of a module" in str(no.value)


def test_another_model_on_a_rank_is_reported():
    wide = lambda: nn.Linear(8, 8 + dist.is_initialized())  # noqa: E731
    with pytest.raises(NotComparable, match=r"weight is of shape \(9, 8\), and on one device of shape \(8, 8\)"):
        lt.compare(wide, replicated, mesh={"dp": 2}, batch=TRAINED["batch"])


def test_parameters_without_a_counterpart_are_noted():
    class Turned(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.turned, self.added = nn.Parameter(layer.weight.t().clone()), nn.Parameter(layer.bias.clone()[None])

        def forward(self, x):
            return x @ self.turned + self.added

    done = lt.compare(lambda: nn.Linear(8, 8), lambda model, mesh: Turned(model), mesh={"tp": 2}, **TRAINED)
    lost = "no rank has a parameter called weight, bias; the ranks have turned, added, which one device has not"
    assert done.divergence is None and lost in done.notes and "parameter of weight, step 0" in done.not_compared


def test_nan_in_both_is_noted():
    rows = torch.tensor([torch.nan, 1.0, 1.0, 1.0])[:, None] * torch.ones(8)
    done = lt.compare(lambda: nn.Linear(8, 8), replicated, rows, mesh={"dp": 2}, loss=square)
    assert done.divergence is None and any("NaN or infinity in both" in note for note in done.notes)


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW])  # whose count of steps is a number nevertheless
def test_nothing_but_nan_in_both_is_no_pass(optimizer):
    options = {"batch": torch.full((4, 8), torch.nan), "loss": square, "optimizer": optimizer, "mesh": {"dp": 2}}
    with pytest.raises(NotComparable, match="nothing but NaN or infinity in both") as refused:
        lt.compare(lambda: nn.Linear(8, 8), lambda model, mesh: model, **options)
    assert "\n" not in str(refused.value)


def square(y):
    return y.square().mean()


def test_the_calls_that_go_wrong_and_those_that_set_up_are_named():
    done = diverged(by_hand(rows={"reduced": False}), {"tp": 2})
    assert "mm, test_compare.py:" in done.calls[0] and "in forward" in done.calls[0]
    done = diverged(scaled_by(1.0), {"dp": 2})
    assert any("in parallelize" in line for line in done.setup)


def test_a_pending_sum_that_meets_a_whole_value_is_the_cause():
    class Late(Block):
        def forward(self, x):
            return torch.relu(self.down(nn.functional.gelu(self.up(self.norm(x)))))

    def parallelize(model, mesh):
        by_hand(rows={"reduced": False})(model, mesh)

    with pytest.raises(Diverged) as told:
        lt.compare(lambda: nn.Sequential(Late(), nn.Identity(), Late()), parallelize, mesh={"tp": 2}, **TRAINED)
    found = told.value.comparison.divergence
    assert "an all_reduce over tp is missing" in found.what and found.key.name == "0.down"


def test_a_tied_parameter_that_is_two_on_the_ranks_is_reported():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(self.first(x).tanh())

    def parallelize(model, mesh):
        model.last.weight = nn.Parameter(model.first.weight.detach().clone())

    with pytest.raises(Diverged, match="one parameter on one device, and not on the ranks: the gradient that comes by"):
        lt.compare(Tied, parallelize, mesh={"tp": 2}, **TRAINED)


def test_a_rank_that_raises_is_the_error():
    with pytest.raises(RankRaised, match="no such layer"):
        lt.compare(
            build,
            lambda model, mesh: (_ for _ in ()).throw(ValueError("no such layer")) and None,
            mesh={"dp": 2},
            **TRAINED,
        )


def test_functions_are_compared_by_their_results():
    def mean(x, mesh):
        mine = x.chunk(mesh.size())[mesh.get_rank()].mean(0)
        dist.all_reduce(mine)
        return mine / mesh.size()

    inputs = lambda: (torch.randn(4, 3),)  # noqa: E731
    assert lt.compare_functions(lambda x: x.mean(0), mean, inputs, mesh={"dp": 2}).divergence is None
    with pytest.raises(Diverged, match="2 times too small"):
        lt.compare_functions(lambda x: x.sum(0) / 2, mean, inputs, mesh={"dp": 2})


def test_functions_take_the_options_of_a_comparison_or_refuse_them():
    runs, rows = [], torch.randn(4, 3)
    done = lt.compare(lambda x: x.sum(0), lambda x: x.sum(0), (rows,), mesh={"dp": 2}, progress=runs.append)
    assert done.divergence is None and "2 ranks" in runs
    with pytest.raises(Diverged, match=r"note .*the same shows with"):
        lt.compare(lambda x: x.sum(0), lambda x: x.sum(0) / 3, (rows,), mesh={"dp": 2}, shrink=True)
    for option in ({"optimizer": torch.optim.SGD}, {"steps": 2}, {"batch_axes": ["dp"]}):
        with pytest.raises(NotComparable, match=f"{next(iter(option))}: .* functions"):
            lt.compare(lambda x: x.sum(0), lambda x: x.sum(0), (rows,), mesh={"dp": 2}, **option)


LABELS = torch.tensor([1.0, -1.0, 1.0, -1.0])


def test_labels_are_exact_so_a_wrong_loss_of_them_is_no_rounding():
    x = torch.linspace(-1.3, 1.7, 4)

    def loss(x, labels, scale=1.0):
        return torch.where(labels == 1, x, -x).mul(scale).sum()

    right = lt.compare(loss, loss, lambda: (x, LABELS), mesh={"dp": 2})
    assert right.divergence is None and not right.not_compared
    with pytest.raises(Diverged, match="output of the whole model"):
        lt.compare(loss, lambda x, labels: loss(x, labels, 1.5), lambda: (x, LABELS), mesh={"dp": 2})


def test_a_result_that_rounding_decides_is_not_compared_and_no_pass():
    def steep(x, more=0.0):
        return (x.double() * 1e15).sin().float() + more

    with pytest.raises(
        NotComparable, match=r"\(values whose elements mostly jump when inputs move by one unit in the last place\)"
    ) as caught:
        lt.compare(steep, lambda x: steep(x, 3.0), lambda: torch.rand(4) + 0.5, mesh={"dp": 2})
    assert "Compare where rounding does not decide" in str(caught.value)


class InBfloat16(nn.Linear):
    """A layer that computes in bfloat16 inside of a model of float32."""

    def forward(self, x):
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).to(x.dtype)


class HardCast(nn.Linear):
    """A layer that names its dtype, so that the model does not run in double precision."""

    def forward(self, x):
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16()).float()


def averaged(model, mesh, *, handles=None, by=2):
    """Gradients summed in one bucket behind the backward pass, and divided."""
    parameters, ready = [*model.parameters()], []

    def one(parameter):
        ready.append(parameter)
        if len(ready) % len(parameters) == 0:
            flat = torch.cat([p.grad.flatten() for p in parameters]) / by
            work = dist.all_reduce(flat, group=mesh.get_group(), async_op=True)
            pieces = flat.split([p.numel() for p in parameters])
            work.wait()
            for p, piece in zip(parameters, pieces, strict=True):
                p.grad.copy_(piece.view_as(p))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(one)


def bucketed(layer, **options):
    return lt.compare(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), layer(16, 16), nn.Linear(16, 4)),
        partial(averaged, **options), lambda: torch.randn(8, 8) + 1, mesh={"dp": 2}, loss=lambda y: y.square().mean(),
        optimizer=torch.optim.SGD, steps=2,
    )  # fmt: skip


def test_bfloat16_between_values_that_are_looked_at_widens_their_tolerance_and_they_are_compared():
    done = bucketed(InBfloat16)
    assert done.divergence is None and not done.not_compared


def test_a_model_that_does_not_run_in_double_precision_is_compared_with_a_note():
    done = bucketed(partial(HardCast, bias=False))
    assert done.divergence is None and not done.not_compared
    assert any(note.startswith("one device does not run in double precision (") for note in done.notes)


@pytest.mark.parametrize("layer", [nn.Linear, InBfloat16])
def test_a_bucket_whose_pieces_are_cut_while_it_is_summed_is_followed(layer):
    with pytest.raises(Diverged) as caught:
        bucketed(layer, by=1)
    assert "it is 2 times too large, the number of ranks along dp: summed and not averaged" in str(caught.value)

"""Modules of many kinds, what a caller gave, arguments of all types, and optimizers: planted faults that each of them finds alone."""

import pytest
import torch
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, Shard, experimental, parallel
from torch.distributed.tensor.experimental import _register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput

from strategies.model.rule import PUBLIC
from strategies.programs.public_api import drawing, varied_calls
from strategies.programs.public_api.table import STEPS, base_name, public_step, public_steps, step_name
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.run.verdict import is_claimed


def found_by(name, meshes=((2,),), turns=1):
    """The programs of a name that are wrong, by their text, with what is wrong."""
    drawn = [
        p for mesh in meshes for turn in range(turns) for p in drawing.draw_public_programs(mesh, seed=0, turn=turn)
    ]
    programs = [p for p in drawn if public_step(p.then)[0] == name]
    assert programs
    played = zip(programs, run_simulated_programs(programs), strict=True)
    return {str(p): f.wrong or f.refused for p, f in played if f.wrong or (f.refused and is_claimed(f.refused))}


def drops_requires_grad(patch):
    own = ColwiseParallel._partition_linear_fn

    def partition(self, name, module, mesh):
        own(self, name, module, mesh)
        for value in module.parameters():
            value.requires_grad_(True)

    patch.setattr(ColwiseParallel, "_partition_linear_fn", partition)


def forgets_keyword_arguments(patch):
    def without(self, x, scale=1.0, *, shift=0.0):
        return (
            nn.Linear.forward(self, x)
            if isinstance(self.weight, DTensor)
            else nn.Linear.forward(self, x) * scale + shift
        )

    patch.setattr(varied_calls.ScaledLinear, "forward", without)


def trusts_what_it_is_told(patch):
    own = PrepareModuleInput._prepare_input_arg

    def prepare(self, given, mesh, told, wanted):
        if isinstance(given, DTensor) and told is not None and given.placements != (told,):
            return given
        return own(self, given, mesh, told, wanted)

    patch.setattr(PrepareModuleInput, "_prepare_input_arg", prepare)


def writes_to_the_list(patch):
    own = dtensor.distribute_tensor

    def distribute(tensor, mesh, placements, **options):
        placements[:] = [Shard(p.dim % tensor.ndim) if isinstance(p, Shard) else p for p in placements]
        return own(tensor, mesh, placements, **options)

    patch.setattr(dtensor, "distribute_tensor", distribute)


def writes_to_the_pieces(patch):
    own = DTensor.redistribute

    def redistribute(self, *args, **options):
        out = own(self, *args, **options)
        self._local_tensor.detach().mul_(2)
        return out

    patch.setattr(DTensor, "redistribute", redistribute)


def turns_the_strides(patch):
    def stride(self, dim):
        return torch.Tensor.stride(self)[-1 - dim]

    patch.setattr(DTensor, "stride", stride, raising=False)


def lays_out_all_results_as_the_first(patch):
    own = experimental.local_map

    def local_map(function, out_placements, *args, **options):
        if isinstance(out_placements, tuple):
            out_placements = tuple(p and out_placements[0] for p in out_placements)
        return own(function, out_placements, *args, **options)

    patch.setattr(experimental, "local_map", local_map)


def forgets_int_arguments(patch):
    own = _register_sharding.RuntimeSchemaInfo
    patch.setattr(_register_sharding, "RuntimeSchemaInfo", lambda *args, **options: own(100, None, needs_pytree=True))


def steps_twice(patch):
    own = torch.optim.Adagrad.step

    def step(self, *args):
        own(self, *args)
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, DTensor) and p.placements[0].is_shard():
                    p.to_local().detach().mul_(1.5)

    patch.setattr(torch.optim.Adagrad, "step", step)


def takes_the_norm_of_pieces(patch):
    own = nn.utils.clip_grad_norm_

    def clip(parameters, *args, **options):
        given = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        for p, local in zip(parameters, given, strict=True):
            local.grad = p.grad.to_local() if isinstance(p, DTensor) else p.grad
        return own(given, *args, **options)

    patch.setattr(nn.utils, "clip_grad_norm_", clip)


def halves_the_scale_of_ranks(patch):
    own = torch.amp.GradScaler.step

    def step(self, optimizer):
        own(self, optimizer)
        if isinstance(optimizer.param_groups[0]["params"][0], DTensor):
            self._scale = self._scale / 2

    patch.setattr(torch.amp.GradScaler, "step", step)


def keeps_the_rules_of_torch(patch):
    own = experimental.register_sharding

    def register(op):
        return (lambda rules: rules) if op.namespace == "aten" else own(op)

    patch.setattr(experimental, "register_sharding", register)


def takes_the_first_rank_for_the_source(patch):
    own = parallel.parallelize_module

    def parallelize(module, mesh, plan, *, src_data_rank=0):
        return own(module, mesh, plan, src_data_rank=0)

    patch.setattr(parallel, "parallelize_module", parallelize)


def trains_what_it_distributes(patch):
    own = varied_calls.distribute_module
    patch.setattr(varied_calls, "distribute_module", lambda module, mesh: own(module, mesh).train())


def writes_to_the_list_of_a_piece(patch):
    own = DTensor.from_local

    def from_local(local, device_mesh, placements, **options):
        out = own(local, device_mesh, placements, **options)
        placements.reverse()
        placements.append(placements[0])
        return out

    patch.setattr(DTensor, "from_local", staticmethod(from_local))


def with_twice_the_gradient(x):
    return x * 2 - x.detach()


def doubles_gradients_of_pieces(patch):
    own = DTensor.from_local
    made = staticmethod(lambda local, *args, **options: own(with_twice_the_gradient(local), *args, **options))
    patch.setattr(DTensor, "from_local", made)


def doubles_gradients_of_maps(patch):
    own = experimental.local_map

    def local_map(function, *args, **options):
        return own(lambda x: function(with_twice_the_gradient(x)), *args, **options)

    patch.setattr(experimental, "local_map", local_map)


def doubles_results(patch):
    """Twice the result, in a tuple: torch 2.13 takes a tuple of one apart, which the same programs find."""
    own = parallel.PrepareModuleOutput._prepare_out_fn

    def prepare(self, outs, mesh):
        made = own(self, outs, mesh)
        return ((made[0] if isinstance(made, tuple) else made) * 2,)

    patch.setattr(parallel.PrepareModuleOutput, "_prepare_out_fn", prepare)


def never_steps(patch):
    own = torch.amp.GradScaler.step

    def step(self, optimizer, *args):
        of_dtensors = isinstance(optimizer.param_groups[0]["params"][0], DTensor)
        return None if of_dtensors else own(self, optimizer, *args)

    patch.setattr(torch.amp.GradScaler, "step", step)


FAULTS = [
    ("DTensor.from_local", doubles_gradients_of_pieces, "gradient of its pieces"),
    ("experimental.local_map", doubles_gradients_of_maps, "a.sum(0), out_placements=[Partial('sum')]"),
    ("parallel.PrepareModuleOutput, a tuple of one", doubles_results, "a tuple of one"),
    ("amp.GradScaler, a pending sum", never_steps, "a pending sum"),
    ("experimental.register_sharding, ops with rules", keeps_the_rules_of_torch, "replicas alone"),
    ("parallel.parallelize_module, hidden sizes", takes_the_first_rank_for_the_source, "src_data_rank=None"),
    ("tensor.distribute_module, modules kept", trains_what_it_distributes, ".eval()"),
    ("DTensor.from_local, what the caller gave", writes_to_the_list_of_a_piece, "from_local("),
    ("parallel.ColwiseParallel, modules kept", drops_requires_grad, "'*weight' frozen"),
    ("parallel.ColwiseParallel, modules trained", forgets_keyword_arguments, "shift"),
    ("parallel.PrepareModuleInput, of any DTensor", trusts_what_it_is_told, "called with"),
    ("tensor.distribute_tensor, what the caller gave", writes_to_the_list, "Shard(-1)"),
    ("DTensor.redistribute, what the caller gave", writes_to_the_pieces, "redistribute("),
    ("DTensor.redistribute, strides", turns_the_strides, "redistribute("),
    ("experimental.local_map, of any pieces", lays_out_all_results_as_the_first, "ones"),
    ("experimental.register_sharding, arguments", forgets_int_arguments, "with int"),
    ("optim.Adagrad", steps_twice, "Shard("),
    ("utils.clip_grad_norm_", takes_the_norm_of_pieces, "Shard("),
    ("amp.GradScaler", halves_the_scale_of_ranks, "Replicate("),
]
"""For each class of programs: a fault that is planted, and what the programs that find it have in their text."""
FOUND_BY_OTHERS = (turns_the_strides, writes_to_the_pieces, writes_to_the_list_of_a_piece, doubles_gradients_of_pieces, doubles_gradients_of_maps,
                   doubles_results, never_steps)  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "plant", "text"), FAULTS, ids=[name.replace(" ", "_") for name, *_ in FAULTS])
def test_a_planted_fault_is_found_by_these_programs_and_not_by_those_of_the_name_alone(monkeypatch, name, plant, text):
    alone = base_name(name)
    turns = 12 if plant is forgets_int_arguments else 4
    before, plain = found_by(name, turns=turns), found_by(alone) if alone != name and alone in STEPS else {}
    with monkeypatch.context() as patch:
        plant(patch)
        after = found_by(name, turns=turns)
        again = found_by(alone) if alone != name and alone in STEPS else {}
    new = {program for program, why in after.items() if before.get(program) != why}
    if not new and after and torch.__version__.split(".")[:2] != ["2", "13"]:
        pytest.skip("this torch has the fault itself, or another one in its place")
    assert new and any(text in program for program in new)
    if plant not in FOUND_BY_OTHERS:
        assert plain == again


def test_what_loss_parallel_gets_wrong_is_found():
    if torch.__version__.split(".")[:2] != ["2", "13"]:
        pytest.skip("other versions have other faults")
    found = found_by("parallel.loss_parallel, what is within", turns=8)
    wrong = [program for program, why in found.items() if "differs" in why]
    for loss in (
        "F.cross_entropy times a pending sum of logits",
        "the gradient of F.cross_entropy of logits",
        "F.cross_entropy of images",
    ):
        assert any(f", then {loss}" in program for program in wrong), loss


def test_the_loss_that_loss_parallel_documents_has_a_turn_of_each_kind_and_no_other_loss_has_one():
    name = "parallel.loss_parallel, what is within"
    drawn = [p.then for turn, mesh in enumerate(drawing.MESHES) for p in drawing.draw_public_programs(mesh, seed=0, turn=turn)
             if public_step(p.then)[0] == name]  # fmt: skip
    for kind in ("logits", "images", "few classes"):
        assert any(f"loss_parallel(), then F.cross_entropy of {kind}" in then for then in drawn), kind
    assert not any("nll_loss" in then or "probabilities" in then for then in drawn)


def test_pieces_of_several_shapes_are_for_the_steps_about_them():
    steps = public_steps("parallel.SequenceParallel, modules trained", 1)
    takes = {(step.aspect or "DTensor", step.takes) for step in steps}
    even = {(aspect, "even sequences") for aspect in ("tied", "frozen", "arguments")}
    assert takes == even | {("pieces", "sequences"), ("DTensor", "sequences")}
    assert all(shape[1] % ranks == 0 for shape in drawing.SHAPES["even sequences"] for ranks in (2, 3, 4))


def test_faults_of_unlike_aspects_are_not_one():
    every = [step for name in ("parallel.SequenceParallel, modules kept", "parallel.loss_parallel, what is within")
             for step in public_steps(name, 1)]  # fmt: skip
    names = {step_name(PUBLIC + step.call) for step in every}
    assert "parallel.SequenceParallel, modules kept, tied" in names
    assert {"parallel.SequenceParallel, modules kept", "parallel.loss_parallel, what is within, entered twice"} < names


def test_what_is_not_drawn_is_counted_by_name():
    few, all_of_them = (dict(line.split(": ") for line in drawing.calls_left(meshes, seed=0))
                        for meshes in ([(2,)], drawing.MESHES))  # fmt: skip
    every = len(public_steps("optim.Adam", 1))
    assert few["optim.Adam"] == f"{every - 2} of {every}" and all_of_them["optim.Adam"] == f"{every - 6} of {every}"
    assert "DTensor.redistribute, what the caller gave" not in few


def test_an_op_with_an_argument_has_a_name_of_its_own_for_each_pair_of_values():
    """The function of an op is registered once; DTensor takes an op whose name ends with "_" for one in place."""
    before = set(dir(torch.ops.public_calls))
    for off, on in ((0.5, 2.5), (2.5, 0.5)):
        first, second = varied_calls.registered_with(torch.ones(3), "float", off, on)
        assert first.tolist() == [2, 2, 2] and second.tolist() == [1, 2, 3]
    assert not any(name.endswith("_") for name in set(dir(torch.ops.public_calls)) - before if name[0] != "_")


def test_the_order_of_dims_is_that_of_their_strides_and_dims_of_one_element_have_none():
    assert varied_calls.in_order(torch.ones(2, 3).mT) == [1, 0]
    assert varied_calls.in_order(torch.ones(2, 1, 3)) == [0, 2]


def test_the_state_of_a_module_is_named_and_not_numbered():
    module = varied_calls.TiedNorms(2).train(False)
    module.first.bias.requires_grad_(False)
    *texts, weight, bias, tied, steps = varied_calls.kept_by(module)
    assert texts == [
        "second.weight is first.weight", "requires_grad: first.weight, second.weight", "training: no part",
        "parameters and buffers: first.weight, first.bias, second.weight, steps",
    ]  # fmt: skip
    assert torch.equal(weight, tied) and steps.tolist() == [0, 1, 2] and not bias.any()
    assert varied_calls.kept_by(nn.Linear(1, 1))[0] == "no parameter is shared"

"""Programs of public calls: the same for a seed, of every name on every mesh; planted faults are found by them alone."""

import pytest
import torch
from torch.distributed.tensor import _api
from torch.distributed.tensor.parallel import ColwiseParallel

from strategies.model.rule import PUBLIC
from strategies.model.verdict import Verdict
from strategies.programs.chained import validate_on_meshes, validate_with_follow_ups
from strategies.programs.public_api import drawing
from strategies.programs.public_api.table import (
    ONE_AXIS,
    STEPS,
    TWO_AXES,
    WITHOUT_PROGRAMS,
    base_name,
    public_step,
    public_steps,
)
from strategies.programs.run.follow_ups import follow_up
from strategies.programs.run.real_run import ProgramRealRuns, run_simulated_programs
from strategies.programs.run.verdict import Confirmation, is_claimed
from strategies.sweep.report.text_and_json import call_text, file_name
from strategies.torch_api import dtensor
from strategies.validation.finding import OverloadTask, finding_of_candidate
from tests.strategies.cases import numbers, sample, silent


def programs_of(name, mesh=(2,), seed=0, turns=1):
    drawn = (p for turn in range(turns) for p in drawing.draw_public_programs(mesh, seed=seed, turn=turn))
    return [p for p in drawn if public_step(p.then)[0] == name]


def wrong(programs):
    """The programs that are wrong, by their text, with what is wrong."""
    played = zip(programs, run_simulated_programs(programs), strict=True)
    return {str(p): f.wrong or f.refused for p, f in played if f.wrong or (f.refused and is_claimed(f.refused))}


# What is drawn.


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (2, 2), (2, 3)], ids=str)
def test_every_name_is_drawn_on_every_mesh_that_its_calls_take(mesh):
    drawn = drawing.draw_public_programs(mesh, seed=0)
    names = {public_step(p.then)[0] for p in drawn}
    assert names == set(STEPS) - (ONE_AXIS if len(mesh) > 1 else TWO_AXES)
    assert all(p.mesh == mesh and len(p.inputs) == 1 and len(p.inputs[0]) == len(mesh) for p in drawn)
    assert len({str(p) + str(p.sample.arguments()) for p in drawn}) == len(drawn)


def test_the_same_seed_draws_the_same_and_another_seed_others():
    once, again, other = (list(map(str, drawing.draw_public_programs((2,), seed=seed))) for seed in (0, 0, 1))
    assert once == again != other


def test_each_function_is_tried_in_each_layout_on_the_first_mesh():
    """A rule may be wrong, or refuse, in one layout alone: in torch 2.13 `F.rms_norm` of a tensor that is cut along its last dim."""
    drawn = drawing.draw_public_programs((2,), seed=0)
    for name in ("torch.nn.functional, layers", "torch.Tensor, functions", "torch.inference_mode, layers"):
        groups: dict[str, set[str]] = {}
        for p in drawn:
            if public_step(p.then)[0] == name:
                groups.setdefault(public_step(p.then)[1].group, set()).add(type(p.inputs[0][0]).__name__)
        kinds = [kinds for group, kinds in groups.items() if "embedding" not in group and "one_hot" not in group]
        assert all(kinds == {"Partial", "Shard", "Replicate"} for kinds in kinds)
    last = {p.inputs[0][0].dim for p in drawn if "F.rms_norm(" in p.then and p.inputs[0][0].is_shard()}
    assert last == {0, 1, 2}


def test_a_mesh_has_the_steps_that_come_after_those_of_the_mesh_before():
    first, second = (
        {p.then for p in drawing.draw_public_programs((3,), seed=0, turn=turn) if "c RowwiseParallel(" in p.then}
        for turn in (0, 1)
    )
    assert not first & second


def groups_in_order(name, seed):
    """The groups of a name's steps, in the order in which its first mesh tries them."""
    return tuple(dict.fromkeys(step.group for step, *_ in drawing._some(name, (2,), seed, 0)))


def test_each_seed_begins_with_other_uses_of_torchs_names_and_not_of_dtensors():
    of_torch = {name: {groups_in_order(name, seed) for seed in range(4)} for name in STEPS if name.startswith("torch.")}
    assert any(len(orders) == 4 for orders in of_torch.values())
    own = [
        name for name in STEPS if base_name(name) == name and not drawing._is_of_torch(name) and name not in TWO_AXES
    ]
    assert all(len({groups_in_order(name, seed) for seed in range(4)}) == 1 for name in own)


def test_the_modules_of_a_style_have_unlike_options_on_one_mesh():
    plans = [p.public_call.partition(" of ") for p in programs_of("parallel.ColwiseParallel")]
    assert len({module for *_, module in plans}) == 8 and len({plan for plan, *_ in plans}) > 4


def test_shares_are_all_programs_once(monkeypatch):
    run = []
    nothing = Confirmation("")
    monkeypatch.setattr(drawing, "run_simulated_programs", lambda some: run.append(some) or [nothing] * len(some))
    meshes, began = [(2,), (3,)], []
    counts = [
        drawing.try_public_programs(meshes, seed=0, share=share, shares=3, began=began.append)[0] for share in range(3)
    ]
    assert began == [*range(len(run) // 3 + 1)] * 3 and len(run) > 3
    every = [p for turn, mesh in enumerate([(2,), (3,)]) for p in drawing.draw_public_programs(mesh, seed=0, turn=turn)]
    assert sum(counts) == len(every)
    assert sorted(str(p) for programs in run for p in programs) == sorted(map(str, every))


# What is right is not suspected.

RAISE_ON_CPU = {"tensor.rand", "tensor.randn"}
"""torch 2.13: they raise on a CPU mesh."""


WRONG = {
    "DTensor.redistribute", "parallel.loss_parallel", "device_mesh.DeviceMesh", "optim.Adafactor", "optim.Rprop",
    *(name for name in STEPS if base_name(name) != name and not name.startswith(("DTensor.redistribute, what", "utils."))),
    "parallel.input_reshard.input_reshard",
}  # fmt: skip
"""torch 2.13: they have findings on even shards, too."""


@pytest.mark.few(4)
@pytest.mark.parametrize("name", sorted(set(STEPS) - RAISE_ON_CPU - WRONG))
def test_even_shards_of_two_ranks_are_right(name):
    """torch 2.13 refuses gradients of partial maxima, and of a Partial that comes in shards; those of other reductions are wrong."""
    reductions = "Partial('avg')", "Partial('max')", "Partial('min')"
    few = name.startswith("debug.")  # on one mesh
    left = [
        p for p in programs_of(name, turns=1 + 3 * few) if all(x.is_replicate() or x.is_shard() for x in p.inputs[0])
    ]
    left = [
        p
        for p in left
        if "Partial('sum')]), then its gradient in [Shard" not in p.then
        and "True), then its" not in p.then
        and ("context_parallel" not in p.then or "buffers=[b]" in p.then)  # views are wrong
        and not (p.then.endswith("then its gradient") and any(kind in p.then for kind in reductions))
    ]
    assert left and wrong(left) == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_a_mesh_of_ranks_that_do_not_ascend_is_wrong_and_others_are_right(mesh):
    """torch 2.11 to 2.15: the groups of a mesh have their ranks in ascending order, coordinates are those of the mesh."""
    told = wrong(programs_of("device_mesh.DeviceMesh", mesh, turns=2))
    assert len(told) > 2 and all("mesh.flip(" in text or "mesh.roll(" in text for text in told)
    assert all(" differs at " in reason for reason in told.values())
    assert wrong(programs_of("device_mesh.init_device_mesh", mesh, turns=2)) == {}


@pytest.fixture(scope="module")
def gloo():
    with ProgramRealRuns("gloo") as runs:
        yield runs


@pytest.mark.slow
def test_simulated_ranks_and_gloo_agree_on_every_name(gloo):
    firsts = list({public_step(p.then)[0]: p for p in drawing.draw_public_programs((2,), seed=0)}.values())
    apart = {}
    for program, simulated in zip(firsts, run_simulated_programs(firsts), strict=True):
        real = gloo.confirm_program(program)
        assert real.failed == ""
        if (bool(real.wrong), real.refused) != (bool(simulated.wrong), simulated.refused):
            apart[str(program)] = real.wrong or real.refused or simulated.wrong or simulated.refused
    assert apart == {}


# Planted faults.


@pytest.mark.slow
def test_a_gradient_of_pieces_that_ignores_its_placements_is_found_by_public_programs_alone(monkeypatch):
    own = _api._FromTorchTensor.backward

    def backward(ctx, gradient):
        ctx.grad_placements = None
        return own(ctx, gradient)

    programs = programs_of("DTensor.from_local", turns=3)
    before = wrong(programs)
    monkeypatch.setattr(_api._FromTorchTensor, "backward", staticmethod(backward))
    found = {text: why for text, why in wrong(programs).items() if text not in before}
    assert found
    assert all(text.startswith("DTensor.from_local(") and "grad_placements=[Partial('sum')]" in text for text in found)
    assert_ordinary_programs_find_nothing()


@pytest.mark.slow
def test_a_style_that_forgets_to_redistribute_is_found_by_public_programs_alone(monkeypatch):
    def forgets(output_layouts, use_local_output, module, outputs, mesh):
        return outputs.to_local() if use_local_output else outputs

    monkeypatch.setattr(ColwiseParallel, "_prepare_output_fn", staticmethod(forgets))
    found = wrong(programs_of("parallel.ColwiseParallel", turns=3))
    assert found and all("ColwiseParallel(" in text and "output_layouts=" in text for text in found)
    assert any("use_local_output=False" in text for text in found) and any("_output=" not in text for text in found)
    assert wrong(programs_of("parallel.RowwiseParallel")) == {}
    assert_ordinary_programs_find_nothing()


def test_a_source_rank_that_is_ignored_is_found(monkeypatch):
    own = _api.distribute_tensor
    monkeypatch.setattr(
        "strategies.programs.public_api.tensor_calls.distribute_tensor",
        lambda *args, **options: own(*args, **{**options, "src_data_rank": None}),
    )
    found = wrong(programs_of("tensor.distribute_tensor"))
    assert found and not any("src_data_rank=None" in text for text in found)


def assert_ordinary_programs_find_nothing():
    """Follow-up steps of ordinary ops, with gradients, and by way of local tensors."""
    task = OverloadTask(
        "aten.mul.Tensor", (sample("mul.Tensor", numbers(4, 6), numbers(4, 6, seed=1)),), ((2,),), 0, "pairs"
    )
    (found,) = [result for result in validate_with_follow_ups(task, silent) if result.samples]
    assert found.suspects == {} and found.tried > 5


# As a part of a validation.


FEW = {name: STEPS[name] for name in ("tensor.rand", "DTensor.full_tensor")}
"""One of them raises on a CPU mesh (torch 2.13)."""


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(drawing, "STEPS", FEW)


def with_follow_ups(op):
    task = OverloadTask(f"aten.{op}", (sample(op, numbers(3)),), ((2,),), 0, "pairs")
    (found,) = [result for result in validate_with_follow_ups(task, silent) if result.samples]
    return found


@pytest.fixture(scope="module")
def copy():
    """The result for a copy, with public programs of a few names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "STEPS", FEW)
        return with_follow_ups("clone.default")


@pytest.mark.slow
def test_they_run_with_a_copy_alone_and_findings_name_the_public_call(few, copy):
    other = with_follow_ups("neg.default")
    (name,) = [name for name in copy.suspects if name.startswith("tensor.")]
    first = copy.suspects[name][0]
    assert name == "tensor.rand: every rank raises AssertionError: -"
    assert first.name.startswith("rand(x.shape, dtype=torch.float64, device_mesh=mesh, placements=[")
    assert first.instance.verdict is Verdict.REFUSED
    assert copy.untestable == WITHOUT_PROGRAMS and other.untestable == {}
    assert not any(name.startswith("tensor.") for name in other.suspects)


@pytest.mark.slow
def test_on_meshes_of_two_axes_they_run_too(few):
    task = OverloadTask("aten.clone.default", (sample("clone.default", numbers(4, 4)),), ((2, 2),), 0, "meshes")
    (found,) = [result for result in validate_on_meshes(task, silent) if result.samples]
    (first, *_) = found.suspects["tensor.rand: every rank raises AssertionError: -"]
    assert first.program.mesh == (2, 2)


def test_rules_that_programs_register_are_gone_after_their_run():
    before = dtensor.registered_overloads()
    assert wrong(programs_of("experimental.register_sharding")) == {}
    assert wrong(programs_of("experimental.register_sharding")) == {}  # the op exists already, and gets its rules again
    assert dtensor.registered_overloads() == before


def test_an_error_in_the_context_of_a_loss_does_not_affect_later_programs():
    """torch 2.13: `loss_parallel` stays on after an exception, which is found; the program switches it off itself."""
    every = programs_of("parallel.loss_parallel", turns=4)
    one = [p for p in every if "an exception within" in p.then][:1]
    others = [p for p in every if "an exception within" not in p.then and "a target ignored" not in p.then][:2]
    assert wrong(others) == {}
    assert len(wrong(one)) == 1
    x = torch.ones(3, 4)
    assert torch.nn.functional.cross_entropy(x, torch.tensor([0, 1, 2])) > 0
    assert wrong(others) == {}


@pytest.mark.slow
def test_a_finding_is_named_and_filed_by_its_public_call(copy):
    first = copy.suspects["tensor.rand: every rank raises AssertionError: -"][0]
    finding = finding_of_candidate(first, Verdict.REFUSED, first.instance.evidence.reason)
    assert finding.name == str(first.program)
    assert call_text(finding).startswith("x = ") and file_name(finding).startswith("rand_x_shape_dtype_torch_float64_")


def test_a_sequence_has_three_dims():
    (step, *_) = [s for s in public_steps("parallel.SequenceParallel", 1) if "LayerNorm" in s.call]
    with pytest.raises(ValueError, match="three dims, and this tensor has 2"):
        follow_up(PUBLIC + step.call).apply([torch.ones(2, 3)])


@pytest.mark.parametrize("shape", drawing.SHAPES[drawing.INDICES])
def test_the_largest_index_is_not_the_same_on_all_ranks(shape):
    x = drawing._sample(drawing.INDICES, shape, torch.int64).tensors[0]
    assert len({int(piece.max()) for piece in x.chunk(2)}) == 2
    assert int(x.min()) >= 0 and int(x.max()) < drawing.FIRST_ROWS


def test_programs_run_in_batches_and_each_is_announced():
    sizes, began = [], []
    programs = drawing.draw_public_programs((2,), seed=0)[: 2 * drawing.BATCH + 1]

    def play(batch):
        sizes.append(len(batch))
        return [(program, None) for program in batch]

    assert [program for program, _ in drawing.in_batches(programs, play, began.append)] == programs
    assert (sizes, began) == ([drawing.BATCH, drawing.BATCH, 1], [0, 1, 2, 3])
    assert drawing.in_batches([], play, began.append) == [] and began[-1] == 0

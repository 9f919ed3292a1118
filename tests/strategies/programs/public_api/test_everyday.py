"""What Python does with a tensor, functions with their flags, submeshes whose rows differ: planted faults that these programs find alone."""

import copy
import operator
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, debug, distribute_tensor, experimental
from torch.distributed.tensor.parallel import input_reshard
from torch.nn import functional as F  # noqa: N812  # its usual name

import localtensor as lt
from strategies.model.kernels import REJECTIONS
from strategies.model.rule import PUBLIC, Program
from strategies.programs.public_api import (
    drawing,
    function_calls,
    function_steps,
    python_calls,
    python_steps,
    table,
    tensor_calls,
)
from strategies.programs.public_api.table import STEPS, public_step, public_steps
from strategies.programs.run.follow_ups import follow_up
from strategies.programs.run.real_run import run_simulated_programs

_OURS = (
    "torch.",
    "debug.",
    "parallel.input_reshard",
    "amp.autocast",
    "device_mesh.DeviceMesh, ",
    "experimental.context_parallel",
)
OURS = {name for name in STEPS if name.startswith(_OURS)} | table.TWO_AXES


def found_in(programs):
    """The programs that are wrong, by their text, with what is wrong."""
    played = zip(programs, run_simulated_programs(programs), strict=True)
    return {str(p): f.wrong or f.refused for p, f in played if f.wrong or drawing.is_refused(p, f.refused)}


def programs_of(name, turns, mesh=None):
    mesh = mesh or ((2, 2) if name in table.TWO_AXES else (3,) if name.endswith("some ranks") else (2,))
    drawn = (p for turn in range(turns) for p in drawing.draw_public_programs(mesh, seed=0, turn=turn))
    return [p for p in drawn if public_step(p.then)[0] == name]


# Planted faults: each is one of DTensors alone, so that the twin is right.


def on_dtensors(function, fault):
    """The function, but for a first argument that is a DTensor, of which the `fault` is the result."""

    def faulty(x, *args, **options):
        return fault(x, *args, **options) if isinstance(x, DTensor) else function(x, *args, **options)

    return faulty


def counts_its_own_elements(patch):
    patch.setattr(DTensor, "numel", lambda self: self.to_local().numel(), raising=False)


def has_no_imaginary_numbers(patch):
    patch.setattr(DTensor, "__complex__", lambda self: 0j, raising=False)


def swaps_nothing(patch):
    patch.setattr(torch.utils, "swap_tensors", on_dtensors(torch.utils.swap_tensors, lambda x, y: None))


def keeps_all_weights(patch):
    patch.setattr(nn.init, "ones_", on_dtensors(nn.init.ones_, lambda x: x))


def is_its_own_copy(patch):
    patch.setattr(copy, "deepcopy", on_dtensors(copy.deepcopy, lambda x: x))


def makes_zeros_of_ones(patch):
    patch.setattr(DTensor, "new_ones", lambda self, *args, **options: self.new_zeros(*args, **options), raising=False)


def forgets_hooks(patch):
    patch.setattr(DTensor, "register_hook", lambda self, hook: None, raising=False)


def adds_to_a_copy(patch):
    patch.setattr(operator, "iadd", on_dtensors(operator.iadd, lambda x, y: x + y))


def ignores_an_ellipsis(patch):
    own = Tensor.__getitem__
    patch.setattr(DTensor, "__getitem__", lambda self, i: self if i is Ellipsis else own(self, i), raising=False)
    patch.setattr(DTensor, "__setitem__", lambda self, i, v: None, raising=False)


def compares_pieces(patch):
    patch.setattr(DTensor, "equal", lambda self, other: self.to_local().equal(other.to_local()), raising=False)


def takes_all_for_close(patch):
    patch.setattr(torch.testing, "assert_close", on_dtensors(torch.testing.assert_close, lambda x, y: None))


def looks_at_its_own_piece(patch):
    patch.setattr(DTensor, "__contains__", lambda self, value: value > 999, raising=False)


def forgets(name, flag):
    def plant(patch):
        own = getattr(F, name)

        def without(*args, **options):
            if isinstance(args[0], DTensor):
                options.pop(flag, None)
            return own(*args, **options)

        patch.setattr(F, name, without)

    return plant


def sums_over_the_world(patch):
    """A mesh of one axis is taken for the world: wrong only where it is a submesh."""
    own = Partial._reduce_value

    def reduce_value(self, tensor, mesh, mesh_dim):
        if mesh.ndim > 1:
            return own(self, tensor, mesh, mesh_dim)
        return funcol.all_reduce(tensor, reduceOp=self.reduce_op, group=dist.group.WORLD)

    patch.setattr(Partial, "_reduce_value", reduce_value)


def skips_no_row_alone(patch):
    own = torch.amp.GradScaler.step

    def step(self, optimizer, *args):
        (first, *_) = optimizer.param_groups[0]["params"]
        is_part = isinstance(first, DTensor) and first.device_mesh.size() < dist.get_world_size()
        if is_part and not all_finite(first.grad):
            first.grad = first.grad / 0
        return own(self, optimizer, *args)

    def all_finite(gradient):
        seen = gradient.to_local().isfinite().all().to(torch.float32)
        return bool(funcol.all_reduce(seen, "min", dist.group.WORLD))

    patch.setattr(torch.amp.GradScaler, "step", step)


def restores_twice_as_much(patch):
    own = input_reshard._unpack_hook_tp
    patch.setattr(input_reshard, "_unpack_hook_tp", lambda mesh, dim, x: own(mesh, dim, x) * 2)


def doubles_what_it_watches(patch):
    own = debug.CommDebugMode.__torch_dispatch__

    def dispatch(self, func, types, args=(), kwargs=None):
        out = own(self, func, types, args, kwargs)
        return out * 2 if func is torch.ops.aten.sum.dim_IntList else out

    patch.setattr(debug.CommDebugMode, "__torch_dispatch__", dispatch)


def doubles_a_loss_in_inference(patch):
    own = torch.nn.functional.mse_loss

    def loss(a, b, **options):
        twice = torch.is_inference_mode_enabled() and isinstance(a, DTensor)
        return own(a, b, **options) * (2 if twice else 1)

    patch.setattr(torch.nn.functional, "mse_loss", loss)


def gives_the_view_another_piece(patch):
    """The view that is `out` gets the right piece in a memory of its own: its base keeps the zeros."""
    own = torch.exp

    def into(x, out):
        out._local_tensor = own(x).redistribute(placements=out.placements).to_local()
        return out

    patch.setattr(torch, "exp", on_dtensors(own, into))


def doubles_a_composed_function(patch):
    own = torch.trapezoid
    patch.setattr(torch, "trapezoid", on_dtensors(own, lambda x: own(x) * 2))


def adds_what_is_plain(patch):
    own = torch.maximum
    patch.setattr(torch, "maximum", on_dtensors(own, lambda x, y: own(x, y) + (not isinstance(y, DTensor))))


def takes_pieces_of_another_mesh(patch):
    own = F.l1_loss

    def loss(a, b, **options):
        if isinstance(a, DTensor) and a.device_mesh != b.device_mesh:
            b = DTensor.from_local(b.to_local(), a.device_mesh, a.placements)
        return own(a, b, **options)

    patch.setattr(F, "l1_loss", loss)


def takes_the_first_rank_for_the_least(patch):
    """Right on every mesh whose ranks are in the order of their numbers."""
    own = torch.Tensor.tril

    def lower(x):
        ranks = x.device_mesh.mesh.flatten().tolist()
        return own(x) if ranks == sorted(ranks) else own(x) * 2

    patch.setattr(DTensor, "tril", lower, raising=False)


def loads_nothing(patch):
    patch.setattr(torch.distributed.checkpoint, "load", lambda state, checkpoint_id: None)


def leaves_buffers_cut(patch):
    own = experimental.context_parallel

    def context(mesh, buffers, buffer_seq_dims):
        return own(mesh, buffers=buffers, buffer_seq_dims=buffer_seq_dims, no_restore_buffers={*buffers})

    patch.setattr(experimental, "context_parallel", context)


def leaves_autocast(patch):
    own = F.linear

    def without(*args):
        with torch.autocast("cpu", enabled=False):
            return own(*args)

    patch.setattr(F, "linear", on_dtensors(own, without))


def overflows_in_half(patch):
    patch.setattr(DTensor, "std", lambda self, *args: self.sum() * float("inf"), raising=False)


FAULTS = [
    ("torch.Tensor, half precision", overflows_in_half, "x.std()"),
    ("torch.Tensor, what it tells", counts_its_own_elements, "x.numel()"),
    ("torch.Tensor, numbers", has_no_imaginary_numbers, "complex("),
    ("torch.Tensor, set", swaps_nothing, "swap_tensors(x, y)"),
    ("torch.Tensor, in a layer", keeps_all_weights, "nn.init.ones_"),
    ("torch.Tensor, copies", is_its_own_copy, "copy.deepcopy(x)"),
    ("torch.Tensor, factories", makes_zeros_of_ones, "new_ones("),
    ("torch.Tensor, gradients", forgets_hooks, "a hook of a"),
    ("torch.Tensor, operators", adds_to_a_copy, "iadd"),
    ("torch.Tensor, items", ignores_an_ellipsis, "] = -2"),
    ("torch.Tensor, comparisons", compares_pieces, "x.equal(y)"),
    ("torch.Tensor, comparisons", takes_all_for_close, "assert_close(x, y)"),
    ("torch.Tensor, comparisons", looks_at_its_own_piece, "a number in x"),
    ("torch.nn.functional, pointwise", forgets("softplus", "beta"), "beta=2.0"),
    ("torch.nn.functional, layers", forgets("embedding", "padding_idx"), "padding_idx="),
    ("torch.nn.functional, losses", forgets("cross_entropy", "label_smoothing"), "label_smoothing=0.25"),
    ("torch.nn.functional, of space", forgets("interpolate", "mode"), "mode="),
    ("torch.inference_mode, losses", doubles_a_loss_in_inference, "F.mse_loss("),
    ("device_mesh.init_device_mesh, rows: reductions", sums_over_the_world, "Shard(0): v.sum("),
    ("device_mesh.init_device_mesh, rows: gradients", sums_over_the_world, "rows along axis"),
    ("torch.Tensor, functions", doubles_a_composed_function, "torch.trapezoid("),
    ("torch.inference_mode, of tensors", doubles_a_composed_function, "torch.trapezoid("),
    ("torch.Tensor, with plain numbers", adds_what_is_plain, "torch.maximum(a, torch.tensor"),
    ("torch.Tensor, views as out", gives_the_view_another_piece, "torch.exp("),
    ("device_mesh.init_device_mesh, rows that cross", takes_pieces_of_another_mesh, "F.l1_loss("),
    ("device_mesh.DeviceMesh, of some ranks", sums_over_the_world, "Shard(0): v.sum("),
    ("device_mesh.DeviceMesh, of ranks in another order", takes_the_first_rank_for_the_least, "v.tril()"),
    ("torch.distributed.checkpoint", loads_nothing, "load(v) into v of"),
    ("experimental.context_parallel", leaves_buffers_cut, "buffers=[b]"),
    ("amp.autocast", leaves_autocast, "F.linear(a"),
    ("device_mesh.init_device_mesh, rows: training", skips_no_row_alone, "row_scaled(v)"),
    ("parallel.input_reshard.input_reshard", restores_twice_as_much, "input_reshard("),
    ("debug.CommDebugMode", doubles_what_it_watches, "a.sum(0)"),
]
"""For each kind of programs: a fault that is planted, and what the programs that find it have in their text."""


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "plant", "text"), FAULTS, ids=[f"{plant.__name__}, {name}" for name, plant, _ in FAULTS]
)
def test_a_planted_fault_is_found_by_the_programs_of_its_name(monkeypatch, name, plant, text):
    programs = [p for p in programs_of(name, turns=12) if text in p.then]
    programs = list({p.then: p for p in programs}.values())[:8]
    assert programs
    before = found_in(programs)
    with monkeypatch.context() as patch:
        plant(patch)
        after = found_in(programs)
    assert any(before.get(program) != why for program, why in after.items())
    assert found_in(programs[:2]).keys() <= before.keys()


@pytest.mark.slow
def test_the_planted_faults_are_found_by_no_program_of_another_name(monkeypatch):
    others = []
    for mesh in ((2,), (2, 2)):
        firsts = {public_step(p.then)[0]: p for p in drawing.draw_public_programs(mesh, seed=0)}
        others += [p for name, p in firsts.items() if name not in OURS]
    before = found_in(others)
    with monkeypatch.context() as patch:
        for plant in {plant for _, plant, _ in FAULTS}:
            plant(patch)
        assert found_in(others) == before
    assert len(others) > 90


# What is drawn.


def test_every_flag_of_a_function_is_toggled_or_left_out_with_a_reason():
    toggled: dict[str, set[str]] = {}
    for uses in function_steps.FAMILIES.values():
        for key, use in uses.items():
            name = key.partition(" ")[0]
            flags = set(function_steps.flag_names(name))
            toggled.setdefault(name, set()).update(use.flags)
            calls = " ".join(step.call for step in function_steps.function(key, use))
            assert all(f"{flag}=" in calls for flag in flags & {*use.flags}), key
    for name, flags in toggled.items():
        assert set(function_steps.flag_names(name)) <= {*flags, *function_steps.LEFT_OUT}, name
    assert function_steps.flag_names("hardshrink") == []  # it is written in C


def test_a_flag_is_given_alone_and_with_all_others():
    made = function_steps.combinations({"a": ("1", "2"), "b": ("3",), "c": ("4",)})
    assert made[:5] == [{}, {"a": "1"}, {"a": "2"}, {"b": "3"}, {"c": "4"}]
    assert {"a": "2", "b": "3", "c": "4"} in made and {"b": "3", "c": "4"} in made


def test_the_functions_of_a_family_have_turns_on_all_meshes_together():
    drawn = {
        public_step(p.then)[1].aspect
        for turn, mesh in enumerate([(2,), (3,), (4,), (2, 2), (2, 3)])
        for p in drawing.draw_public_programs(mesh, seed=0, turn=turn)
        if public_step(p.then)[0].startswith("torch.nn.functional")
    }
    every = {name for uses in function_steps.FAMILIES.values() for name in uses}
    assert drawn == every and len(every) > 75


def test_a_new_function_and_a_new_name_of_a_module_have_no_programs_yet(monkeypatch):
    known = set(table.without_programs())
    monkeypatch.setattr(F, "everything", lambda x: x, raising=False)
    F.everything.__module__ = F.__name__
    monkeypatch.setattr(debug, "__all__", [*debug.__all__, "count"])
    monkeypatch.setattr(debug, "count", len, raising=False)
    assert set(table.without_programs()) - known == {"functional.everything", "debug.count"}


def test_what_a_tensor_tells_is_listed_from_its_class_without_addresses():
    names = python_steps.told_names()
    assert {"shape", "dim", "is_contiguous", "nbytes", "mT", "dtype"} <= set(names)
    assert not {"data_ptr", "cuda", "add_", "sort", "abs"} & set(names)
    assert names["shape"] == "x.shape" and names["dim"] == "x.dim()"


def test_what_python_gets_is_compared_as_tensors_and_texts():
    found = python_calls.told(2, True, 0.5, "a", [1, torch.ones(2)], torch.float32)
    assert [v.tolist() for v in found[:3]] == [2, True, 0.5] and found[2].dtype == torch.float64
    assert found[4].tolist() == 2 and found[6].tolist() == [1, 1]
    assert (found[3], found[7]) == ("a", "torch.float32")  # a finding names what differs


def test_rows_hold_other_values_and_the_results_of_both_are_compared():
    x = torch.arange(6.0).reshape(3, 2)
    (sums,) = function_calls.on_rows(x, 0, None, lambda v: [v.sum()])
    assert sums.tolist() == [15, 30 * 6 - 15 * 2]
    assert function_calls.row_values(torch.tensor([0, 4]), 1).max() < 5  # numbers of rows of a table


def on_submeshes(of):
    """What a use with a missing gradient gives on each row of two by two ranks, and on the first three of them."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.ones(4), mesh, [Replicate()] * 2, src_data_rank=None)
    return of(x)


def test_a_gradient_that_is_missing_on_a_submesh_is_a_result_and_no_crash():
    def on_rows(x):
        return function_calls.on_rows(x, 0, Replicate(), lambda v: [v, None])[1]

    def on_some(x):
        return function_calls.on_ranks(x, lambda every: every[:-1], Replicate(), lambda v: [v, None])[1]

    assert lt.run(on_submeshes, on_rows, ranks=4).values == (None,) * 4
    assert lt.run(on_submeshes, on_some, ranks=4).values == (None,) * 4


def test_a_refusal_that_torch_means_is_none_for_what_the_program_itself_does():
    def program(start):
        (then,) = [s.call for name in STEPS for s in public_steps(name, 1) if s.call == start]
        sample = drawing._sample("floats", (4, 4), torch.float32)
        return Program(sample, (2,), ((),), PUBLIC + then, 0)

    in_place = "RuntimeError: aten.relu_.default: in-place operations that require placement changes are not supported."
    assert not drawing.is_refused(program("F.relu(a, inplace=True)"), in_place)
    for own in (
        "F.normalize(a, dim=-1)",
        "torch.linalg.norm(a) and its gradient",
    ):  # what is written to within them is not theirs
        assert drawing.is_refused(program(own), in_place)
    assert not drawing.is_refused(program("x[(a > 0)[:, 0]] = -2"), in_place)
    assert not drawing.is_refused(
        program("x.tolist()"), "RuntimeError: .tolist() is not supported for tensor subclasses"
    )
    assert drawing.is_refused(program("x.tolist()"), "RuntimeError: another")
    with pytest.raises(TypeError, match="unsupported format string passed to Parameter") as error:
        format(torch.nn.Parameter(torch.ones(())), "d")
    assert not drawing.is_refused(program("format((x > 0).all(), 'd') of int64"), f"TypeError: {error.value}")
    reshapes = (
        "RuntimeError: This would reshape sharded dimension 0, which requires redistribution. Please redistribute it."
    )
    assert not drawing.is_refused(program("a.flatten() and its gradient"), reshapes)
    for own in ("F.normalize(a, dim=-1)", "torch.linalg.norm(a) and its gradient"):
        assert drawing.is_refused(program(own), reshapes)
    assert not drawing.is_refused(program("x.tolist()"), "")


def test_tensors_of_two_meshes_may_be_refused():
    (program, *_) = programs_of("device_mesh.init_device_mesh, rows that cross", turns=1)
    assert not drawing.is_refused(program, "RuntimeError: aten.add.Tensor got different meshes")


def test_hooks_that_a_module_leaves_on_after_an_error_do_not_affect_later_programs():
    """torch 2.13: `input_reshard` of a tensor of fewer dims raises within its hooks, which stay on."""
    (step,) = [s for s in public_steps("parallel.input_reshard.input_reshard", 1) if "LayerNorm(n), mesh, 1" in s.call]
    sample = drawing._sample("rows", (8, 6), torch.float32)
    program = Program(sample, (2,), ((torch.distributed.tensor.Replicate(),),), PUBLIC + step.call, 0)
    (found,) = run_simulated_programs([program])
    x = torch.ones(2, requires_grad=True)
    x.exp().sum().backward()
    assert x.grad is not None and (found.refused or torch.__version__ > "2.13.9")


def test_the_object_of_a_name_is_that_of_its_module():
    for then, value in (
        ("F.mse_loss(a, t)", F.mse_loss),
        ("x.tolist()", Tensor),
        ("a * 2 within CommDebugMode()", debug.CommDebugMode),
    ):
        assert table.public_object(PUBLIC + then) is value
    (step, *_) = public_steps("parallel.input_reshard.input_reshard", 1)
    assert table.public_object(PUBLIC + step.call) is input_reshard.input_reshard


def test_nearly_every_text_is_code_that_plain_tensors_take():
    refused, steps = 0, [s for name in sorted(OURS - table.TWO_AXES) for s in public_steps(name, 1)[::5]]
    for step in steps:
        dtype = drawing.DTYPES.get(step.takes, (torch.float64,))[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                x = drawing._sample(step.takes, drawing.SHAPES[step.takes][0], dtype).tensors[0]
                assert follow_up(PUBLIC + step.call).apply([x]), step.call
            except REJECTIONS:
                refused += 1
    assert refused < len(steps) / 25


@pytest.mark.parametrize(("shape", "layout", "text"), [
    ((2, 3), [Shard(-1)], "placements [Shard(dim=1)]"), ((2, 3), [Replicate()] * 2, "placements [Replicate()]"),
    ((2, 3), [Shard(0), Replicate()], "placements [Shard(dim=0), Replicate()]"),
], ids=str)  # fmt: skip
def test_a_plain_tensor_tells_the_layout_that_it_would_have(shape, layout, text):
    assert tensor_calls.layout_text(torch.ones(shape), layout) == text


def test_a_layout_that_no_tensor_of_these_dims_has_is_refused_as_torch_refuses_arguments():
    with pytest.raises(IndexError):
        tensor_calls.layout_text(torch.ones(()), [Shard(0)])
    assert IndexError in REJECTIONS

"""Every public name of DTensor has programs, or is listed without any with the reason."""

import pytest
import torch
from torch.distributed import device_mesh
from torch.distributed import tensor as dtensor
from torch.distributed.tensor import DTensor, experimental, parallel

from strategies.model.rule import PUBLIC
from strategies.programs.public_api import table
from strategies.programs.public_api.function_steps import FAMILIES, function_names

CLIPS = {"utils.clip_grad_norm_", "utils.clip_grad_value_"}


def test_every_public_name_of_this_torch_has_steps_or_a_reason_for_having_none():
    names = [f"tensor.{name}" for name in dtensor.__all__]
    names += [f"experimental.{name}" for name in experimental.__all__]
    names += [f"parallel.{name}" for name in parallel.__all__]
    names += [f"device_mesh.{name}" for name in device_mesh.__all__]
    names += [f"DTensor.{name}" for name in vars(DTensor) if not name.startswith("_")]
    names += [f"optim.{name}" for name, value in vars(torch.optim).items() if isinstance(value, type)]
    names += [f"functional.{name}" for name in function_names()]
    names += [
        "debug.CommDebugMode",
        "debug.visualize_sharding",
        "parallel.fsdp.DTensorExtensions",
        "parallel.input_reshard.input_reshard",
    ]
    stepped = {table.base_name(name) for name in table.STEPS}
    listed = {
        *(
            stepped
            - {
                "amp.GradScaler",
                "amp.autocast",
                "torch.Tensor",
                "torch.nn.functional",
                "torch.inference_mode",
                "torch.distributed.checkpoint",
            }
            - CLIPS
        ),
        *table.WITHOUT_PROGRAMS,
    }
    listed |= {f"functional.{name}" for uses in FAMILIES.values() for name in uses if f"functional.{name}" in names}
    new = set(names) - listed  # of a torch later than the one that the steps are of
    assert set(names) >= listed and (not new or not is_of_the_steps())
    first = {name: table.public_steps(name, 1 + (name in table.TWO_AXES))[0] for name in table.STEPS}
    assert all(callable(table.public_object(PUBLIC + step.call)) for step in first.values())
    assert table.without_programs().keys() - new == table.WITHOUT_PROGRAMS.keys()


def is_of_the_steps():
    return torch.__version__.split(".")[:2] == ["2", "13"]


def test_a_name_of_a_later_torch_is_listed_without_programs(monkeypatch):
    known = set(table.without_programs())
    monkeypatch.setattr(dtensor, "__all__", [*dtensor.__all__, "distribute_everything"])
    monkeypatch.setattr(DTensor, "to_nowhere", lambda self: self, raising=False)
    new = set(table.without_programs()) - known
    assert new == {"tensor.distribute_everything", "DTensor.to_nowhere"}
    assert "no program yet" in table.without_programs()["DTensor.to_nowhere"]


@pytest.mark.parametrize("name", table.STEPS)
def test_a_text_names_one_step_only(name):
    """The text is what workers and command lines get: it stands for the same code on any number of axes."""
    codes = {}
    for axes in (1, 2):
        for step in table.STEPS[name](axes):
            assert codes.setdefault(step.call, step.code) == step.code
            assert " | " not in step.call
            assert table.public_step(PUBLIC + step.call)[1].code == step.code


def test_a_text_that_is_no_step_is_refused_and_never_run():
    for text in ("DTensor.to_nowhere()", "__import__('os').getpid()", ""):
        with pytest.raises(ValueError, match="no public call"):
            table.public_step(PUBLIC + text)
    with pytest.raises(ValueError, match="no public call"):
        table.public_step("DTensor.to_local()")


def test_styles_take_meshes_of_one_axis_and_steps_have_two_at_most():
    assert table.public_steps("parallel.ColwiseParallel", 2) == ()
    assert table.public_steps("DTensor.to_local", 2) and table.public_steps("DTensor.to_local", 3) == ()


def test_a_script_gets_the_functions_that_its_code_uses_and_no_others():
    one = [text for text in table.sources("to_local(x, grad_placements=[Shard(0)])") if text.startswith("def ")]
    assert [text.split("(")[0] for text in one] == [
        "def eighths",
        "def leaf_of",
        "def number_along",
        "def piece_of",
        "def to_local",
    ]

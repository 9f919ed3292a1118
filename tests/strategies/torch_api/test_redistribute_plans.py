"""DTensor's private parts that its plans are read from: each is named here, so that a torch that lacks one is named."""

import importlib
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute

import strategies
from localtensor.errors import TorchChanged
from localtensor.layout.mesh import Mesh
from strategies.torch_api.redistribute_plans import (
    PlannerRefusal,
    can_flatten,
    dtensor_spec_of,
    planned_transforms,
    planning_mesh,
)
from tests.tools.plans.plan_pairs import spec

ROOM = Path(strategies.__file__).parent / "torch_api/redistribute_plans.py"


def module(name):
    return importlib.import_module(f"torch.distributed.{name}")


def redistribute():
    return module("tensor._redistribute")


def mesh():
    return planning_mesh(Mesh.of(2, 2))


def collapsed(layout):
    return layout.collapse() if hasattr(layout, "collapse") else layout.coalesce().nest  # the first since 2.13


PARTS = {
    "device_mesh.DeviceMesh(_init_backend=False, _rank=r)": mesh,
    "device_mesh.DeviceMesh._flatten_mapping": lambda: mesh()._get_root_mesh()._flatten_mapping,
    "device_mesh.DeviceMesh._get_slice_mesh_layout": lambda: collapsed(mesh()._get_slice_mesh_layout(("a", "b"))),
    "tensor._redistribute._gen_transform_infos_non_cached": lambda: redistribute()._gen_transform_infos_non_cached,
    "tensor._redistribute._optimize_transform_infos": lambda: redistribute()._optimize_transform_infos,
    "tensor._redistribute._TransformInfo": lambda: redistribute()._TransformInfo(0, (Replicate(), Shard(0)), [2]).mesh_dim,
    "tensor._redistribute._FlattenedTransformInfo":
        lambda: redistribute()._FlattenedTransformInfo.__dataclass_fields__["original_mesh_dims"],
    "tensor._redistribute.clear_redistribute_planner_cache": lambda: redistribute().clear_redistribute_planner_cache,
    "tensor._utils.assert_no_mixed_partial_types": lambda: module("tensor._utils").assert_no_mixed_partial_types,
    "tensor._dtensor_spec.DTensorSpec": lambda: module("tensor._dtensor_spec").DTensorSpec,
    "tensor._dtensor_spec.TensorMeta": lambda: module("tensor._dtensor_spec").TensorMeta,
    "tensor._dtensor_spec.ShardOrderEntry": lambda: module("tensor._dtensor_spec").ShardOrderEntry(0, (0,)),
    "tensor.placement_types.Partial._partition_value": lambda: Partial()._partition_value,
    "tensor.placement_types.Shard._to_partial_tensor": lambda: Shard(0)._to_partial_tensor,
}  # fmt: skip
BY_FEATURE = (
    "_flatten_mapping", "_get_slice_mesh_layout", "_optimize_transform_infos", "_FlattenedTransformInfo",
    "assert_no_mixed_partial_types", "_to_partial_tensor",
)  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_torch_still_has(name):
    try:
        found = PARTS[name]()
    except (ImportError, AttributeError, TypeError, KeyError) as gone:
        if name.endswith(BY_FEATURE):
            pytest.skip(f"torch {torch.__version__} has no {name}; we do without ({gone})")
        pytest.fail(f"torch {torch.__version__} has no {name} any more, which dtensor_transforms.py uses: {gone}")
    assert found is not None, f"{name} is None in torch {torch.__version__}"


def test_every_part_that_the_table_names_is_named_here_and_the_other_way_round():
    table = ROOM.read_text().split('"""')[1]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == list(PARTS)


def test_the_steps_come_as_dtensor_gives_them():
    found = planned_transforms(spec("S(0) S(0)"), spec("R S(0)"), graph=False)
    assert [str(one) for one in found] == ["1: S(0) -> R", "0: S(0) -> R", "1: R -> S(0)"]
    assert planned_transforms(spec("S(0) R"), spec("S(0) R"), graph=False) == ()


@pytest.mark.skipif(not can_flatten(), reason="this torch merges no steps")
def test_a_flattened_submesh_joins_steps_and_only_where_there_is_one():
    src, dst = spec("S(0) S(0)"), spec("R R")
    assert [one.axes for one in planned_transforms(src, dst, graph=False, flattened=[(0, 1)])] == [(0, 1)]
    assert [one.axes for one in planned_transforms(src, dst, graph=False)] == [(1,), (0,)]
    of_three = [spec(text, (2, 2, 2)) for text in ("S(0) S(0) S(0)", "R R R")]
    assert [one.axes for one in planned_transforms(*of_three, graph=False, flattened=[(1, 2)])] == [(2,), (1,), (0,)]


@pytest.mark.parametrize(("src", "dst", "what"), [
    ("R R", "P(product) R", "product"), ("P(sum) P(max)", "R R", "ixed"), ("P(sum) R", "P(max) R", "artial"),
    ("R R", "P(sum) P(max)", "ixed"),
])  # fmt: skip
def test_what_dtensor_refuses_is_a_refusal_with_its_words(src, dst, what):
    with pytest.raises(PlannerRefusal, match=what):
        planned_transforms(spec(src), spec(dst), graph=False)


def test_a_step_that_dtensor_cannot_take_is_refused_before_it_is_taken():
    if hasattr(Shard, "_to_partial_tensor"):
        assert planned_transforms(spec("S(0) R"), spec("P(sum) R"), graph=False)
    else:
        with pytest.raises(PlannerRefusal, match=r"from S\(0\) to P\(sum\) not supported|redistribute from"):
            planned_transforms(spec("S(0) R"), spec("P(sum) R"), graph=False)
    lonely = [spec(text, (1, 2)) for text in ("S(0) R", "P(max) R")]
    assert [str(one) for one in planned_transforms(*lonely, graph=False)] == ["0: S(0) -> P(max)"]


def test_a_plan_does_not_depend_on_what_was_asked_before():
    asked = spec("S(1) S(0)"), spec("S(0) S(0)")
    before = planned_transforms(*asked, graph=True)
    planned_transforms(spec("S(0) R"), spec("SS(0,2) S(0)"), graph=True)
    assert planned_transforms(*asked, graph=True) == before


@pytest.mark.parametrize("other", [lambda src, dst: (), lambda src, dst, graph, mesh: (), None])
def test_a_torch_whose_planner_is_asked_in_another_way_is_named_and_has_refused_nothing(monkeypatch, other):
    if other is None:
        monkeypatch.delattr(_redistribute, "_gen_transform_infos_non_cached")
    else:
        monkeypatch.setattr(_redistribute, "_gen_transform_infos_non_cached", other)
    with pytest.raises(
        TorchChanged, match=r"tensor\._redistribute: its planner has another signature .*Use torch 2\.13"
    ):
        planned_transforms(spec("S(0) R"), spec("R R"), graph=False)


def test_a_type_error_from_within_dtensor_is_its_refusal(monkeypatch):
    monkeypatch.setattr(_redistribute, "_gen_transform_infos_non_cached", torchs_own_fault)
    with pytest.raises(PlannerRefusal, match=r"^TypeError: object of type 'int' has no len\(\)$"):
        planned_transforms(spec("S(0) R"), spec("R R"), graph=False)


def torchs_own_fault(src, dst, graph):
    return len(5)


def test_a_shard_order_and_strided_shards_reach_torch_as_it_writes_them():
    turned = dtensor_spec_of(spec("S(0) S(0)", order=((0, (1, 0)),)), mesh())
    assert re.sub(r"\s", "", str(turned.shard_order[0].mesh_dims)) == "(1,0)"
    strided = dtensor_spec_of(spec("SS(0,2) S(0)"), mesh())
    assert strided.use_strided_shard_as_shard_order is True
    assert (turned.tensor_meta.shape, turned.tensor_meta.stride) == (torch.Size([8, 8]), (8, 1))

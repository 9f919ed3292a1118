"""Also that each private part of torch that the room names is there."""

import contextlib
import functools
import weakref

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import LocalLRUCache

import localtensor as lt
from strategies.torch_api.mesh_and_caches import (
    NotCacheable,
    cached_propagation,
    clear_dtensor_caches,
    propagation_key,
    world_mesh,
)

PROPAGATOR = DTensor._op_dispatcher.sharding_propagator


def test_torch_has_the_parts():
    assert callable(PROPAGATOR.propagate_op_sharding_non_cached) and callable(PROPAGATOR.propagate_op_sharding)
    assert callable(PROPAGATOR._propagate_tensor_meta_non_cached)
    assert callable(LocalLRUCache) and {"output_spec"} <= set(OutputSharding.__dataclass_fields__)
    assert {"op", "args_schema", "kwargs_schema"} <= set(OpSchema.__dataclass_fields__)


@pytest.fixture
def asked(monkeypatch):
    """How often torch's propagator has been asked."""
    calls = []
    own = type(PROPAGATOR).propagate_op_sharding_non_cached
    monkeypatch.setattr(
        type(PROPAGATOR),
        "propagate_op_sharding_non_cached",
        lambda self, schema: calls.append(schema) or own(self, schema),
    )
    return calls


def spread(mesh, x, placement):
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def test_the_same_question_is_answered_once_though_torch_forgets(asked):
    with cached_propagation(), lt.LocalTensorMode(2):
        mesh = world_mesh("cpu", (2,), False)
        for _ in range(3):
            clear_dtensor_caches()
            assert (spread(mesh, torch.ones(3), Shard(0)) * 2).to_local().shape == (3,)
    assert len(asked) == 1


def test_questions_that_differ_are_told_apart(asked):
    with cached_propagation() as known, lt.LocalTensorMode(2):
        mesh, x = world_mesh("cpu", (2,), False), torch.ones(3)
        for given, by in [(x, 2), (x, 2.0), (x, True), (x, -0.0), (x, 0.0), (x.double(), 2), (torch.ones(4), 2)]:
            clear_dtensor_caches()
            spread(mesh, given, Shard(0)) * by
        clear_dtensor_caches()
        spread(mesh, x, Replicate()) * 2
    assert len(asked) == len(known) == 8


def test_what_a_result_looks_like_is_traced_once_for_all_placements(monkeypatch):
    traced = []
    own = type(PROPAGATOR)._propagate_tensor_meta_non_cached
    monkeypatch.setattr(
        type(PROPAGATOR), "_propagate_tensor_meta_non_cached",
        lambda self, schema: traced.append(schema) or own(self, schema),
    )  # fmt: skip
    with cached_propagation(), lt.LocalTensorMode(2):
        mesh = world_mesh("cpu", (2,), False)
        shapes = [(spread(mesh, torch.ones(2, 3), p) * 2).shape for p in (Shard(0), Shard(1), Replicate())]
    assert shapes == [(4, 3), (2, 6), (2, 3)] and len(traced) == 3  # the whole tensors differ
    traced.clear()
    with cached_propagation(), lt.LocalTensorMode(2):
        mesh = world_mesh("cpu", (2,), False)
        for piece, placement in [
            (torch.ones(2, 4), Shard(0)),
            (torch.ones(4, 2), Shard(1)),
            (torch.ones(4, 4), Replicate()),
        ]:
            assert (DTensor.from_local(piece, mesh, [placement], shape=(4, 4), stride=(4, 1)) * 2).shape == (4, 4)
    assert len(traced) == 1


def test_afterwards_torch_asks_as_before():
    before = PROPAGATOR.propagate_op_sharding
    with contextlib.suppress(KeyError), cached_propagation():
        assert PROPAGATOR.propagate_op_sharding is not before
        raise KeyError
    assert PROPAGATOR.propagate_op_sharding is before
    assert not {"propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"} & set(vars(PROPAGATOR))


def test_what_is_no_plain_value_is_not_kept():
    with pytest.raises(NotCacheable):
        propagation_key(OpSchema(torch.ops.aten.mul.Tensor, (object(),), {}))


def product(mesh):
    """The question about a product of matrices in float32."""
    x = spread(mesh, torch.ones(2, 4), Replicate())._spec
    y = spread(mesh, torch.ones(4, 2), Replicate())._spec
    return OpSchema(torch.ops.aten.mm.default, (x, y), {})


def test_what_is_found_out_under_autocast_is_no_answer_outside_of_it():
    with cached_propagation(), lt.LocalTensorMode(2):
        asked = product(world_mesh("cpu", (2,), False))

        def dtype():
            return PROPAGATOR.propagate_op_sharding_non_cached(asked).output_spec.tensor_meta.dtype

        with torch.autocast("cpu", dtype=torch.bfloat16):
            within = dtype()
        assert (within, dtype()) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("setting", [
    torch.no_grad, torch.inference_mode, FakeTensorMode, _redistribute.use_min_cost_redistribution_plan,
    _redistribute.disable_redistribute_transform_optimization,
    functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
])  # fmt: skip
def test_what_is_set_around_a_call_is_part_of_the_question(setting):
    asked = OpSchema(torch.ops.aten.mul.Tensor, (2,), {})
    before = propagation_key(asked)
    with setting():
        assert propagation_key(asked) != before
    assert propagation_key(asked) == before


def test_a_mesh_lives_as_long_as_it_is_part_of_a_question():
    class Mesh:
        """Whose identity another could have after it."""

    with lt.LocalTensorMode(2):
        spec = product(world_mesh("cpu", (2,), False)).args_schema[0]
    mesh = Mesh()
    kept = weakref.ref(mesh)
    asked = propagation_key(
        OpSchema(torch.ops.aten.neg.default, (type(spec)(mesh, (Replicate(),), tensor_meta=spec.tensor_meta),), {})
    )
    del mesh
    assert asked and kept() is not None

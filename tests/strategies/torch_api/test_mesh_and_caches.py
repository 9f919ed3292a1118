"""Also that each private part of torch that the module names is there."""

import contextlib
import functools
import inspect
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute, debug, distribute_tensor
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import LocalLRUCache

import localtensor as lt
from localtensor.processes.pool import Pool
from strategies.torch_api import mesh_and_caches
from strategies.torch_api.mesh_and_caches import (
    NotCacheable,
    averages_as_sums,
    cached_propagation,
    cached_traces,
    clear_dtensor_caches,
    propagation_key,
    world_mesh,
)


@pytest.mark.parametrize(("owner", "name"), [
    (DeviceMesh, "_flatten"), (debug, "_clear_sharding_prop_cache"), (_redistribute, "_gen_transform_infos"),
    (_redistribute, "clear_redistribute_planner_cache"), (functional, "all_reduce"),
    (DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding, "cache_clear"),
    (torch._C, "_clear_DTensor_sharding_propagator_cache"),
])  # fmt: skip
def test_torch_has_the_part(owner, name):
    assert callable(getattr(owner, name))


def test_a_mesh_of_all_ranks_and_the_flattened_one_beside_it():
    def body():
        flat, plain = world_mesh("cpu", (2, 3), True), world_mesh("cpu", (2, 3), False)
        names = []
        for mesh in (flat, plain):
            try:
                names.append(mesh["a_b"].size())
            except KeyError:
                names.append(None)
        return flat.shape, flat.mesh_dim_names, names

    assert set(map(str, lt.run(body, ranks=6, leftovers="ignore"))) == {str(((2, 3), ("a", "b"), [6, None]))}


def numbers_in(mesh):
    """The number of this rank in the mesh, and what its ranks give: their numbers among all ranks."""
    number = mesh_and_caches.number_in_mesh(mesh)
    return number, None if number is None else mesh_and_caches.gathered_on_mesh(dist.get_rank(), mesh)


def test_a_rank_has_its_number_in_each_mesh_and_only_that_mesh_is_asked():
    def body():
        mesh = DeviceMesh("cpu", torch.tensor([[5, 4, 3], [2, 1, 0]]), mesh_dim_names=("a", "b"))
        return numbers_in(mesh), numbers_in(mesh["a"]), numbers_in(mesh["b"]), numbers_in(DeviceMesh("cpu", [4, 1]))

    every = [5, 4, 3, 2, 1, 0]
    assert lt.run(body, ranks=6, leftovers="ignore").values[1] == ((4, every), (1, [4, 1]), (1, [2, 1, 0]), (1, [4, 1]))
    assert lt.run(body, ranks=6, leftovers="ignore").values[3] == (
        (2, every),
        (0, [3, 0]),
        (2, [5, 4, 3]),
        (None, None),
    )


def test_what_dtensor_remembers_is_forgotten():
    with lt.LocalTensorMode(2):
        mesh = world_mesh("cpu", (2,), False)
        DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False).full_tensor()
        assert _redistribute._gen_transform_infos.cache_info().currsize
        clear_dtensor_caches()
        assert not _redistribute._gen_transform_infos.cache_info().currsize


@pytest.mark.parametrize("known", [True, False], ids=["by its parts", "as torch does it"])
def test_what_dtensor_remembers_of_rules_is_forgotten(known, monkeypatch):
    if not known:
        clear = torch._C._clear_DTensor_sharding_propagator_cache
        monkeypatch.delattr(torch._C, "_clear_DTensor_sharding_propagator_cache")
        monkeypatch.setattr(debug, "_clear_fast_path_sharding_prop_cache", clear)
    seen = torch._C._get_DTensor_sharding_propagator_cache_stats

    def body():
        x = DTensor.from_local(torch.ones(2), world_mesh("cpu", (2,), False), [Shard(0)], run_check=False)
        x.neg()
        x.neg()
        before = seen()
        clear_dtensor_caches()
        return before, seen()

    assert [(before[0] > 0, after) for before, after in lt.run(body, ranks=2, leftovers="ignore")] == [
        (True, (0, 0))
    ] * 2


def test_nccl_keeps_its_own_average():
    own = functional.all_reduce
    with averages_as_sums("nccl"):
        assert functional.all_reduce is own
    with averages_as_sums("simulated"):
        assert functional.all_reduce is not own
    assert functional.all_reduce is own


def test_an_average_of_complex_numbers_is_exact():
    """torch divides 49 by 7 so that 7.000000477 is left."""
    total = torch.tensor([49 + 14j, 0], dtype=torch.complex64)

    def body():
        return functional.all_reduce(total if dist.get_rank() == 0 else 0 * total, "avg", dist.group.WORLD)

    with averages_as_sums("simulated"):
        found = lt.run(body, ranks=7, leftovers="ignore")
    assert [x.tolist() for x in found] == [[7 + 2j, 0]] * 7


def averaged(pairs):
    """On each rank: averages of an int and of a float on every rank, and of shards."""
    mesh = world_mesh("cpu", (2, 2), False)
    with averages_as_sums(dist.get_backend()):
        found = []
        for x in pairs:
            spread = DTensor.from_local(x * (dist.get_rank() + 1), mesh, [Partial("avg")] * 2, run_check=False)
            found += [spread.full_tensor(), spread.redistribute(placements=[Shard(0), Shard(0)]).full_tensor()]
    own = functional.all_reduce.__name__ == "all_reduce"
    return found, own


def test_gloo_averages_while_inside():
    pairs = [torch.tensor([2.0, 4.0, 8.0]), torch.tensor([2, 4, 8])]
    with Pool(4, timeout=60) as pool:
        for outcome in pool.call(averaged, [(pairs,)] * 4):
            found, own = outcome.value
            assert own
            assert [x.tolist() for x in found[:2]] == [[5.0, 10.0, 20.0]] * 2
            assert [x.dtype for x in found[2:]] == [torch.int64] * 2


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


def test_questions_that_differ_are_distinguished(asked):
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


TRACED = "self" in inspect.signature(DecompShardingStrategy._propagate_through_decomp).parameters


@pytest.mark.skipif(not TRACED, reason="this torch has one tracer for all propagators, which is left as it is")
class TestTraces:
    @pytest.fixture
    def traced(self, monkeypatch):
        own, seen = DecompShardingStrategy._propagate_through_decomp, []

        def trace(self, op_schema, placement, mesh):
            seen.append(placement)
            return own(self, op_schema, placement, mesh)

        monkeypatch.setattr(DecompShardingStrategy, "_propagate_through_decomp", trace)
        return seen

    def results(self, mesh_shape, *, size=4):
        """The placements of a loss, which DTensor traces, on this mesh; nothing is remembered from the call before."""
        with lt.LocalTensorMode(math.prod(mesh_shape)):
            clear_dtensor_caches()
            mesh = world_mesh("cpu", mesh_shape, False)
            x = distribute_tensor(torch.ones(size), mesh, [Shard(0)] + [Replicate()] * (len(mesh_shape) - 1))
            return torch.nn.functional.smooth_l1_loss(x, x, reduction="none").placements

    def test_a_decomposition_is_traced_once_for_all_meshes(self, traced):
        plain = [self.results(shape) for shape in [(2,), (3,), (2, 2)]]
        before = len(traced)
        traced.clear()
        with cached_traces() as known:
            assert [self.results(shape) for shape in [(2,), (3,), (2, 2)]] == plain
            assert len(traced) == len(set(traced)) == len(known) < before
            self.results((2,), size=5)
        assert len(traced) == 2 * len(set(traced))
        traced.clear()
        self.results((2,))
        assert traced  # afterwards torch traces again

    def test_the_metadata_of_the_ops_in_a_trace_are_found_once_for_all_placements(self, monkeypatch):
        asked, original = [], PROPAGATOR._propagate_tensor_meta_non_cached

        def find(schema):
            asked.append(propagation_key(schema, placed=False))
            return original(schema)

        monkeypatch.setattr(PROPAGATOR, "_propagate_tensor_meta_non_cached", find)
        plain = self.results((2,))
        before = len(asked)
        asked.clear()
        with cached_traces():
            assert self.results((2,)) == plain
        assert 0 < len(asked) == len(set(asked)) < before

    def test_a_block_within_another_has_its_traces(self, traced):
        with cached_traces() as outer:
            self.results((2,))
            traced.clear()
            with cached_traces() as inner:
                self.results((3,))
            self.results((2,))
            assert traced == [] and inner is outer

    def test_when_there_are_too_many_all_are_forgotten(self, traced, monkeypatch):
        monkeypatch.setattr(mesh_and_caches, "MOST_KEPT", 2)
        plain = self.results((2,))
        with cached_traces() as known:
            assert [self.results((2,)) for _ in range(2)] == [plain] * 2
            assert 0 < len(known) <= 2
        table = {}
        answer = mesh_and_caches._cached(table, str, lambda schema: None)
        assert [answer(n) for n in range(5)] == [None] * 5 and 0 < len(table) <= 2

    def test_a_rule_that_is_registered_meanwhile_is_asked(self, traced, monkeypatch):
        with cached_traces():
            self.results((2,))
            once = len(traced)
            rules = dict(PROPAGATOR.op_strategy_funcs)
            monkeypatch.setattr(PROPAGATOR, "op_strategy_funcs", {**rules, next(iter(rules)): lambda schema: None})
            self.results((2,))
        assert len(traced) == 2 * once

    def test_what_a_trace_raises_is_raised_again(self, monkeypatch):
        tries = []

        def refuse(self, op_schema, placement, mesh):
            tries.append(placement)
            raise KeyError("no such dim")

        monkeypatch.setattr(DecompShardingStrategy, "_propagate_through_decomp", refuse)
        with cached_traces():
            for _ in range(2):
                with pytest.raises(NotImplementedError, match="smooth_l1_loss"):
                    self.results((2,))
        assert len(tries) == len(set(tries))

"""Also that each private part of torch that the room names is there."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, _redistribute, debug

import localtensor as lt
from localtensor.processes.pool import Pool
from strategies.torch_api.mesh_and_caches import averages_as_sums, clear_dtensor_caches, world_mesh


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

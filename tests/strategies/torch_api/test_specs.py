"""Specs as torch's and back, on each of torch's two readings of strided shards."""

import inspect
import itertools
import math

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from localtensor.layout.mesh import Mesh
from localtensor.layout.shard_order import lies_alike
from localtensor.layout.shards import has_one_meaning
from localtensor.layout.spec import Spec, StridedShard, parse
from strategies.torch_api.specs import NoSuchSpec, device_mesh, mesh_of, of_torch, to_torch, with_decoded_order

MESH = Mesh.of(dp=3, tp=2)


def of(rows, *placements, mesh=MESH, order=()):
    return Spec(mesh, tuple(map(parse, placements)), (rows, 4), torch.float32, order)


def there(spec, **more):
    return to_torch(spec, device_mesh(spec.mesh), **more)


def test_torch_has_the_parts_that_are_asked_for():
    taken = inspect.signature(DTensorSpec).parameters
    assert list(taken) == ["mesh", "placements", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order"]
    assert TensorMeta._fields == ("shape", "stride", "dtype")
    assert ShardOrderEntry._fields == ("tensor_dim", "mesh_dims")
    assert {"_init_backend", "_rank", "mesh_dim_names"} <= set(inspect.signature(DeviceMesh).parameters)
    assert "_spec" in DTensor.__slots__ or hasattr(DTensor, "_spec")


@pytest.mark.parametrize("spec", [
    of(7, "S(0)", "R"), of(7, "S(0)", "S(1)"), of(5, "P(sum)", "P(avg)"), of(7, "S(0)", "S(0)"),
    of(7, "S(0)", "S(0)", order=((0, (1, 0)),)), of(12, "SS(0,2)", "S(0)"), of(7, "SS(0,2)", "R"), of(0, "SS(1,3)", "S(0)"),
], ids=str)  # fmt: skip
def test_a_spec_comes_back_as_it_went(spec):
    made = there(spec)
    assert made.placements == spec.placements and made.tensor_meta == TensorMeta(
        torch.Size(spec.shape), (4, 1), torch.float32
    )
    assert of_torch(made) == spec


def test_an_order_is_torchs_own():
    made = there(of(8, "S(0)", "S(0)", order=((0, (1, 0)),)))
    assert made.shard_order == (ShardOrderEntry(0, (1, 0)),) and not made.use_strided_shard_as_shard_order
    assert there(of(8, "S(0)", "S(1)")).shard_order == (ShardOrderEntry(0, (0,)), ShardOrderEntry(1, (1,)))
    assert there(of(8, "R", "R")).shard_order == ()


def test_a_plain_spec_is_the_one_that_torch_makes_by_itself():
    for placements in itertools.product(("R", "S(0)", "S(1)", "P(sum)"), repeat=2):
        spec = of(8, *placements)
        own = DTensorSpec(device_mesh(MESH), spec.placements, TensorMeta(torch.Size((8, 4)), (4, 1), torch.float32))
        assert there(spec) == own and hash(there(spec)) == hash(own)


def test_strided_shards_are_decoded_where_that_is_the_same_and_cut_where_it_is_not():
    even, uneven = of(12, "SS(0,2)", "S(0)"), of(7, "SS(0,2)", "S(0)")
    assert there(even).use_strided_shard_as_shard_order and there(even).shard_order is None
    assert not there(uneven).use_strided_shard_as_shard_order
    assert there(uneven, reading="order").use_strided_shard_as_shard_order
    assert not there(even, reading="cuts").use_strided_shard_as_shard_order
    assert there(of(7, "SS(0,5)", "R")).use_strided_shard_as_shard_order  # torch's own default, and one meaning
    assert of_torch(there(uneven)) == uneven  # torch was told not to decode them


def test_strided_shards_with_two_readings_are_refused_until_one_is_named():
    uneven = of(7, "SS(0,2)", "S(0)")
    given = there(uneven, reading="order")
    with pytest.raises(NoSuchSpec, match=r"^of_torch: spec: .*: distribute_tensor cuts it from left to right, and "
                       r"redistribute reads it in another order\. Pass reading='cuts' or reading='order'\.$"):  # fmt: skip
        of_torch(given)
    assert of_torch(given, reading="cuts") == uneven
    assert of_torch(given, reading="order") == of(7, "S(0)", "S(0)", order=((0, (1, 0)),))


def test_the_order_is_the_one_that_torch_decodes():
    decode = DTensorSpec._maybe_convert_StridedShard_to_shard_order
    sizes = (2, 3, 2)
    mesh, tried = Mesh.of(*sizes), 0
    for factors in itertools.product((0, 1, 2, 3, 4, 6), repeat=3):
        placements = tuple(StridedShard(0, split_factor=factor) if factor else Replicate() for factor in factors)
        if not any(factors):
            continue
        spec, theirs = Spec(mesh, placements, (24,), torch.float32), decode(placements, device_mesh(mesh))
        if theirs is None:
            with pytest.raises(NoSuchSpec, match="the split factors of dim 0 encode no order of its axes"):
                with_decoded_order(spec)
        else:
            tried += 1
            assert with_decoded_order(spec).cut_by(0) == theirs[0].mesh_dims
            assert lies_alike(with_decoded_order(spec), spec) == has_one_meaning(
                placements, (24,), torch.float32, sizes
            )
    assert tried == 15  # one axis alone, two, and all three, in every order


@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2), (3, 2, 2)], ids=str)
def test_an_order_is_written_in_strided_shards_as_torch_does(sizes):
    from localtensor.layout.shard_order import strided

    mesh = Mesh.of(*sizes)
    for order in itertools.permutations(range(len(sizes))):
        spec = Spec(mesh, (Shard(0),) * len(sizes), (math.prod(sizes),), torch.float32, ((0, order),))
        made = there(spec)
        theirs = DTensorSpec._convert_shard_order_to_StridedShard(made.shard_order, made.placements, made.mesh)
        assert strided(spec).placements == theirs


def test_both_an_order_and_strided_shards_is_more_than_torch_decodes():
    both = of(24, "SS(0,3)", "S(0)", order=((0, (1, 0)),))
    assert of_torch(there(both)) == both
    with pytest.raises(NoSuchSpec, match=r"torch takes a shard order, or strided shards that encode one, but not both"):
        there(both, reading="order")
    with pytest.raises(NoSuchSpec, match=r"encode no order of its axes, and torch's redistribute finds none\. Read it"):
        of_torch(there(both), reading="order")


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        NoSuchSpec, match=r"^to_torch: mesh: .*: it has the sizes \(2,\), and the spec is on Mesh\(dp=3, tp=2\)"
    ):
        to_torch(of(8, "R", "R"), device_mesh(Mesh.of(2)))
    with pytest.raises(NoSuchSpec, match=r"^of_torch: mesh: Mesh\(a=2\): the spec is on a mesh of the sizes \(3, 2\)"):
        of_torch(there(of(8, "R", "R")), Mesh.of(2))
    with pytest.raises(NoSuchSpec, match=r"^of_torch: spec: .*: its sizes are not known\. Give a DTensorSpec"):
        of_torch(DTensorSpec(device_mesh(MESH), (Replicate(), Replicate())))
    for call in (
        lambda: there(of(8, "R", "R"), reading="both"),
        lambda: of_torch(there(of(8, "R", "R")), reading="both"),
    ):
        with pytest.raises(
            NoSuchSpec, match=r"reading: 'both': strided shards are read as cuts or as order\. Pass one"
        ):
            call()


def test_symbols_are_refused_both_ways():
    size = ShapeEnv().create_unbacked_symint()
    with pytest.raises(NoSuchSpec, match=r"^to_torch: spec: .*: a size is a symbol\. Give sizes in numbers\.$"):
        there(of(size, "S(0)", "R"))
    symbols = DTensorSpec(device_mesh(MESH), (Shard(0), Replicate()), TensorMeta((size, 4), (4, 1), torch.float32))
    with pytest.raises(NoSuchSpec, match=r"its sizes are not known\. Give a DTensorSpec with tensor_meta of plain"):
        of_torch(symbols)


def test_axes_have_torchs_names_or_those_that_are_given():
    assert mesh_of(device_mesh(MESH)) == MESH
    unnamed = DeviceMesh("cpu", torch.arange(6).reshape(3, 2), _init_backend=False, _rank=0)
    assert mesh_of(unnamed) == Mesh.of(3, 2)
    assert of_torch(to_torch(of(8, "S(0)", "R"), unnamed), MESH) == of(8, "S(0)", "R")


def test_a_mesh_without_processes_knows_where_its_rank_stands():
    assert [tuple(device_mesh(MESH, rank).get_coordinate()) for rank in (0, 3, 5)] == [(0, 0), (1, 1), (2, 1)]


@pytest.mark.mesh((2, 2))
def test_a_dtensor_tells_its_spec(mesh):
    x = DTensor.from_local(torch.ones(2, 3), mesh, (Shard(0), Partial("sum")))
    assert of_torch(x._spec) == Spec(mesh_of(mesh), (Shard(0), Partial("sum")), (4, 3), torch.float32)

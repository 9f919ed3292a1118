"""Each part that a sweep replaces gives the answers of torch's own."""

import inspect
import itertools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, _decompositions
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import _view_ops, utils
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree

from strategies.torch_api import faster_propagation as faster
from strategies.torch_api.dtensor import one_axis_mesh
from strategies.torch_api.faster_propagation import faster_propagation, plain_tree_map

META = TensorMeta(torch.Size([4, 6]), (6, 1), torch.float32)
OTHER = TensorMeta(torch.Size([4, 6]), (1, 4), torch.float64)
KINDS = Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("max"), _StridedShard(0, split_factor=2)


class Own(Partial):
    """A placement of a program, without a hash."""

    __hash__ = None  # type: ignore[assignment]


def fields(*args, **kwargs):
    return dict(vars(DTensorSpec(*args, **kwargs)))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (DTensorSpec, "__init__"),
        (_view_ops, "view_groups"),
        (utils, "redistribute_cost"),
        (_decompositions, "tree_map"),
    ],
    ids=["specs", "views", "costs", "trees"],
)
def test_each_part_is_replaced_and_put_back(owner, name):
    own = getattr(owner, name)
    with faster_propagation():
        assert getattr(owner, name) is not own, (
            f"torch {torch.__version__}: {name} is another one now; the sweep is right without it, and slower"
        )
    assert getattr(owner, name) is own


def test_specs_are_those_of_torch():
    """In all of their fields, made anew and made again, on one axis and on two."""
    places = [(p,) for p in KINDS] + list(itertools.product(KINDS[:5], repeat=2)) + [(Own("sum"),)]
    calls = [(mesh, p, meta) for p in places for mesh in ("a mesh", "another") for meta in (None, META, OTHER)]
    want = [fields(*call) for call in calls]
    with faster_propagation():
        assert [fields(*call) for call in calls] == want
        assert [fields(*call) for call in reversed(calls)] == want[::-1]
        assert vars(DTensorSpec("a mesh", [Shard(0)]))["placements"] == (Shard(0),)
        assert DTensorSpec("a mesh", (Own("sum"),)).placements[0].__class__ is Own
        with pytest.raises(TypeError):
            DTensorSpec("a mesh", (Replicate(),), META, no_such_argument=True)  # type: ignore[call-arg]
        with pytest.raises(AssertionError):
            DTensorSpec("a mesh", (Replicate(),), "no metadata")  # type: ignore[arg-type]


@pytest.mark.skipif(
    faster._FLAG not in inspect.signature(DTensorSpec).parameters, reason="torch has no such argument yet"
)
def test_specs_are_those_of_torch_however_they_read_strided_shards():
    places = [(p,) for p in KINDS] + [(Shard(0), Shard(0)), (Own("sum"),)]
    flags = [{}, *({faster._FLAG: flag} for flag in (None, False, True)), {"shard_order": None}]
    calls = [((mesh, p, meta), flag) for p in places for mesh in "ab" for meta in (None, META) for flag in flags]
    want = [fields(*call, **flag) for call, flag in calls]
    with faster_propagation():
        assert [fields(*call, **flag) for call, flag in calls] == want
        assert [fields(*call, **flag) for call, flag in reversed(calls)] == want[::-1]


def test_a_change_of_one_spec_is_none_of_the_next():
    with faster_propagation():
        first = DTensorSpec("a mesh", (Shard(0),), META)
        hash(first)
        first.placements = (Replicate(),)
        first.tensor_meta = OTHER
        assert fields("a mesh", (Shard(0),), META)["placements"] == (Shard(0),)
        assert DTensorSpec("a mesh", (Shard(0),)).tensor_meta is None


def cost(before, after):
    try:
        return utils.redistribute_cost(before, after)
    except (RuntimeError, AssertionError, TypeError) as error:
        return type(error)


def test_costs_are_those_of_torch():
    """On meshes of one axis and of two, equal ones among them, of ranks that take part and of others; made anew and kept."""
    meshes = [one_axis_mesh(2, 0), one_axis_mesh(2, 1), one_axis_mesh(4, 0), DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False, _rank=0),
              DeviceMesh("cpu", [2, 3], _init_backend=False, _rank=0), DeviceMesh("cpu", [2, 3], _init_backend=False, _rank=2)]  # fmt: skip
    specs = [
        DTensorSpec(mesh, (p,) * mesh.ndim, tensor_meta=meta)
        for mesh in meshes
        for p in KINDS
        for meta in (META, OTHER, None)
    ]
    pairs = list(itertools.product(specs, repeat=2))
    want = [cost(*pair) for pair in pairs]
    assert len(set(want)) > 8
    with faster_propagation():
        assert [cost(*pair) for pair in pairs] == want
        assert [cost(*pair) for pair in reversed(pairs)] == want[::-1]


def test_a_cost_is_computed_once_and_few_are_kept(monkeypatch):
    seen = []
    monkeypatch.setattr(utils, "redistribute_cost", lambda current_spec, target_spec: seen.append(1) or len(seen))
    monkeypatch.setattr(faster, "COSTS", 2)
    shards = [DTensorSpec(one_axis_mesh(2, 0), (Shard(d),), tensor_meta=META) for d in (0, 1)]
    with faster_propagation():
        assert [cost(*shards), cost(*shards), cost(*shards[::-1]), cost(*shards)] == [1, 1, 2, 1]
        assert [cost(shards[0], shards[0]), cost(*shards)] == [3, 4]  # the table was full


def answer(compare, before, after):
    try:
        return compare(before, after)
    except (RuntimeError, AssertionError, IndexError) as error:
        return type(error)


def test_views_are_those_of_torch():
    shapes = [(), (1,), (6,), (2, 3), (3, 2), (1, 6), (6, 1), (2, 1, 3), (4,), (-1,), (2, -1)]
    pairs = list(itertools.product(shapes, repeat=2))
    want = [answer(_view_ops.view_groups, *pair) for pair in pairs]
    with faster_propagation():
        for _ in range(2):
            assert [answer(_view_ops.view_groups, *pair) for pair in pairs] == want
        assert _view_ops.view_groups(torch.Size([2, 3]), ([3, 2],)) == want[pairs.index(((2, 3), (3, 2)))]


def test_two_equal_shapes_are_compared_once():
    asked = []
    compare = faster._remembered_views(lambda *shapes: asked.append(shapes) or len(asked))
    assert [compare((2, 3), [6]), compare(torch.Size([2, 3]), (6,)), compare((2, 3), 6)] == [1, 1, 2]
    assert asked == [((2, 3), (6,)), ((2, 3), 6)]


def test_trees_are_walked_as_torch_walks_them():
    spec = DTensorSpec(None, (Replicate(),), META)  # type: ignore[arg-type]
    trees = [
        3, None, spec, (), [], {}, (1, [2.0, "a"], {"b": (None, True), "a": torch.float32}), torch.Size([2, 3]),
        torch.return_types.max((torch.ones(2), torch.ones(2))), ((META, spec), [torch.device("cpu")]),
    ]  # fmt: skip
    for tree in trees:
        got, want = plain_tree_map(str, tree), _pytree.tree_map(str, tree)
        assert got == want and type(got) is type(want)
    assert list(plain_tree_map(str, {"b": 1, "a": 2})) == ["b", "a"]

"""Each part that a sweep replaces gives the answers of torch's own."""

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, _decompositions
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree

from strategies.torch_api import faster_propagation as faster
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
    [(DTensorSpec, "__init__"), (_view_ops, "view_groups"), (_decompositions, "tree_map")],
    ids=["specs", "views", "trees"],
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
        with pytest.raises(AssertionError):
            DTensorSpec("a mesh", (Replicate(),), "no metadata")  # type: ignore[arg-type]


def test_a_change_of_one_spec_is_none_of_the_next():
    with faster_propagation():
        first = DTensorSpec("a mesh", (Shard(0),), META)
        hash(first)
        first.placements = (Replicate(),)
        first.tensor_meta = OTHER
        assert fields("a mesh", (Shard(0),), META)["placements"] == (Shard(0),)
        assert DTensorSpec("a mesh", (Shard(0),)).tensor_meta is None


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

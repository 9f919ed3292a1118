"""The cache of propagated answers: misses are explained in the words of ops, placements and arguments."""

import pytest
import torch
from torch.distributed.tensor import Partial

from localtensor.concurrency import LIMIT, SingleFlightCache, clear_all
from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from strategies.model.rule import Leaf
from strategies.propagation.cache import answers, key_of, key_parts

SUM = "aten.sum.dim_IntList"


def spec(*placements, shape=(8, 4), dtype=torch.float32, mesh=None):
    return Spec(mesh or Mesh.of(*[2] * len(placements)), tuple(map(parse, placements)), shape, dtype)


ARGS = (Leaf(0), [1])


def asked(op=SUM, specs=None, args=ARGS, **kwargs):
    return key_of(op, [spec("S(0)")] if specs is None else specs, args, kwargs)


@pytest.fixture
def cache():
    cache = answers("tests")
    cache.get(asked(), str)
    return cache


def test_the_door_leads_to_the_cache_that_ranks_share():
    assert isinstance(answers("any"), SingleFlightCache) and answers("any")._limit == LIMIT


@pytest.mark.parametrize(("key", "why"), [
    (asked, "kept"),
    (lambda: asked(args=(Leaf(0), [-1])), "same op, placements, shapes, dtypes and mesh; differs in: dim=[-1] vs [1]"),
    (lambda: asked(args=(Leaf(0), [True])), "same op, placements, shapes, dtypes and mesh; differs in: dim=[True] vs [1]"),
    (lambda: asked(args=(Leaf(0), (1,))), "same op, placements, shapes, dtypes and mesh; differs in: dim=(1) vs [1]"),
    (lambda: asked(keepdim=True),
     "same op, placements, shapes, dtypes and mesh; differs in: keepdim=True vs (not given)"),
    (lambda: asked(dtype=torch.float64),
     "same op, placements, shapes, dtypes and mesh; differs in: dtype=torch.float64 vs (not given)"),
    (lambda: asked(specs=[spec("R")]), "same op, shapes, dtypes and mesh; differs in: placements=(R) vs (S(0))"),
    (lambda: asked(specs=[spec("S(0)", shape=(8, 5))]),
     "same op, placements, dtypes and mesh; differs in: shapes=[8,5] vs [8,4]"),
    (lambda: asked(specs=[spec("S(0)", dtype=torch.int64)]),
     "same op, placements, shapes and mesh; differs in: dtypes=i64 vs f32"),
    (lambda: asked(specs=[spec("S(0)", mesh=Mesh.of(3))]),
     "same op, placements, shapes and dtypes; differs in: mesh=(3) vs (2)"),
    (lambda: asked(op="aten.amax.default"),
     "same placements, shapes, dtypes and mesh; differs in: op=aten.amax.default vs aten.sum.dim_IntList"),
])  # fmt: skip
def test_a_miss_is_explained(cache, key, why):
    assert cache.explain(key()) == why


def test_an_ambient_setting_is_named(cache):
    with torch.no_grad():
        assert cache.explain(asked()).endswith("; differs in: grad mode=False vs True")


def test_a_placement_that_no_text_can_hold_is_distinguished_all_the_same():
    class Own(Partial):
        pass

    cache, mesh = answers("tests"), Mesh.of(2)
    one, other = (asked(specs=[Spec(mesh, (Own(),), (2,), torch.float32)]) for _ in range(2))
    cache.get(one, str)
    assert cache.explain(one) == "kept"
    assert "differs in: placements=" in cache.explain(other)


def test_a_tensor_that_is_not_there_and_an_op_that_torch_has_not_are_shown_as_well():
    parts = key_parts(key_of("nobodys.own.op", [spec("S(0)"), spec("R")], (Leaf(0), 1.5, -0.0, 1j), {}))
    assert [repr(parts[f"args[{i}]"]) for i in range(4)] == ["tensor 0", "1.5", "-0.0", "complex(0.0, 1.0)"]
    assert repr(parts["placements"]) == "(S(0)), (R)"


@pytest.mark.parametrize("op", ["aten.add", "aten.add.Tensor.out", "aten.add.Nobodys"])
def test_a_name_of_no_overload_is_shown_with_numbered_arguments(op):
    assert repr(key_parts(key_of(op, [], (2,), {}))["args[0]"]) == "2"


def test_all_caches_are_cleared_at_a_time(cache):
    clear_all()
    assert cache.stats().size == 0 and cache.explain(asked()) == "nothing is kept"

"""A key forgets nothing that an answer may depend on, and holds nothing that it cannot depend on."""

import enum
import gc
import math
import weakref
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from strategies.model.call_signature import NoKey, spec_key
from strategies.model.rule import Leaf
from strategies.propagation.cache import CallKey, CallKeyFactory, SpecInterner, key_of

OP = "aten.sum.dim_IntList"


def spec(*placements, mesh=None, shape=(8, 4), dtype=torch.float32):
    placements = tuple(parse(p) if isinstance(p, str) else p for p in placements)
    return Spec(mesh or Mesh.of(*[2] * len(placements)), placements, shape, dtype)


def of_spec(*placements, **more):
    return key_of(OP, [spec(*placements, **more)], (Leaf(0),), {})


def of(*args, **kwargs):
    return key_of(OP, [], args, kwargs)


class Colour(enum.Enum):
    RED = 1


VALUES = [
    0, 1, -1, True, False, 0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 1 + 0j, complex(0.0, -0.0), 0j,
    None, "", "1", "None", b"", b"1", torch.float32, torch.float64, torch.int64, torch.device("cpu"),
    torch.device("cuda"), torch.device("cuda:0"), torch.strided, torch.contiguous_format, torch.channels_last,
    [], (), [1], (1,), [True], [1.0], [[1]], [(1,)], [1, 2], [2, 1], [None], [0.0], [-0.0], [Leaf(0)], Leaf(0), Leaf(1),
    torch.Size([1]), Colour.RED, {}, {"a": 1}, {"a": True},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_distinguished_from_every_other(value):
    twins = [other for other in VALUES if of(other) == of(value)]
    assert len(twins) == 1 and twins[0] is value
    twins = [other for other in VALUES if of(dim=other) == of(dim=value)]
    assert len(twins) == 1 and twins[0] is value


@pytest.mark.parametrize("make", [
    lambda: 300, lambda: 0.1, lambda: float("nan"), lambda: -0.0, lambda: [1, [2.0, None]], lambda: Leaf(3),
    lambda: torch.device("cpu"), lambda: complex("nan"), lambda: torch.Size([2, 3]), lambda: "sum", lambda: {"a": [1]},
])  # fmt: skip
def test_an_equal_value_made_anew_gives_the_same_key(make):
    assert of(make()) == of(make()) and hash(of(make())) == hash(of(make()))


def test_where_an_argument_stands_counts():
    assert of(1, None) != of(None, 1) != of(1)
    assert of(1) != of(dim=1)
    assert of(a=1, b=2) == of(b=2, a=1) != of(a=2, b=1)
    assert of([1], 2) != of([1, 2])


def test_the_op_and_what_its_owner_adds_count():
    assert key_of("aten.sum.default", [], (), {}) != key_of("aten.amax.default", [], (), {})
    assert key_of(OP, [], (), {}, settings=("fallback",)) != key_of(OP, [], (), {})


def test_a_spec_counts_with_placements_shape_dtype_and_sizes_of_the_mesh():
    base = of_spec("S(0)", "R")
    assert base == of_spec("S(0)", "R")
    assert base != of_spec("R", "S(0)") != of_spec("S(0)", "S(1)")
    assert base != of_spec("S(0)", "R", shape=(4, 8))
    assert base != of_spec("S(0)", "R", dtype=torch.float64)
    assert base != of_spec("S(0)", "R", mesh=Mesh.of(2, 4)) != of_spec("S(0)", "R", mesh=Mesh.of(4, 2))


def test_the_names_of_a_mesh_do_not_count():
    assert of_spec("S(0)", "R", mesh=Mesh.of(dp=2, tp=2)) == of_spec("S(0)", "R", mesh=Mesh.of(x=2, y=2))


def test_how_many_tensors_there_are_counts():
    one = spec("R")
    assert key_of(OP, [one], (), {}) != key_of(OP, [one, one], (), {}) != key_of(OP, [], (), {})


class Own(Partial):
    """Inherits torch's equality, which knows nothing of what a subclass adds."""


class OwnShard(Shard):
    pass


class Scaled(Partial):
    def __init__(self, scale):
        super().__init__("sum")
        self.scale = scale


@dataclass(frozen=True)
class Norm(Partial):
    reduce_op: str = "sum"
    power: int = 2

    def __post_init__(self):
        Partial.__init__(self, self.reduce_op)  # torch 2.11 wants it

    def __hash__(self):
        return hash((Norm, self.power))


class Renamed(Replicate):
    pass


def masked(**more):
    return _MaskPartial(offset_dim=0, **more)


def test_torchs_own_equality_is_too_coarse_for_a_key():
    """What makes the exact class part of a key: should torch repair it, this test says so."""
    assert OwnShard(0) == Shard(0) and Own() == Partial() and Scaled(1) == Scaled(2)


PLACEMENTS = [
    "R", "S(0)", "S(1)", "SS(0,1)", "SS(0,2)", "SS(1,2)", "P(sum)", "P(avg)", "P(max)", Partial("premul"),
    Own(), OwnShard(0), Scaled(1), Scaled(2), Norm(power=1), Norm(power=2), Renamed(),
    masked(offset_shape=torch.Size([3])), masked(offset_shape=torch.Size([4])),
]  # fmt: skip


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_placement_is_distinguished_from_every_other(placement):
    assert [other for other in PLACEMENTS if of_spec(other) == of_spec(placement)] == [placement]
    assert of_spec(placement) == of_spec(placement)


def test_a_shard_order_is_part_of_a_key():
    mesh, orders = Mesh.of(2, 2, 2), [(), ((0, (1, 0, 2)),), ((0, (2, 1, 0)),)]
    texts = [spec_key(Spec(mesh, (Shard(0),) * 3, (8, 4), torch.float32, order)) for order in orders]
    assert texts[:2] == [
        "f32[8,4] @ 2,2,2: S(0), S(0), S(0)",
        "f32[8,4] @ 2,2,2: S(0), S(0), S(0) by ((0, (1, 0, 2)),)",
    ]
    assert len(set(texts)) == 3


def test_a_placement_with_an_equality_of_its_own_is_taken_at_its_word():
    assert of_spec(Norm(power=3)) == of_spec(Norm(power=3))
    assert of_spec(_StridedShard(0, split_factor=4)) == of_spec("SS(0,4)")
    assert of_spec(masked(offset_shape=torch.Size([3]))) != of_spec(masked(offset_shape=torch.Size([3])))  # own masks


def test_two_classes_of_one_name_are_two():
    def local():
        class Twin(Partial):
            def __eq__(self, other):
                return isinstance(other, Partial)

            def __hash__(self):
                return 1

        return Twin()

    assert of_spec(local()) != of_spec(local())


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.ones(2), lambda: 1, Mesh.of(2), Shard(0)])
@pytest.mark.parametrize("place", ["argument", "keyword", "list"])
def test_what_cannot_be_held_by_value_is_refused(value, place):
    args, kwargs = {"argument": ((value,), {}), "keyword": ((), {"dim": value}), "list": (([value],), {})}[place]
    with pytest.raises(NoKey, match=r"^key_of: args: .*: .*\. Propagate this call without a cache"):
        key_of(OP, [], args, kwargs)


def test_symbolic_sizes_are_refused():
    size = torch.SymInt(None)
    with pytest.raises(NoKey, match="a size that is no plain integer is known to its own program only"):
        of_spec("R", shape=(size, 2))
    with pytest.raises(NoKey, match="it cannot be held by value"):
        of(size)


def test_a_generator_is_known_by_identity():
    one, other = torch.Generator(), torch.Generator()
    assert of(generator=one) == of(generator=one) != of(generator=other)


def test_a_maker_of_keys_makes_the_same_keys_as_the_function():
    keys, some = CallKeyFactory(("own",)), [spec("S(0)"), spec("R")]
    for args, kwargs in [((Leaf(0), [1], True), {}), ((Leaf(0), Leaf(1)), {"b": 1, "a": 2.0})]:
        made = [keys.of(OP, some, args, kwargs) for _ in range(2)]
        assert made[0] == made[1] == key_of(OP, some, args, kwargs, ("own",))


def test_a_maker_knows_so_many_specs_and_no_more():
    keys = CallKeyFactory(limit=3)
    some = [spec("S(0)", shape=(i, 2)) for i in range(10)]
    made = [keys.of(OP, [one], (), {}) for one in some * 2]
    assert made[:10] == made[10:] and len(set(made)) == 10
    assert len(keys._seen) <= 3


def test_a_spec_that_is_gone_is_not_mistaken_for_a_new_one_at_its_place():
    keys = CallKeyFactory(limit=2)
    for i in range(200):
        here = spec("S(0)", shape=(i, 2))
        assert keys.of(OP, [here], (), {}).specs == (f"f32[{i},2] @ 2: S(0)",)


MESH = Mesh.of(2, 2)


def lies(*placements, shape=(8, 4), dtype=torch.float32, mesh=MESH):
    return spec(*placements, shape=shape, dtype=dtype, mesh=mesh)


def test_equal_specs_on_one_mesh_have_one_object():
    specs = SpecInterner()
    first = specs.of(lies("S(0)", "P(sum)"))
    assert specs.of(first) is first is specs.of(lies("S(0)", "P(sum)")) is specs.of(lies("S(0)", "P(sum)"))
    assert first == lies("S(0)", "P(sum)")


class Marked(Shard):
    pass


def marked():
    placement = Shard(0)
    object.__setattr__(placement, "why", "nobody knows")
    return placement


OTHERS = {
    "placements": lies("R", "S(0)"), "a strided shard": lies("SS(0,2)", "R"), "shape": lies("S(0)", "R", shape=(4, 8)),
    "dtype": lies("S(0)", "R", dtype=torch.float64), "mesh": lies("S(0)", "R", mesh=Mesh.of(2, 2)),
    "a subclass": lies(Marked(0), "R"), "state of its own": lies(marked(), "R"),
    "a boolean for a size": lies("S(0)", "R", shape=(True, 4)), "one for it": lies("S(0)", "R", shape=(1, 4)),
    "a shard order": Spec(MESH, (Shard(0), Shard(0)), (8, 4), torch.float32, ((0, (1, 0)),)),
    "none": Spec(MESH, (Shard(0), Shard(0)), (8, 4), torch.float32),
    "a list of placements": Spec(MESH, [Shard(0), parse("R")], (8, 4), torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("turn", [1, -1])
def test_specs_that_differ_in_anything_have_objects_of_their_own(turn):
    specs = SpecInterner()
    given = [lies("S(0)", "R"), *OTHERS.values()][::turn]
    found = [specs.of(one) for one in given]
    assert found == given and len(set(map(id, found))) == len(given)
    assert all(specs.of(one) is first for one, first in zip(given, found, strict=True))
    assert all(specs.of(first) is first for first in found)
    assert [type(p) for one in found for p in one.placements] == [type(p) for one in given for p in one.placements]


def test_a_spec_of_symbolic_sizes_comes_back_as_it_is():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    given = lies("R", "R", shape=(ShapeEnv().create_unbacked_symint(), 2))
    assert SpecInterner().of(given) is given


def test_so_many_specs_are_known_as_first_and_no_more():
    specs = SpecInterner(limit=3)
    for i in range(20):
        one = lies("S(0)", "R", shape=(i, 2))
        assert specs.of(one) == one and specs.of(one) is specs.of(lies("S(0)", "R", shape=(i, 2)))
    assert len(specs._known) <= 3


def test_keys_hold_no_mesh():
    class Watched(Mesh):
        __slots__ = ("__weakref__",)

    mesh = Watched((2,), ("dp",))
    known = weakref.ref(mesh)
    key = of_spec("S(0)", mesh=mesh)
    del mesh
    gc.collect()
    assert known() is None and isinstance(key, CallKey)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.floats(width=16), st.text("ab1", max_size=2), st.complex_numbers()
)
ARGUMENTS = st.recursive(SCALARS, lambda inside: st.lists(inside, max_size=2) | st.tuples(inside), max_leaves=3)


def written(value):
    """Types and values in full: what two arguments must share to be the same.  All NaNs are one."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(written, value))})"
    if isinstance(value, complex):
        return f"complex({written(value.real)}, {written(value.imag)})"
    return f"{type(value).__name__}({value!r})"


@given(ARGUMENTS, ARGUMENTS)
def test_keys_are_equal_if_and_only_if_arguments_are(one, other):
    assert (of(one) == of(other)) == (written(one) == written(other))


@given(ARGUMENTS)
def test_a_key_equals_itself_and_can_be_hashed(value):
    assert of(value) == of(value) and hash(of(value)) == hash(of(value))

"""What ranks share is found again by all that it depends on, and by nothing less; the rest is each rank's own."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from localtensor.concurrency.single_flight import SingleFlightCache
from localtensor.threads.state import shared_propagation

TABLES = SimpleNamespace(op_to_schema_info={}, op_single_dim_strategy_funcs={}, op_strategy_funcs={}, op_to_rules={})


def mesh(*shape, names=None, device="cpu", here=True):
    return SimpleNamespace(
        shape=shape, mesh_dim_names=names, device_type=device, get_coordinate=lambda: [0] * len(shape) if here else None
    )


def spec(on, *placements, shape=(8, 4), stride=(4, 1), dtype=torch.float32, order=None):
    meta = SimpleNamespace(shape=shape, stride=stride, dtype=dtype)
    return SimpleNamespace(mesh=on, placements=placements, tensor_meta=meta, shard_order=order)


def schema(*args, op=torch.ops.aten.add.Tensor, **kwargs):
    return SimpleNamespace(op=op, args_schema=args, kwargs_schema=kwargs)


def key(*args, **kwargs):
    return shared_propagation._mesh_and_key(TABLES, schema(*args, **kwargs))[1]


DIFFERENT = {
    "as it is": lambda: key(spec(mesh(2), Shard(0)), [1]),
    "op": lambda: key(spec(mesh(2), Shard(0)), [1], op=torch.ops.aten.mul.Tensor),
    "size of the mesh": lambda: key(spec(mesh(4), Shard(0)), [1]),
    "names of the axes": lambda: key(spec(mesh(2, names=("a",)), Shard(0)), [1]),
    "other names": lambda: key(spec(mesh(2, names=("b",)), Shard(0)), [1]),
    "device": lambda: key(spec(mesh(2, device="cuda"), Shard(0)), [1]),
    "placement": lambda: key(spec(mesh(2), Shard(1)), [1]),
    "kind of partial": lambda: key(spec(mesh(2), Partial("avg")), [1]),
    "other kind of partial": lambda: key(spec(mesh(2), Partial("sum")), [1]),
    "order": lambda: key(spec(mesh(2), Shard(0), order=("another",)), [1]),
    "shape": lambda: key(spec(mesh(2), Shard(0), shape=(8, 2)), [1]),
    "stride": lambda: key(spec(mesh(2), Shard(0), stride=(1, 8)), [1]),
    "dtype": lambda: key(spec(mesh(2), Shard(0), dtype=torch.float64), [1]),
    "argument": lambda: key(spec(mesh(2), Shard(0)), [2]),
    "type of an argument": lambda: key(spec(mesh(2), Shard(0)), [True]),
    "list or tuple": lambda: key(spec(mesh(2), Shard(0)), (1,)),
    "size or tuple": lambda: key(spec(mesh(2), Shard(0)), torch.Size([1])),
    "by name": lambda: key(spec(mesh(2), Shard(0)), [1], alpha=1),
    "by another name": lambda: key(spec(mesh(2), Shard(0)), [1], beta=1),
}


def test_questions_that_differ_in_anything_are_different():
    keys = {what: make() for what, make in DIFFERENT.items()}
    assert len(set(keys.values())) == len(DIFFERENT)
    assert {what: make() for what, make in DIFFERENT.items()} == keys  # on meshes of their own, as other ranks have


def test_a_default_dtype_is_part_of_the_question():
    before = DIFFERENT["as it is"]()
    torch.set_default_dtype(torch.float64)
    try:
        assert DIFFERENT["as it is"]() != before
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("args", [
    (1,),
    (spec(mesh(2, here=False), Shard(0)),),
    (spec(mesh(2), Shard(0)), spec(mesh(2), Shard(0))),
    (spec(mesh(3), Shard(0)),),
    (SimpleNamespace(mesh=mesh(2), placements=(Shard(0),), tensor_meta=None),),
    (spec(mesh(2, 2), Shard(0), Shard(0), shape=(6, 4)),),
    (spec(mesh(2), _StridedShard(0, split_factor=2)),),
    (spec(mesh(2), Shard(0)), torch.ones(1)),
    (spec(mesh(2), Shard(0)), {"generator": torch.Generator()}),
], ids=["no mesh", "left out", "two meshes", "uneven", "no shape", "uneven within", "strided", "a tensor", "a generator"])  # fmt: skip
def test_what_may_depend_on_the_rank_is_each_ranks_own(args):
    with pytest.raises(shared_propagation.NotShareable):
        key(*args)


@dataclass(frozen=True)
class Answer:
    output_spec: object
    redistribute_schema: object = None


HERE = mesh(2)
EVEN, UNEVEN = spec(HERE, Shard(0)), spec(HERE, Shard(0), shape=(7, 4))


@pytest.mark.parametrize("found", [
    Answer(UNEVEN), Answer([EVEN, UNEVEN]), Answer((EVEN, spec(mesh(2), Replicate()))),
    Answer(EVEN, schema(UNEVEN)), Answer(EVEN, schema(EVEN, out=UNEVEN)), Answer(EVEN, schema(spec(mesh(2), Replicate()))),
])  # fmt: skip
def test_an_answer_that_may_depend_on_the_rank_is_each_ranks_own(found):
    with pytest.raises(shared_propagation.NotShareable):
        shared_propagation._check_shareable(found)


def test_an_even_answer_is_for_all():
    assert shared_propagation._check_shareable(Answer([EVEN, None], schema(EVEN, 1, out=EVEN))) is None


def test_a_thread_that_is_to_be_alone_is():
    asked = []
    compute = lambda schema: asked.append(schema) or Answer(None)  # noqa: E731
    known = SingleFlightCache(name="test")
    alone = shared_propagation._sharing_function(TABLES, compute, known, lambda: True)
    assert alone(schema(EVEN)) == alone(schema(EVEN)) and len(asked) == 2 and known.stats().size == 0


def test_what_is_found_out_in_a_mode_is_no_answer_outside_of_it():
    def compute(schema):
        return Answer(None, None if torch._C._len_torch_dispatch_stack() else Asked((), {}))

    together = shared_propagation._sharing_function(TABLES, compute, SingleFlightCache(name="test"), lambda: False)
    with FakeTensorMode():
        within = together(schema(EVEN))
    assert within.redistribute_schema is None and together(schema(EVEN)).redistribute_schema is not None


def test_a_rule_that_asks_for_itself_is_computed_as_torch_would():
    depth = []

    def compute(question):
        depth.append(1)
        return Answer(None) if len(depth) == 3 else together(question)

    together = shared_propagation._sharing_function(TABLES, compute, SingleFlightCache(name="test"), lambda: False)
    assert together(schema(EVEN)) == Answer(None) and len(depth) == 3


@dataclass(frozen=True)
class Lies:
    mesh: str
    placements: tuple[object, ...] = ()
    tensor_meta: object = None


@dataclass(frozen=True)
class Asked:
    args_schema: object
    kwargs_schema: object


def test_every_spec_of_an_answer_is_put_on_the_mesh_of_who_asks():
    def on(mesh):
        one = Lies(mesh)
        return Answer([one, None, (one,)], Asked((one, [one, 2]), {"out": one}))

    assert shared_propagation._on_mesh("mine", on("another's")) == on("mine")


def test_a_note_on_an_op_without_a_rule_is_for_all_ranks_and_one_on_an_op_with_a_rule_stays_a_ranks_own():
    tables = SimpleNamespace(
        op_to_schema_info=shared_propagation.RuleTable({}), op_single_dim_strategy_funcs={}, op_strategy_funcs={}, op_to_rules={}
    )  # fmt: skip
    register = tables.op_strategy_funcs.__setitem__

    def compute(question):
        tables.op_to_schema_info["decomposed"] = "noted by torch"
        tables.op_to_schema_info["registered"] = "by another rank"
        register("registered", len)
        tables.op_to_schema_info.changed["swapped out"] = None
        return Answer(None)

    asked = shared_propagation._sharing_function(tables, compute, SingleFlightCache(name="test"), lambda: True)
    assert asked(schema(EVEN)) == Answer(None)
    assert set(tables.op_to_schema_info.changed) == {"registered", "swapped out"}
    assert tables.op_to_schema_info["decomposed"] == "noted by torch"

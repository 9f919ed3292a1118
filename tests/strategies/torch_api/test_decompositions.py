"""DTensor's tracer of decompositions, as an object of the propagator (torch 2.12 and later) and as a static class (2.11)."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._decompositions import DecompShardingStrategy

from strategies.model.oracle import run_oracle
from strategies.model.rule import overload
from strategies.torch_api import decompositions, dtensor
from strategies.torch_api.code_places import tracer_place
from strategies.torch_api.decompositions import without_dynamo
from tests.strategies.cases import numbers, sample

X = numbers(4, 6)
AMINMAX = "aten.aminmax.default"


def propagator():
    return DTensor._op_dispatcher.sharding_propagator


class Static:
    """The class of torch 2.11, as far as it is called: static functions that call one another by its name."""

    @staticmethod
    def has_decomp(op):
        return op._can_decompose() or op is overload(AMINMAX)

    @staticmethod
    def _get_candidate_placements(schema):
        assert schema
        return [(Replicate(),), (Shard(0),), (Partial(),)]

    @staticmethod
    def propagate_strategy(schema, prop):
        return prop.name, decompositions.DecompShardingStrategy._get_candidate_placements(schema)


@pytest.fixture
def static(monkeypatch):
    monkeypatch.setattr(decompositions, "DecompShardingStrategy", Static)
    return SimpleNamespace(name="a propagator")


@pytest.mark.parametrize(
    "name", ["has_decomp", "propagate_strategy", "_get_candidate_placements", "_propagate_through_decomp"]
)
def test_torch_has_the_part(name):
    assert hasattr(DecompShardingStrategy, name), (
        f"torch {torch.__version__} has no DecompShardingStrategy.{name} any more"
    )
    if name != "_propagate_through_decomp":
        assert callable(getattr(decompositions.decompositions(propagator()), name))


def test_the_tracer_is_that_of_the_propagator_where_it_has_one():
    own = object()
    assert decompositions.decompositions(SimpleNamespace(decomp_strategy=own)) is own
    with decompositions.candidates_set(SimpleNamespace(decomp_strategy=own)):
        pass


def test_a_static_class_is_called_with_the_propagator(static):
    tracer = decompositions.decompositions(static)
    name, candidates = tracer.propagate_strategy("a schema")
    assert name == "a propagator" and len(candidates) == 3


def test_candidates_of_a_copy_hold_while_it_traces_and_no_longer(static):
    tracer = decompositions.decompositions(static)
    tracer._get_candidate_placements = lambda schema: [(Replicate(),)]
    assert tracer.propagate_strategy("a schema")[1] == [(Replicate(),)]
    assert len(decompositions.decompositions(static).propagate_strategy("a schema")[1]) == 3
    static.decomp_strategy = tracer  # as `trace_at_most` leaves it on a copy of the propagator
    with decompositions.candidates_set(static):
        assert Static._get_candidate_placements("a schema") == [(Replicate(),)]
    assert len(Static._get_candidate_placements("a schema")) == 3


def test_a_static_class_does_not_trace_ops_with_a_composite_kernel(static):
    tracer = decompositions.decompositions(static)
    assert tracer.has_decomp(overload(AMINMAX))
    outer = overload("aten.outer.default")
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        outer.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )
    assert composite and Static.has_decomp(outer) and not tracer.has_decomp(outer)


def test_a_decomposition_is_found_and_traced_on_this_torch():
    """On 2.11 by the static class, on later ones by the propagator's own."""
    assert dtensor.registry_of(overload(AMINMAX)) == "decomposition"
    one = sample("aminmax.default", X, dim=0)
    query = dtensor.PropagatorQuery(one, 1, run_oracle(one).raw)
    query.trace_at_most(2)
    rows = query.strategy_rows([[Shard(0)]])
    assert rows and query.drawn is not None and query.drawn[0] == 2 < query.drawn[1]
    assert tracer_place().name == "DecompShardingStrategy._propagate_through_decomp" and tracer_place().line > 1


FIRST_CALLS = """
import contextlib, importlib, importlib.machinery, os, sys
import torch, torch._refs
from strategies.torch_api.decompositions import without_dynamo
from torch.distributed.tensor import DTensor

disabled = []

class Compiler:  # in torch._dynamo's place, whose import takes longer than all the rest
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch._dynamo" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.disable = lambda function, *more, **named: disabled.append(function) or function

def first_calls(context):
    with context:
        same = torch.equal(torch._refs.cumprod(x * 2, 0), torch.tensor([2.0, 4, 8]))
        before = "torch._dynamo" in sys.modules
        importlib.import_module("torch._dynamo")
        disabled.clear()
        torch._refs.cumsum(x, 0)
    print(same, before, bool(disabled), hasattr(torch._compile, "getattr"), flush=True)

x = torch.ones(3)
sys.meta_path.insert(0, Compiler())
if child := os.fork():
    os.waitpid(child, 0)
    first_calls(without_dynamo())
else:
    first_calls(contextlib.nullcontext())
"""


@pytest.mark.slow
def test_a_decomposition_is_called_without_the_compiler_until_it_is_imported():
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True True True False", "True False True False"]


def test_fake_modes_note_no_stack_meanwhile():
    made = FakeTensorMode().stack
    with decompositions.without_stacks():
        assert "test_fake_modes" in made and FakeTensorMode().stack == ""
    assert "test_fake_modes" in FakeTensorMode().stack


def python_calls(asked):
    """The functions in Python that are called meanwhile."""
    called = []
    sys.setprofile(lambda frame, event, argument: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        asked()
    finally:
        sys.setprofile(None)
    return called[1:]  # without `asked`


META = type(DeviceMesh)
BASE = [one for one in DeviceMesh.__mro__ if type(one) is META][-1]
"""The class that meshes and placements have in common: OpaqueBase in torch 2.12, CustomClassBase since 2.14."""


def checks_of_classes():
    placements = [isinstance(Shard(0), Shard), isinstance(Replicate(), Shard), isinstance(3, Shard)]
    return [*placements, isinstance(3, DeviceMesh), isinstance(Shard(0), BASE), isinstance(3, BASE)]


@pytest.mark.skipif(META is type, reason="this torch checks classes as Python does")
def test_classes_are_checked_as_python_does_meanwhile():
    own = vars(META)["__instancecheck__"]
    before = checks_of_classes()
    assert "__instancecheck__" in python_calls(lambda: isinstance(3, Shard))
    with decompositions.plain_instance_checks():
        assert checks_of_classes() == before
        assert python_calls(lambda: isinstance(3, Shard)) == []
        assert "__instancecheck__" in python_calls(lambda: isinstance(3, BASE))
        with decompositions.plain_instance_checks():
            assert python_calls(lambda: isinstance(3, Shard)) == []
    assert vars(META)["__instancecheck__"] is own and type(BASE) is META
    assert "__instancecheck__" in python_calls(lambda: isinstance(3, Shard)) and checks_of_classes() == before


def test_where_torch_checks_classes_as_python_does_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(decompositions, "DeviceMesh", object)
    with decompositions.plain_instance_checks():
        assert checks_of_classes() == [True, False, False, False, isinstance(Shard(0), BASE), isinstance(3, BASE)]


def test_for_many_calls_dynamo_is_imported_before_there_are_workers(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    asked = []
    monkeypatch.setattr(decompositions.importlib, "import_module", asked.append)
    with without_dynamo():
        assert asked == []
    with without_dynamo(many=True):
        assert asked == ["torch._dynamo"]

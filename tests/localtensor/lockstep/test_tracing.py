"""torch.compile, torch.export and make_fx beside LocalTensors: right as it is written, or refused; never a graph of constants."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from localtensor import LocalTensorMode, rank_map
from localtensor.errors import NotTraceable


@pytest.fixture
def x():
    with LocalTensorMode(3):
        yield rank_map(lambda rank: torch.full((2,), rank + 1.0))


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


def doubled(x):
    return x * 2 + torch.ones(2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_function_runs_as_it_is_written_under_the_mode(x, backend):
    y = torch.compile(doubled, backend=backend)(x)
    assert [y.on(rank).tolist() for rank in range(3)] == [[3.0] * 2, [5.0] * 2, [7.0] * 2]


def test_a_compiled_module_has_gradients_under_the_mode(x):
    layer = nn.Linear(2, 1, bias=False)
    torch.compile(layer, backend="aot_eager")(x).sum().backward()
    assert [layer.weight.grad.on(rank).tolist() for rank in range(3)] == [[[rank + 1.0] * 2] for rank in range(3)]


def test_the_compiler_works_after_the_mode():
    with LocalTensorMode(2):
        torch.compile(doubled, backend="eager")(torch.ones(2))
    graphs = []
    torch.compile(lambda x: x * 3, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)(torch.ones(2))
    assert len(graphs) == 1


def test_make_fx_is_refused_by_name(x):
    with pytest.raises(NotTraceable, match=r"^make_fx: a LocalTensor: aten\.mul\.Tensor at .*test_tracing\.py:\d+"):
        make_fx(lambda a: a * 2)(x)
    assert doubled(x).on(0).tolist() == [3.0, 3.0]


def test_a_graph_of_a_plain_tensor_is_recorded_as_ever():
    assert "aten.mul" in make_fx(lambda a: a * 2)(torch.ones(2)).code


def test_export_is_refused_by_name(x):
    with pytest.raises(NotTraceable, match=r"^torch\.compile or torch\.export: a LocalTensor: a FakeTensor"):
        torch.export.export(nn.Linear(2, 2), (x,))


def test_a_compiled_function_of_a_local_tensor_outside_of_the_mode_is_refused():
    with LocalTensorMode(2):
        y = rank_map(lambda rank: torch.ones(2))
    with pytest.raises(Exception, match=r"NotTraceable: torch\.compile or torch\.export: a LocalTensor: a FakeTensor"):
        torch.compile(doubled, backend="eager")(y)

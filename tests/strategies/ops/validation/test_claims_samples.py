"""Calls for the overloads that have rules of our own."""

import pytest
import torch

from strategies.base.worker_pool import WorkerPool
from strategies.inputs import opinfo_samples
from strategies.inputs.gathering import SampleSelection
from strategies.ops.validation.claims import GRADIENT, calls_of_overloads, embedding_gradients
from tests.strategies.cases import sample


@pytest.mark.filterwarnings("ignore")
def test_calls_are_those_of_the_wanted_overloads_and_the_same_for_the_same_seed(monkeypatch):
    wanted = ["aten.embedding_dense_backward.default", "aten.embedding.out"]
    monkeypatch.setattr(
        "strategies.inputs.opinfo_samples.database",
        lambda all_=opinfo_samples.database: [i for i in all_() if "embedding" in i.name],
    )
    with WorkerPool(1) as crew:
        one, two = (calls_of_overloads(crew, wanted, most=3, dtypes=("float64",), sizes=("even",)) for _ in range(2))
    assert sorted(one.of) == sorted(wanted) and not one.without
    for op in wanted:
        assert 0 < len(one.of[op]) <= 3
        assert [s.arguments() for s in one.of[op]] == [s.arguments() for s in two.of[op]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("wanted", "run"),
    [
        (["aten.rsub.Tensor"], 1),  # an OpInfo bears its name
        (["aten.rsub.Tensor", "aten.rsub.Tensor_out"], 1),  # made from its relative
        (["aten.threshold_backward.default"], 2),  # `threshold` is a part of its name, and enough
    ],
)
def test_near_calls_come_from_the_opinfos_that_bear_the_name(monkeypatch, wanted, run):
    names = ("rsub", "nn.functional.threshold", "cumsum")
    few = [info for info in opinfo_samples.database() if info.name in names]
    assert len(few) == 3
    monkeypatch.setattr("strategies.inputs.opinfo_samples.database", lambda: few)
    ticks: list[int] = []
    with WorkerPool(1) as crew:
        found = calls_of_overloads(
            crew, wanted, most=3, dtypes=("float64",), sizes=("even",), tick=ticks.append, near=True
        )
    assert sorted(found.of) == wanted and not found.without and sum(ticks) <= run


@pytest.mark.filterwarnings("ignore")
def test_what_no_near_opinfo_reaches_is_looked_for_in_all(monkeypatch):
    few = [info for info in opinfo_samples.database() if info.name in ("rsub", "cumsum")]
    monkeypatch.setattr("strategies.inputs.opinfo_samples.database", lambda: few)
    monkeypatch.setattr(
        "strategies.ops.validation.claims.gather",
        lambda crew, met, names, seed: ({}, {n: "none" for n in names if n not in met}),
    )
    monkeypatch.setattr(
        "strategies.ops.validation.claims.select_overloads", lambda ops, database: SampleSelection((0,))
    )
    ticks: list[int] = []
    with WorkerPool(1) as crew:
        found = calls_of_overloads(
            crew,
            ["aten.cumsum.default", "aten.rsub.Tensor"],
            dtypes=("float64",),
            sizes=("even",),
            tick=ticks.append,
            near=True,
        )
    assert sorted(found.of) == ["aten.cumsum.default", "aten.rsub.Tensor"] and sum(ticks) == 2


def test_a_gradient_of_a_lookup_has_its_indices_and_rows():
    table, places = torch.zeros(7, 3, dtype=torch.float64), torch.tensor([[6, 0], [2, 2]])
    (found,) = embedding_gradients([sample("embedding.default", table, places, 2)])
    assert found.op == GRADIENT and found.arguments() == ["f64[2,2,3]", "i64[2,2]", "7", "2", "False"]
    assert found.call(found.tensors).shape == table.shape
    assert embedding_gradients([sample("embedding.default", table.long(), places)]) == []

"""Calls for the overloads that have rules of our own."""

import pytest
import torch

from strategies import samples
from strategies.own_samples import GRADIENT, calls, gradients
from strategies.workers import Crew
from tests.strategies.cases import sample


@pytest.mark.filterwarnings("ignore")
def test_calls_are_those_of_the_wanted_overloads_and_the_same_for_the_same_seed(monkeypatch):
    wanted = ["aten.embedding_dense_backward.default", "aten.embedding.out"]
    monkeypatch.setattr(
        "strategies.samples.database", lambda all_=samples.database: [i for i in all_() if "embedding" in i.name]
    )
    with Crew(1) as crew:
        one, two = (calls(crew, wanted, most=3, dtypes=("float64",), sizes=("even",)) for _ in range(2))
    assert sorted(one.of) == sorted(wanted) and not one.without
    for op in wanted:
        assert 0 < len(one.of[op]) <= 3
        assert [s.arguments() for s in one.of[op]] == [s.arguments() for s in two.of[op]]


def test_a_gradient_of_a_lookup_has_its_indices_and_rows():
    table, places = torch.zeros(7, 3, dtype=torch.float64), torch.tensor([[6, 0], [2, 2]])
    (found,) = gradients([sample("embedding.default", table, places, 2)])
    assert found.op == GRADIENT and found.arguments() == ["f64[2,2,3]", "i64[2,2]", "7", "2", "False"]
    assert found.call(found.tensors).shape == table.shape
    assert gradients([sample("embedding.default", table.long(), places)]) == []

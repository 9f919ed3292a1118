import pytest

from strategies.validation.discover import NoSuchOp, discover, resolve_overloads, samples_of
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted

X = numbers(4, 6)


def test_a_name_stands_for_one_overload_or_for_those_that_dtensor_knows():
    assert resolve_overloads("aten.add.Tensor") == resolve_overloads("add.Tensor") == ["aten.add.Tensor"]
    assert resolve_overloads("aten.sum") == resolve_overloads("sum") == ["aten.sum.default", "aten.sum.dim_IntList"]
    assert resolve_overloads("planted.forgotten") == ["planted.forgotten.default"]


@pytest.mark.parametrize("name", ["nosuch", "aten.nosuch.default", "aten.add.nosuch", "", "a.b.c.d"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(NoSuchOp, match="no op and no overload has this name"):
        resolve_overloads(name)


def test_a_near_name_is_offered():
    with pytest.raises(NoSuchOp, match="Did you mean cumsum"):
        resolve_overloads("cumsun")


def test_what_is_missing_comes_with_the_calls_that_it_rests_on():
    found = discover("planted.forgotten", given=[planted("forgotten", X)])
    assert (found.op, found.source, len(found.missing)) == ("planted.forgotten.default", "op strategy", 6)
    assert found.samples == ("f64[4,6] from test",)
    assert found.combinations > 0 and found.surveys[0].ranks == (2, 3)


def test_what_cannot_be_searched_is_not_among_the_samples():
    refused, random = sample("mm.default", X, X), sample("rand_like.default", X)
    assert discover("aten.mm.default", given=[refused]).samples == ()
    assert discover("aten.rand_like.default", given=[random]).samples == ()


def test_an_op_without_a_rule_in_dtensor_is_searched_too(monkeypatch):
    from strategies.torch_api import dtensor

    monkeypatch.setattr(dtensor, "registry_of", lambda op: "")
    assert [str(r).partition(": ")[2] for r in discover("planted.far", given=[planted("far", X)]).missing][:2] == [
        "S(0) -> S(0)", "S(1) -> S(1)",
    ]  # fmt: skip


def test_one_seed_gives_one_discovery_in_any_order_of_samples():
    calls = [sample("add.Tensor", X, X), sample("add.Tensor", X, X[0])]
    first, again = (discover("aten.add.Tensor", given=given) for given in (calls, calls[::-1]))
    assert {str(r) for r in first.missing} == {str(r) for r in again.missing} != set()


def test_calls_are_drawn_from_the_schema_where_opinfo_has_none():
    assert {s.op for s in samples_of("planted.forgotten.default", 0)} == {"planted.forgotten.default"}


def test_calls_are_those_of_opinfo_where_it_has_some_and_none_are_drawn_of_an_op_that_trusts_its_caller():
    assert {s.origin.partition("[")[0] for s in samples_of("aten.mv.default", 0)} == {"mv"}
    assert samples_of("aten._euclidean_dist.default", 0) == []

"""Books and lines that make no sense are refused, with the file and line of the rule."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import StridedShard
from strategies.model.rule import Call, Leaf
from strategies.ops.semantics.local_call import InvalidRule, check_registry, own_arguments_function
from strategies.ops.semantics.rulebook import Meta, OpRule, PlacementRule, RuleQuery, RuleRegistry
from strategies.propagation.propagator import Propagator
from tests.strategies.little_book import BOOK, spec_of

HERE = Path(__file__).name
MUL = "aten.mul.Tensor"


class Unheard(Placement):
    """A placement that nobody knows."""


R, S0, F32 = Replicate(), Shard(0), torch.float32
NONSENSE = {
    "no line": (lambda query: [("R", "R")], "it is no Line"),
    "no list": (lambda query: 3, "it raised when asked about"),
    "none at all": (lambda query: None, "it raised when asked about"),
    "an input too few": (lambda query: [PlacementRule((S0,), (S0,))], "the call has 2 tensors, the line speaks of 1"),
    "an output too many": (lambda query: [PlacementRule((S0, S0), (S0, S0))], "the call has 1 results, the line speaks of 2"),
    "a list of inputs": (lambda query: [PlacementRule([S0, S0], (S0,))], "which is no tuple"),
    "no such dim": (lambda query: [PlacementRule((Shard(2), R), (R,))], "tensor 0: S(2): there is no dim 2 in f64[4,3]"),
    "no such dim of the result": (lambda query: [PlacementRule((R, R), (Shard(5),))], "result 0: S(5): there is no dim 5"),
    "a negative dim": (lambda query: [PlacementRule((Shard(-1), R), (R,))], "tensor 0: S(-1): there is no dim -1"),
    "no placement": (lambda query: [PlacementRule(("S(0)", R), (R,))], "'S(0)' is no placement whose meaning is known"),
    "a placement nobody knows": (lambda query: [PlacementRule((R, R), (Unheard(),))], "is no placement whose meaning is known"),
    "a reduction nobody knows": (lambda query: [PlacementRule((Partial("xor"), R), (R,))], "is no placement whose meaning"),
    "blocks of nothing": (lambda query: [PlacementRule((StridedShard(0, split_factor=0), R), (R,))], "is no placement whose"),
    "an unknown cut": (lambda query: [PlacementRule((S0, S0), (S0,), "odd")], "a cut is one of any, filled, even"),
    "it raises": (lambda query: query["nothing"], "KeyError: 'nothing': it raised when asked about"),
}  # fmt: skip


def propagate(rule):
    mesh = Mesh.of(2, 2)
    specs = [spec_of(mesh, "S(0) R", (4, 3))] * 2
    return Propagator(RuleRegistry.of(OpRule(MUL, rule, "nonsense", "none"))).propagate(MUL, specs)


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_refused_at_first_use_and_names_the_rules_line(case):
    rule, problem = NONSENSE[case]
    with pytest.raises(InvalidRule) as raised:
        propagate(rule)
    line = inspect.getsourcelines(rule)[1]
    assert problem in str(raised.value)
    assert f"{HERE}:{line}: line: " in str(raised.value)
    assert raised.value.where.endswith(f"{HERE}:{line}")
    assert str(raised.value).endswith(".")


def test_a_rule_is_checked_for_pieces_too():
    """Here for the piece of one row that the second axis has to do with."""

    def odd(query):
        rows = query.tensors[0].shape[0]
        yield PlacementRule((S0, S0), (S0,)) if rows != 1 else PlacementRule((S0, S0), (Shard(7),))

    mesh = Mesh.of(2, 2)
    book = RuleRegistry.of(OpRule(MUL, odd, "nonsense", "none"))
    with pytest.raises(InvalidRule, match=r"there is no dim 7 in f64\[1,3\]"):
        Propagator(book).propagate(MUL, [spec_of(mesh, "S(0) S(0)", (3, 3))] * 2)


@pytest.mark.parametrize(("book", "problem"), [
    (RuleRegistry({MUL: OpRule("aten.add.Tensor", lambda query: [], "f", "r")}), "it is no entry of this op"),
    (RuleRegistry({MUL: "S(0) -> S(0)"}), "it is no entry of this op"),
    (RuleRegistry.of(OpRule(MUL, None, "f", "r")), "it is no function"),
    (RuleRegistry.of(OpRule("aten.mul", lambda query: [], "f", "r")), "this torch has no such overload"),
    (RuleRegistry.of(OpRule("aten.mull.Tensor", lambda query: [], "f", "r")), "this torch has no such overload"),
    (RuleRegistry.of(OpRule("aten.view.default", lambda query: [], "f", "r", ("sizes",))), "the op has no such argument"),
])  # fmt: skip
def test_a_book_that_cannot_be_is_refused_when_the_propagator_is_made(book, problem):
    with pytest.raises(InvalidRule, match=problem) as raised:
        Propagator(book)
    assert (
        type(book.entries[next(iter(book.entries))]) is str or HERE in str(raised.value) or "None" in str(raised.value)
    )


def test_a_right_book_is_taken():
    check_registry(BOOK)
    assert len(BOOK) == 9


def clone_rows(query):
    yield PlacementRule((S0,), (S0,))


ENTRIES = {
    "own is no function": ({"own": 3}, "own=3: it is no function"),
    "instead is no function": ({"instead": "aten.mul.Tensor"}, "instead='aten.mul.Tensor': it is no function"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_an_entry_whose_functions_are_none_is_refused_at_once(case):
    more, problem = ENTRIES[case]
    with pytest.raises(InvalidRule, match=problem):
        check_registry(RuleRegistry.of(OpRule("aten.clone.default", clone_rows, "copy", "none", **more)))


AT_USE = {
    "own raises": ({"own": lambda query: query["rows"]}, "own: KeyError: 'rows': it raised when asked about"),
    "own names nothing": ({"own": lambda query: {"N": 2}}, "own: N: the op has no such argument"),
    "instead raises": ({"instead": lambda query: query["dims"]}, "instead: KeyError: 'dims': it raised when asked"),
    "instead is no call": ({"instead": lambda query: None}, "instead: AttributeError: "),
    "instead is no op": ({"instead": lambda query: Call("aten.nothing.default", (Leaf(0),))}, "instead: AttributeError: "),
    "instead loses a tensor": ({"instead": lambda query: Call("aten.rand.default", ([2],))},
                               "the call has 1 tensors, that one leaves none"),
}  # fmt: skip


@pytest.mark.parametrize("case", AT_USE)
def test_calls_of_a_ranks_own_that_make_no_sense_are_refused_at_use_and_name_the_rules_line(case):
    more, problem = AT_USE[case]
    book = RuleRegistry.of(OpRule("aten.clone.default", clone_rows, "copy", "none", **more))
    with pytest.raises(InvalidRule, match=problem) as raised:
        Propagator(book).propagate("aten.clone.default", [spec_of(Mesh.of(2), "S(0)", (4, 3))])
    assert raised.value.where.endswith(f"{HERE}:{inspect.getsourcelines(clone_rows)[1]}")


def test_arguments_of_a_ranks_own_are_those_of_its_pieces_and_none_where_it_has_all():
    entry = OpRule(
        "aten.new_zeros.default", clone_rows, "factory", "none", ("size",), lambda query: {"layout": query["layout"]}
    )
    whole = RuleQuery(entry.op, {"size": [4], "layout": None}, (Meta((4,), F32),), (Meta((4,), F32),))
    own = own_arguments_function(entry)
    assert own(whole, whole) == {}
    assert own(replace(whole, outputs=(Meta((2,), F32),)), whole) == {"size": [2], "layout": None}
    assert own(replace(whole, tensors=(Meta((2,), F32),)), whole) == {"layout": None}

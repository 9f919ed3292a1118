"""The property test that any cost of redistribution is put to, from Python and from the command line."""

import json
import math
from fractions import Fraction

import pytest
import torch

from localtensor.layout.mesh import Mesh
from localtensor.layout.spec import Spec, parse
from strategies.cli.commands import plan as cost_command
from strategies.cli.commands.plan import torch_cost
from strategies.cli.options import CostOptions
from strategies.planner.search.metric_check import (
    NOT_MONOTONE,
    BadCost,
    InvalidAnswer,
    MetricReport,
    Violation,
    amount_text,
    check_metric,
    specs_of,
)
from strategies.planner.steps.prices import Sent

TWO, SMALL = Mesh.of(2), tuple(map(parse, ("R", "S(0)")))
REDISTRIBUTE = "torch.distributed.tensor._collective_utils.redistribute_cost"
"""The private part that `strategies.cli.commands.plan` needs."""


def size(spec):
    return math.prod(1 if p.is_shard() else 2 for p in spec.placements)


def growth(src, dst):
    """Breaks the triangle inequality: two steps of one cost less than one of two."""
    return float(max(0, size(dst) - size(src)) ** 2)


def few(cost, mesh=TWO, **more):
    return check_metric(cost, mesh, (8,), placements=SMALL, **more)


@pytest.mark.parametrize(("mesh", "shape", "orders", "count"), [
    (Mesh.of(2, 2), (8, 8), False, 16), (Mesh.of(2), (8,), False, 3), (Mesh.of(2, 2, 2), (8, 8), False, 64),
    (Mesh.of(2, 2), (8, 8), True, 18), (Mesh.of(2, 2, 2), (8,), True, 27 + 1 * 5 + 6 * 1),
])  # fmt: skip
def test_all_specs_are_tried(mesh, shape, orders, count):
    specs = specs_of(mesh, shape, torch.float32, None, orders)
    assert len(specs) == len(set(map(repr, specs))) == count


def test_torchs_own_cost_breaks_the_triangle_inequality_in_hundreds_of_triples():
    found = check_metric(torch_cost, Mesh.of(2, 2))
    assert found.triples == 4096
    assert 50 < found.broken < 1000  # 282 on torch 2.13, and 94 of them without the steps that it takes for impossible
    assert not found.holds
    assert not found.odd
    worst = found.worst[0]
    assert worst.direct > torch_cost(worst.src, worst.via) + torch_cost(worst.via, worst.dst)


@pytest.mark.parametrize("price", [Sent(), lambda move: float(move.nbytes) ** 0.5, lambda move: 1])
def test_the_price_of_the_cheapest_plan_holds_whatever_a_step_costs(price):
    found = check_metric(price, Mesh.of(2), (5, 4), name="mine")
    assert (found.holds, found.broken, found.triples) == (True, 0, 64)
    assert found.lines()[-1] == "It is a metric on these, but for symmetry."


def test_broken_triples_are_counted_and_the_worst_is_reported_first():
    found = few(growth, Mesh.of(2, 2), unit="bytes")
    assert (found.broken, found.walls, found.triples, found.free) == (2, 0, 64, 7)
    assert found.lines(1) == [
        "growth: 2 of 64 triples break the triangle inequality (4 specs of f32[8] on Mesh(a=2, b=2))",
        "  S(0),S(0) -> R,R costs 9 B; by way of R,S(0) 5 B",
        "7 pairs of different specs cost nothing, which is no fault",
        "It is no metric.",
    ]
    three = check_metric(growth, Mesh.of(2, 2, 2), (8,), placements=SMALL)
    saved = [detour.saved for detour in three.worst]
    assert saved == sorted(saved, reverse=True)
    assert len(saved) == three.broken > 2


def test_a_wall_that_one_can_walk_around_is_reported():
    def walled(src, dst):
        return math.inf if size(src) == 1 and size(dst) == 4 else growth(src, dst) + 3 * (size(dst) > size(src))

    found = few(walled, Mesh.of(2, 2))
    assert (found.broken, found.walls) == (2, 2)
    assert "2 of 64 triples break the triangle inequality, 2 of them where it knows of no way, and" in found.lines()[0]
    assert found.lines()[1] == "  S(0),S(0) -> R,R costs infinitely much; by way of R,S(0) 1.1e+07 us"


def test_walls_are_reported_last():
    found = check_metric(torch_cost, Mesh.of(2, 2))
    kept = [math.isinf(detour.saved) for detour in found.worst]
    assert kept == sorted(kept)
    assert kept.count(False) == min(found.broken - found.walls, len(kept)) > 0


def test_where_there_is_no_way_at_all_nothing_is_broken():
    found = few(lambda src, dst: 0.0 if src == dst else math.inf)
    assert found.holds


@pytest.mark.parametrize(
    ("cost", "what", "count"),
    [
        (lambda src, dst: math.nan, "this is no number", 4),
        (lambda src, dst: -1.0, "a cost is never negative", 4),
        (lambda src, dst: 1.0, "there is nothing to do", 2),
    ],
)
def test_answers_that_no_cost_gives_are_reported(cost, what, count):
    found = few(cost)
    assert not found.holds
    assert {odd.what for odd in found.odd} == {what}
    assert len(found.odd) == count
    assert f"{count} answers: {what}" in found.lines()


def test_a_cost_that_changes_its_mind_is_reported():
    asked = []

    def moody(src, dst):
        asked.append(1)
        return 0.0 if src == dst else float(len(asked))

    assert {odd.what for odd in few(moody).odd} == {"a second call returns something else"}


@pytest.mark.parametrize(
    ("price", "what"),
    [
        (lambda move: -1, "a price is never negative"),
        (lambda move: math.nan, "this is no number"),
        (lambda move: math.inf, "the price of a step is finite; a step that there is not is no step"),
    ],
)
def test_no_plan_is_searched_by_what_is_no_price(price, what):
    found = few(price, unit="bytes")
    assert (found.triples, found.holds) == (0, False)
    assert {odd.what for odd in found.odd} == {what}
    assert found.lines()[0].startswith("<lambda>: not tried on triples, since no plan can be searched by such prices")


def test_a_price_that_changes_its_mind_is_no_price():
    asked = []
    found = few(lambda move: len(asked.append(1) or asked))
    assert {odd.what for odd in found.odd} >= {"a second call returns something else"}
    assert (found.triples, found.holds) == (0, False)


def test_a_price_that_falls_as_bytes_grow_is_reported_and_tried_all_the_same():
    found = few(lambda move: 1 / (1 + move.nbytes))
    assert {odd.what for odd in found.odd} == {NOT_MONOTONE}
    assert (found.triples, found.broken, found.holds) == (8, 0, False)
    assert found.odd[0].where == "a: local R -> S of 16 bytes"


def test_floats_are_seconds_and_whole_numbers_are_what_they_are():
    assert few(lambda move: 1e-6).unit == "s"
    assert few(lambda move: 1).unit == ""
    assert few(growth).unit == "s"
    assert few(lambda move: 1, unit="bytes").unit == "bytes"


def nobody(): ...
def three(a, b, c): ...
def named(a, b, *, c): ...
def raises(src, dst):
    raise RuntimeError("out of\norder")


def leaves(src, dst):
    raise SystemExit(0)


@pytest.mark.parametrize(("cost", "said"), [
    (3, "int: it is no function"), (Sent, "Sent: it is no function"), (max, "max: its parameters cannot be inspected"),
    (nobody, "nobody: it takes nothing, and not two specs or one move"),
    (three, "three: it takes a, b, c, and not"), (named, "named: it takes a, b, c, and not"),
    (raises, "raises: it raises RuntimeError: out of ("), (leaves, "leaves: it raises SystemExit: 0 ("),
    (lambda src, dst: "much", "<lambda>: it returns 'much' for f32[8] @ a:R -> f32[8] @ a:R, which is no number"),
    (lambda src, dst: None, "<lambda>: it returns None for"), (lambda move: True, "<lambda>: it returns True for"),
    (lambda move: torch.ones(()), "<lambda>: it returns tensor(1.) for"),
    (lambda move: 1e300, "<lambda>: it returns 1e+300 for Move("), (lambda move: 10**400, "<lambda>: it returns 1000000"),
    (lambda src, dst: -(10**400), "<lambda>: it returns -100000"),
    (lambda src, dst: Fraction(10**400), "<lambda>: it returns Fraction(1"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused(cost, said):
    with pytest.raises(BadCost) as caught:
        few(cost, name="" if cost != 3 else "int")
    assert str(caught.value).startswith(f"localtensor cost check: cost: {said}")
    assert "\n" not in str(caught.value)


def test_what_is_infinite_is_asked_all_the_same():
    assert few(lambda src, dst: 0 if src == dst else math.inf).holds


def test_more_specs_than_can_be_tried_are_refused():
    with pytest.raises(BadCost, match=r"they make 256 specs, and all triples of at most 128 are tried\. Take fewer"):
        check_metric(growth, Mesh.of(2, 2, 2, 2))


def test_stop_means_stop():
    def stopped(src, dst):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        few(stopped)


def test_json_has_no_number_that_json_has_not():
    spec = Spec(TWO, SMALL[:1], (8,), torch.float32)
    detour, odd = Violation(spec, spec, spec, math.inf, 1.0, 2.0), InvalidAnswer("x", "y", math.nan)
    told = MetricReport("mine", "s", (spec,), 1, 1, 1, (detour,), (odd,), 0).as_json()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["worst"][0] | {"direct": "inf", "around": 3.0} == told["worst"][0]
    assert (told["holds"], told["mesh"], told["dtype"]) == (False, [2], "float32")
    assert amount_text(-math.inf, "s") == "minus infinitely much"


# -- the command


MINE = """
from localtensor.layout.spec import short
def changed(src, dst):
    print("noise")
    return 1e-6 * sum(a != b for a, b in zip(src.placements, dst.placements))
def greedy(src, dst):
    return changed(src, dst) ** 2
class Model:
    def price(move): return move.nbytes
def broken(src, dst): return 1 / 0
number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "cost_of_mine.py").write_text(MINE)
    (tmp_path / "cost_that_fails.py").write_text("raise ValueError('no')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "cost_of_mine", raising=False)


def run(cost, mesh=(2,), shape=(8,), most=5, as_json=False):
    sizes = (",".join(map(str, each)) for each in (mesh, shape))
    return cost_command.check_cost(CostOptions(cost, *sizes, most, as_json))


@pytest.mark.parametrize(("cost", "code"), [
    ("torch", 1), ("time", 0), ("bytes", 0), ("cost_of_mine:changed", 0), ("cost_of_mine:greedy", 1),
    ("cost_of_mine:Model.price", 0),
])  # fmt: skip
def test_the_exit_code_says_whether_it_holds(cost, code, mine, capsys):
    assert run(cost, (2, 2)) == code
    out = capsys.readouterr().out
    assert out.startswith(f"{cost}: ")
    assert ("It is no metric." in out) == bool(code)
    assert "noise" not in out


def test_json_says_the_same(mine, capsys):
    assert run("cost_of_mine:greedy", (2, 2), as_json=True, most=2) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["cost"] == "cost_of_mine:greedy"
    assert told["broken"] > len(told["worst"]) == 2
    assert told["holds"] is False


@pytest.mark.parametrize(("given", "said"), [
    ({"cost": "tourch"}, "localtensor cost check: cost: 'tourch': there is no such cost. Did you mean torch?"),
    ({"cost": "x"}, "localtensor cost check: cost: 'x': there is no such cost. Use torch, time, bytes, or write package.module:"),
    ({"cost": "cost_of_mine:"}, "localtensor cost check: cost: 'cost_of_mine:': there is no such cost."),
    ({"cost": ":changed"}, "localtensor cost check: cost: '': this is no name of a module."),
    ({"cost": "cost_of_nobody:f"}, "localtensor cost check: cost: cost_of_nobody: there is no such module. Run from the folder"),
    ({"cost": "cost_that_fails:f"}, "localtensor cost check: cost: cost_that_fails: importing it raises ValueError: no ("),
    ({"cost": "cost_of_mine:chnged"}, "localtensor cost check: cost: 'cost_of_mine:chnged': cost_of_mine has no chnged. Did you"),
    ({"cost": "cost_of_mine:qqqqqqqq"}, "localtensor cost check: cost: 'cost_of_mine:qqqqqqqq': cost_of_mine has no qqqqqqqq. Name"),
    ({"cost": "cost_of_mine:number"}, "localtensor cost check: cost: cost_of_mine:number: it is no function. Write def cost(src,"),
    ({"cost": "cost_of_mine:broken"}, "localtensor cost check: cost: cost_of_mine:broken: it raises ZeroDivisionError: division"),
    ({"cost": "time", "mesh": ()}, "localtensor cost check: --mesh: '': this is no mesh of 1 to 65536 ranks. Write --mesh 2,2."),
    ({"cost": "time", "mesh": (2, 0)}, "localtensor cost check: --mesh: 2,0: this is no mesh"),
    ({"cost": "torch", "mesh": (10**6, 10**6)}, "localtensor cost check: --mesh: 1000000,1000000: this is no mesh"),
    ({"cost": "time", "mesh": (2,) * 5}, "localtensor cost check: placements: R S(0) P(sum) on Mesh(a=2, b=2, c=2, d=2, e=2): they"),
    ({"cost": "time", "shape": (8, -1)}, "localtensor cost check: --shape: '8,-1': these are no sizes."),
    ({"cost": "time", "most": -1}, "localtensor cost check: --most: -1: fewer than none cannot be shown."),
])  # fmt: skip
def test_what_cannot_be_followed_is_one_sentence_and_exit_code_2(given, said, mine, capsys):
    assert run(**given) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(said)
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("shape", [(), (0,), (1,)])
def test_scalars_and_empty_tensors_have_costs_as_well(shape, capsys):
    assert run("time", (2, 2), shape) == 0
    assert run("bytes", (1, 3), shape) == 0


def test_the_private_part_is_there():
    module, _, name = REDISTRIBUTE.rpartition(".")
    assert callable(getattr(__import__(module, fromlist=[name]), name))

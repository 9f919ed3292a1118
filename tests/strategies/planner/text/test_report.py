import contextlib
import io
import json
import random
from dataclasses import replace

import pytest

from strategies.planner.audit.compare import DTensorPlan, dtensor_plans
from strategies.planner.search.api import alternatives, plan, step_texts
from strategies.planner.steps.prices import TorchPrice
from strategies.planner.text.ascii import layout_text
from strategies.planner.text.options import BadPlanOption, plan_request
from strategies.planner.text.report import plan_json, plan_line, plan_report, python_code, ratio_text

TEXT = "f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)"


def shown(text=TEXT, their=None, **options):
    question = plan_request(text, **options)
    best = plan(question.src, question.dst, question.price, memory=question.memory)
    found = alternatives(best, question.price, memory=question.memory)
    return question, found, dtensor_plans(question.src, question.dst, question.price) if their is None else their


def test_the_plan_is_first_and_below_it_each_way_with_its_steps():
    lines = plan_report(*shown()).plain.splitlines()
    assert lines[:6] == [
        TEXT,
        "",
        "  dp: all-gather     S(0)   -> R     8.2 kB  5.66 us",
        "  tp: reduce-scatter P(sum) -> S(0)  8.2 kB  5.66 us",
        "  total: 2 steps, 16.4 kB sent, 11.3 us, 49.2 kB in use at most",
        lines[5],
    ]
    assert lines[7:9] == [
        "  ratio     time     sent   in use  torch's cost",
        "  1.00x  11.3 us  16.4 kB  49.2 kB       14.6 us  the cheapest, fewest steps",
    ]
    assert lines[10] == f"      {plan_line(shown()[1][1].plan)}" and lines[10].count(" -> ") == 3
    assert sum("DTensor" in line for line in lines) == 2
    assert all(line.index("x  ") == 6 for line in lines[8:] if line.startswith("  ") and "x  " in line)


def test_a_plan_of_dtensor_that_is_wrong_refused_or_not_asked_says_so():
    question, found, _ = shown()
    their = [
        DTensorPlan("greedy", found[1].plan, wrong="it ends at x"),
        DTensorPlan("graph", None, refused="ValueError: no"),
    ]
    text = plan_report(question, found, their).plain
    assert "wrong: it ends at x" in text and "DTensor, graph-based refuses: ValueError: no" in text
    assert (
        "DTensor, greedy was not asked: x"
        in plan_report(question, found, [DTensorPlan("greedy", None, skipped="not asked: x")]).plain
    )


def test_a_plan_of_dtensor_that_needs_more_than_is_allowed_says_so():
    question, found, _ = shown(memory="30kB")
    over = shown()[1][0].plan
    assert "this is over --memory" in plan_report(question, found, [DTensorPlan("greedy", over)]).plain
    assert "this is over --memory" not in plan_report(question, found, [DTensorPlan("greedy", found[0].plan)]).plain


def test_figures_are_those_of_the_plans():
    question, found, their = shown()
    told = json.loads(plan_json(question, found, their))
    plans = [found[0].plan, *(way.plan for way in found), *(one.plan for one in their)]
    for one, plan_ in zip([told["plan"], *told["alternatives"], *told["dtensor"].values()], plans, strict=True):
        assert (one["sent"], one["memory"], one["seconds"]) == (plan_.sent, plan_.memory, plan_.seconds)
        assert one["torch_us"] == pytest.approx(torch_cost(plan_), rel=1e-12)
    assert told["plan"]["sent"] != told["plan"]["memory"]
    text = plan_report(question, found, their).plain
    assert text.count("the same steps") == sum(step_texts(one.plan) == step_texts(found[0].plan) for one in their) == 1


def torch_cost(made):
    """Microseconds, by torch itself."""
    price = TorchPrice.of(made.src.mesh)
    return sum(price(step.move) for step in made.steps) / 1_000_000


def test_a_step_that_sends_nothing_has_no_bytes():
    assert plan_report(*shown("f32[8] @ dp=2: R -> S(0)")).plain.splitlines()[2] == "  dp: local R -> S(0)    1 us"


def test_a_price_of_ones_own_has_a_column_and_a_ratio_to_nothing_is_null():
    question, found, _ = shown()
    own = replace(question, by="mine:price", unit="")
    assert "  ratio       price     time" in plan_report(own, found, ()).plain
    assert " price " not in plan_report(question, found, ()).plain
    free = [replace(found[0], plan=replace(found[0].plan, price=0)), *found[1:]]
    told = json.loads(plan_json(question, free, ()))
    assert [way["ratio"] for way in told["alternatives"]] == [1.0, *[None] * (len(found) - 1)]
    assert "\n   more  " in plan_report(question, free, ()).plain


def test_what_dtensor_does_on_cpu_is_said_where_it_is_dearer_there():
    question, found, their = shown("f32[8,8] @ dp=2: S(0) -> S(1)")
    [line] = [line for line in plan_report(question, found, their).plain.splitlines() if "cpu" in line]
    assert line == "      the same steps; on cpu it gathers instead of each all-to-all, 1.20x and 128 B"
    told = json.loads(plan_json(question, found, their))["dtensor"]["greedy"]
    assert [step["kind"] for step in told["on_cpu"]["steps"]] == ["all_gather", "local"]
    assert told["on_cpu"]["ratio"] == told["on_cpu"]["price"] / found[0].plan.price > told["ratio"] == 1
    assert "cpu" not in plan_report(*shown("f32[8,8] @ dp=2: S(0) -> R")).plain


def test_nothing_to_do_is_said_once_for_each():
    lines = plan_report(*shown("f32[8] @ dp=2: R -> R")).plain.splitlines()
    assert lines[2] == "  total: nothing to do"
    assert lines[-2:] == ["DTensor, greedy: nothing to do", "DTensor, graph-based: nothing to do"]


def test_one_object_of_json():
    question, found, their = shown(by="bytes", memory="1MB")
    told = json.loads(plan_json(question, found, their))
    assert list(told) == ["text", "by", "unit", "memory_limit", "flattened", "plan", "why", "alternatives", "dtensor"]
    assert (told["text"], told["by"], told["unit"], told["memory_limit"]) == (TEXT, "bytes", "bytes", 1_000_000)
    best = found[0].plan
    assert told["plan"]["price"] == best.price == told["plan"]["sent"]
    first = best.steps[0]
    assert told["plan"]["steps"][0] == {
        "kind": first.kind, "axes": [best.src.mesh.names[axis] for axis in first.axes], "was": "dp:S(0), tp:P(sum)",
        "now": layout_text(first.now), "sent": first.sent, "seconds": first.seconds, "memory": first.memory,
    }  # fmt: skip
    assert [len(way["steps"]) for way in told["alternatives"]] == [len(way.plan.steps) for way in found]
    assert told["alternatives"][0]["ratio"] == 1 and set(told["dtensor"]) == {"greedy", "graph"}


def test_json_of_what_dtensor_does_not_do():
    question, found, _ = shown()
    told = json.loads(
        plan_json(
            question, found, [DTensorPlan("greedy", None, refused="no"), DTensorPlan("graph", None, skipped="slow")]
        )
    )
    assert told["dtensor"] == {"greedy": {"refused": "no"}, "graph": {"not_asked": "slow"}}


def test_of_very_many_steps_the_first_are_reported():
    made = shown()[1][0].plan
    many = replace(made, steps=made.steps * 5)
    assert plan_line(many).count("; ") == 6 and plan_line(many).endswith("; and 4 more")
    assert plan_line(replace(made, steps=made.steps * 4)).count(" -> ") == 8


def test_only_what_stands_out_has_a_style():
    text = plan_report(*shown())
    styled = {text.plain[span.start : span.end].strip(): span.style for span in text.spans if span.style}
    assert text.style == "" and styled[TEXT] == "bold" and styled["dp:"] == "cyan"
    assert not any("8.2 kB  5.66 us" in words for words in styled)


def test_small_words():
    _, found, _ = shown("f32[8] @ dp=2: R -> R")
    assert plan_line(found[0].plan) == "nothing to do"
    assert [ratio_text(ratio) for ratio in (1, 2.345, 12_345.6)] == ["1.00x", "2.35x", "12,345.60x"]


REORDERED = "f32[64,64] @ dp=2,tp=2: S(0)[1],S(0)[0] -> P(sum),S(1)"


@pytest.mark.parametrize("options", [
    {},
    {"by": "bytes"},
    {"by": "torch", "memory": "1MB"},
    {"inner": "3,300", "outer": "5,25", "flattened": ["dp,tp"]},
    {"by": "bytes", "topology": "300,25"},
], ids=str)  # fmt: skip
def test_the_code_makes_the_same_plan(options):
    question = plan_request(REORDERED, **options)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(python_code(question), {})
    made = plan(
        question.src, question.dst, question.price, topology=question.topology, memory=question.memory,
        flattened=question.flattened,
    )  # fmt: skip
    assert printed.getvalue() == f"{made}\n"


def test_the_code_of_random_questions_makes_the_same_plan():
    rng = random.Random(5)
    for _ in range(60):
        sizes = [rng.choice((1, 2, 3)) for _ in range(rng.choice((1, 2, 3)))]
        was, now = (",".join(rng.choice(("R", "S(0)", "S(1)", "SS(0,2)", "P(max)")) for _ in sizes) for _ in "12")
        text = f"f32[{rng.choice((0, 5, 64))},7] @ {','.join(map(str, sizes))}: {was} -> {now}"
        question = plan_request(text, by=rng.choice(("time", "bytes", "torch")), topology=rng.choice((None, "300,25")))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(python_code(question), {})
        made = plan(question.src, question.dst, question.price, topology=question.topology)
        assert printed.getvalue() == f"{made}\n", text


def test_a_price_of_ones_own_is_no_value(tmp_path, monkeypatch):
    (tmp_path / "code_price.py").write_text("def price(move):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadPlanOption, match=r"^plan: --code: --by code_price:price: a price of your own"):
        python_code(plan_request(REORDERED, by="code_price:price"))

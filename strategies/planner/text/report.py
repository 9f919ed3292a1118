"""A plan, its alternatives and DTensor's plans: in columns for people, as JSON, and as Python code."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.text import Text

from localtensor._util.units import bytes_text, time_text
from strategies.planner.audit.compare import DTensorPlan
from strategies.planner.search.api import RankedPlan, price_of, step_texts
from strategies.planner.steps.plan import PICO, Plan
from strategies.planner.steps.prices import TOPOLOGY, TorchPrice
from strategies.planner.text.ascii import layout_text
from strategies.planner.text.options import PRICES, BadPlanOption, PlanRequest
from strategies.planner.text.parser import text_of

MOST_STEPS = 8
"""The number of steps shown in a line."""
_TITLES = {"greedy": "DTensor, greedy", "graph": "DTensor, graph-based"}


def plan_report(asked: PlanRequest, ways: Sequence[RankedPlan], theirs: Sequence[DTensorPlan]) -> Text:
    """The plan, a line for each step; then the table of alternatives, each with its steps below it."""
    best = ways[0].plan
    shown = Text().append(f"{text_of(asked.src, asked.dst)}\n\n", style="bold")
    shown.append_text(plan_columns(best))
    if best.steps and (len(ways) > 1 or theirs):
        shown.append("\n\n").append_text(_alternatives_table(asked, ways, theirs))
    elif theirs:
        shown.append("\n").append("\n".join(f"{_TITLES[one.mode]}: {_dtensor_text(one, best)}" for one in theirs))
    return shown


def plan_columns(plan: Plan) -> Text:
    """The steps in columns, the total, and how the plan was found.

    >>> from strategies.planner.text.parser import read
    >>> from strategies.planner.search.api import plan
    >>> print(plan_columns(plan(*read("f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)"))).plain.partition(" the cheapest")[0].rstrip())
      dp: all-gather     S(0)   -> R     8.2 kB  5.66 us
      tp: reduce-scatter P(sum) -> S(0)  8.2 kB  5.66 us
      total: 2 steps, 16.4 kB sent, 11.3 us, 49.2 kB in use at most
    """
    shown = Text()
    if plan.steps:
        rows = [step.columns for step in plan.steps]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for where, kind, was, now, sent, took in rows:
            shown.append("  ").append(f"{where}:".ljust(wide[0] + 2), style="cyan")
            shown.append(kind.ljust(wide[1] + 1), style="bold").append(f"{was.ljust(wide[2])} -> {now.ljust(wide[3])}")
            shown.append(f"  {sent.rjust(wide[4])}  {took.rjust(wide[5])}\n")
    shown.append(f"  {plan.total}\n").append(f"  {plan.why}", style="dim")
    return shown


def plan_line(plan: Plan) -> str:
    """The steps side by side, without their costs; of very many the first ones."""
    rows = [step.columns[:4] for step in plan.steps]
    shown = rows if len(rows) <= MOST_STEPS else rows[: MOST_STEPS - 2]
    more = f"; and {len(rows) - len(shown)} more" if shown != rows else ""
    return "; ".join(f"{where}: {kind} {was} -> {now}" for where, kind, was, now in shown) + more or "nothing to do"


def _alternatives_table(asked: PlanRequest, ways: Sequence[RankedPlan], theirs: Sequence[DTensorPlan]) -> Text:
    """A line of figures for each alternative, and its steps; DTensor's plans last."""
    best, torch, own = ways[0].plan, TorchPrice.of(asked.src.mesh), asked.by not in PRICES
    heads = ["ratio", *(["price"] if own else []), "time", "sent", "in use", "torch's cost"]
    rows: list[tuple[list[str], str, str, str]] = []

    def add(name: str, way: RankedPlan, below: str, style: str) -> None:
        plan = way.plan
        price = [asked.price_text(plan.price)] if own else []
        size = [bytes_text(plan.sent), bytes_text(plan.memory)]
        figures = [*price, time_text(plan.seconds), *size, time_text(price_of(plan, torch) / PICO)]
        rows.append(([ratio_text(way.ratio(best.price)), *figures], name, below, style))

    for number, way in enumerate(ways):
        add(", ".join(way.names), way, plan_line(way.plan) if number else "", "" if number else "bold")
    for one in theirs:
        if one.plan is None:
            rows.append(([], f"{_TITLES[one.mode]} {_dtensor_text(one, best)}", "", ""))
        else:
            over = "; this is over --memory" if asked.memory is not None and one.plan.memory > asked.memory else ""
            below, style = _dtensor_text(one, best) + over, "red" if one.wrong else ""
            add(_TITLES[one.mode], RankedPlan((), one.plan), below, style)
    return _figures_table(heads, rows)


def _figures_table(heads: list[str], rows: Sequence[tuple[list[str], str, str, str]]) -> Text:
    """Figures in columns, each line with a name, and details below it."""
    lines = [heads, *(figures for figures, *_ in rows if figures)]
    wide = [max(len(line[column]) for line in lines) for column in range(len(heads))]

    def line(figures: Sequence[str]) -> str:
        return "  " + "".join(figure.rjust(width) + "  " for figure, width in zip(figures, wide, strict=False))

    shown = Text().append(line(heads).rstrip(), style="dim")
    for figures, name, below, style in rows:
        shown.append("\n" + line(figures) + name, style=style)
        if below:
            shown.append(f"\n      {below}", style="dim")
    return shown


def _dtensor_text(one: DTensorPlan, best: Plan) -> str:
    """DTensor's plan in words."""
    if one.plan is None:
        return f"refuses: {one.refused}" if one.refused else f"was {one.skipped}"
    steps = "the same steps" if step_texts(one.plan) == step_texts(best) and best.steps else plan_line(one.plan)
    cpu = ""
    if one.gathered:
        ratio = ratio_text(RankedPlan((), one.gathered).ratio(best.price))
        cpu = f"; on cpu it gathers instead of each all-to-all, {ratio} and {bytes_text(one.gathered.sent)}"
    return f"{steps}{cpu}; wrong: {one.wrong}" if one.wrong else f"{steps}{cpu}"


def ratio_text(ratio: float) -> str:
    """A price ratio.

    >>> ratio_text(1.0), ratio_text(12.345), ratio_text(float("inf"))
    ('1.00x', '12.35x', 'more')
    """
    return "more" if ratio == float("inf") else f"{ratio:,.2f}x"


def plan_json(asked: PlanRequest, ways: Sequence[RankedPlan], theirs: Sequence[DTensorPlan]) -> str:
    """One JSON object with a stable format: existing keys stay, new ones may be added.

    | key            | meaning                                                                                     |
    |----------------|---------------------------------------------------------------------------------------------|
    | `text`         | the request, in the syntax of `localtensor plan`                                            |
    | `by`, `unit`   | the price that was minimized; `ps`, `bytes`, or "" for integers of a user's own price       |
    | `memory_limit` | bytes, or null                                                                              |
    | `flattened`    | lists of axes that have one group                                                           |
    | `plan`         | the cheapest: see below                                                                     |
    | `why`          | how it was found, in words                                                                  |
    | `alternatives` | plans with `names` and `ratio` (to the cheapest; null where that is free), the cheapest first |
    | `dtensor`      | by planner, `greedy` and `graph`: `refused`, `not_asked`, or a plan with `ratio`, `wrong` and `on_cpu` |

    A plan has `price` (an integer in `unit`), `seconds`, `sent` and `memory` (bytes of a rank), `torch_us` (torch's own
    cost), and `steps`: `kind`, `axes`, `was`, `now`, `sent`, `seconds`, `memory`. `wrong` is "" for a right plan;
    `on_cpu` is the plan with its all-to-alls gathered and sliced, as DTensor does there, or null if it has none.
    """
    best = ways[0].plan
    torch = TorchPrice.of(asked.src.mesh)
    others = [{"names": list(w.names), "ratio": _ratio_json(w, best), **_plan_json(w.plan, torch)} for w in ways]
    found = {
        "text": text_of(asked.src, asked.dst),
        "by": asked.by,
        "unit": asked.unit,
        "memory_limit": asked.memory,
        "flattened": [list(names) for names in asked.flattened],
        "plan": _plan_json(best, torch),
        "why": best.why,
        "alternatives": others,
        "dtensor": {one.mode: _dtensor_json(one, best, torch) for one in theirs},
    }
    return json.dumps(found, indent=1) + "\n"


def _plan_json(plan: Plan, torch: TorchPrice) -> dict[str, object]:
    steps = [{
        "kind": step.kind, "axes": [step.was.mesh.names[axis] for axis in step.axes], "was": layout_text(step.was),
        "now": layout_text(step.now), "sent": step.sent, "seconds": step.seconds, "memory": step.memory,
    } for step in plan.steps]  # fmt: skip
    return {
        "price": plan.price, "seconds": plan.seconds, "sent": plan.sent, "memory": plan.memory,
        "torch_us": price_of(plan, torch) / 1e6, "steps": steps,
    }  # fmt: skip


def _dtensor_json(one: DTensorPlan, best: Plan, torch: TorchPrice) -> dict[str, object]:
    if one.plan is None:
        return {"refused": one.refused} if one.refused else {"not_asked": one.skipped}
    cpu = one.gathered and {"ratio": _ratio_json(RankedPlan((), one.gathered), best), **_plan_json(one.gathered, torch)}
    ratio = _ratio_json(RankedPlan((), one.plan), best)
    return {"ratio": ratio, "wrong": one.wrong, "on_cpu": cpu, **_plan_json(one.plan, torch)}


def _ratio_json(way: RankedPlan, best: Plan) -> float | None:
    """None where the best is free, and this is not."""
    ratio = way.ratio(best.price)
    return None if ratio == float("inf") else ratio


def python_code(asked: PlanRequest) -> str:
    """Python code that computes the same plan. Raises `BadPlanOption` for a user's own price, which has no literal.

    >>> from strategies.planner.text.options import plan_request
    >>> print(python_code(plan_request("f32[8] @ dp=2: S(0) -> R", by="bytes", memory="1kB")))
    import localtensor as lt
    <BLANKLINE>
    src, dst = lt.planner.read('f32[8] @ dp=2: S(0) -> R')
    print(lt.plan(src, dst, lt.planner.Sent(), memory=1000))
    """
    if asked.by not in PRICES:
        problem = "a price of your own cannot be written as a value"
        raise BadPlanOption("--code", f"--by {asked.by}", problem, "Ask for --by time, bytes or torch.")
    lines, arguments = ["import localtensor as lt", ""], ["src", "dst"]
    if asked.by == "torch":
        arguments.append("lt.planner.TorchPrice.of(src.mesh)")
    if asked.by == "bytes":
        arguments.append("lt.planner.Sent()")
    if asked.topology != TOPOLOGY:
        lines.append("Network, Topology = lt.planner.Network, lt.planner.Topology")
        arguments.append(f"topology={asked.topology}")
    if asked.memory is not None:
        arguments.append(f"memory={asked.memory}")
    if asked.flattened:
        arguments.append(f"flattened={list(asked.flattened)}")
    lines.append(f"src, dst = lt.planner.read({text_of(asked.src, asked.dst)!r})")
    return "\n".join([*lines, f"print(lt.plan({', '.join(arguments)}))"])

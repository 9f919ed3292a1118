"""`localtensor plan`: prints or draws the cheapest redistribution.  `localtensor cost check`: tests a cost function.

| torch part                                                       | needed for                | read on     | run on |
|------------------------------------------------------------------|---------------------------|-------------|--------|
| torch.distributed.tensor._collective_utils.redistribute_cost     | the cost `torch`          | 2.11 - 2.15 | 2.13   |

It is called with a mesh of CPU ranks, each of which torch takes for a host of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed.tensor._collective_utils import redistribute_cost

from localtensor.errors import LocalTensorError
from localtensor.layout import Mesh, Spec
from strategies.base.atomic_files import why_not_writable, write_whole
from strategies.base.foreign_text import PrintableConsole
from strategies.base.progress import error_console, progress_bar
from strategies.base.signals import EXIT_CLEAN, EXIT_NOTHING, EXIT_USAGE, EXIT_WRONG, print_error, write_stdout
from strategies.cli.options import NO_COST, CostOptions, PlanOptions, fail, known_costs
from strategies.planner.audit.compare import DTensorPlan, dtensor_plans
from strategies.planner.search.api import CHEAPEST, NoPlan, RankedPlan, alternatives, plan
from strategies.planner.search.metric_check import BadCost, check_metric
from strategies.planner.steps.plan import Plan
from strategies.planner.steps.prices import Sent, Time
from strategies.planner.text import report, svg
from strategies.planner.text.ascii import ASCII, SIGNS, ascii_picture
from strategies.planner.text.options import BadPlanOption, PlanRequest, parse_sizes, plan_request
from strategies.planner.text.parser import text_of
from strategies.torch_api.specs import device_mesh, to_torch
from strategies.torch_api.user_modules import import_user_module

PICTURES = (".svg", ".html", ".txt")
SEARCH = "Searching for other ways; --no-alternatives does without them"
"""Shown on a terminal during the search for alternatives: on a mesh of eight axes it takes many seconds."""
HERE = "-"
"""The name of a picture that is printed, not written to a file."""


def run(options: PlanOptions) -> int:
    """The exit code: 0; 1 without a plan within --memory; 2 for invalid options; 3 if the output cannot be written."""
    errors = error_console()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the output of a user's own price is no part of the plan
            query = _query(options)
            code = report.python_code(query) if options.code else ""
            best = plan(
                query.src,
                query.dst,
                query.price,
                topology=query.topology,
                memory=query.memory,
                flattened=query.flattened,
            )
            with errors.status(SEARCH) if errors.is_terminal else contextlib.nullcontext():
                found, theirs = _alternatives(options, query, best)
    except LocalTensorError as error:  # a user's own price may fail at any step
        return fail(str(error), EXIT_WRONG if isinstance(error, NoPlan) and error.leanest else EXIT_USAGE)
    text = code + "\n" if options.code else _text(options, query, found, theirs)
    problems = [
        problem
        for problem in (write_stdout(text, coloured=not options.as_json), _write_picture(options, best))
        if problem
    ]
    for problem in problems:
        print_error(f"localtensor: {problem}")
    return EXIT_NOTHING if problems else EXIT_CLEAN


def _query(options: PlanOptions) -> PlanRequest:
    query = plan_request(
        options.text,
        by=options.by,
        topology=options.topology,
        inner=options.inner,
        outer=options.outer,
        per_node=options.per_node,
        memory=options.memory,
        flattened=options.flattened,
        folder=str(Path.cwd()),
    )
    if options.picture is not None and options.picture != HERE:
        path = Path(options.picture)
        if path.suffix not in PICTURES:
            remedy = f"Name a file that ends in {', '.join(PICTURES)}, or - to print it."
            raise BadPlanOption("--picture", ascii(options.picture[:80]), "there is no picture of that kind", remedy)
        problem, remedy = why_not_writable(path)
        if problem:
            raise BadPlanOption("--picture", ascii(options.picture[:80]), problem, remedy)
    given = (("--json", options.as_json), ("--code", options.code), ("--picture -", options.picture == HERE))
    instead = [name for name, is_given in given if is_given]
    if len(instead) > 1:
        problem = f"{instead[1]} prints something else in the same place"
        raise BadPlanOption(instead[0], "given", problem, "Ask for one of the two.")
    return query


def _alternatives(
    options: PlanOptions, query: PlanRequest, best: Plan
) -> tuple[tuple[RankedPlan, ...], tuple[DTensorPlan, ...]]:
    """The cheapest plan with its alternatives, and DTensor's own plans, as far as the options want them."""
    src, dst, price, links, groups = query.src, query.dst, query.price, query.topology, query.flattened
    found: tuple[RankedPlan, ...] = (RankedPlan((CHEAPEST,), best),)
    if options.code:
        return found, ()
    if options.alternatives:
        found = alternatives(best, price, topology=links, memory=query.memory, flattened=groups)
    return found, dtensor_plans(src, dst, price, topology=links, flattened=groups) if options.dtensor else ()


def _text(
    options: PlanOptions, query: PlanRequest, found: tuple[RankedPlan, ...], theirs: tuple[DTensorPlan, ...]
) -> str:
    if options.as_json:
        return report.plan_json(query, found, theirs)
    stdout, text = Console(), io.StringIO()
    console = PrintableConsole(
        file=text, force_terminal=stdout.is_terminal, highlight=False, soft_wrap=True, emoji=False
    )
    console.print(report.plan_report(query, found, theirs))
    if options.picture == HERE:
        signs = SIGNS if "utf" in stdout.encoding.lower() else ASCII
        console.print("\n" + ascii_picture(found[0].plan.stages, signs=signs), markup=False)
    return text.getvalue()


def _write_picture(options: PlanOptions, best: Plan) -> str:
    """Draw the picture, if a file is named.  Why it could not be written, or ""."""
    if options.picture is None or options.picture == HERE:
        return ""
    try:
        write_whole(Path(options.picture), picture(best, Path(options.picture).suffix))
    except OSError as trouble:
        return f"{options.picture}: {trouble.strerror}; the plan above is whole"
    return ""


def picture(plan: Plan, suffix: str) -> str:
    """The picture of a plan as a file of that kind: `.svg`, `.html` or `.txt`."""
    title = text_of(plan.src, plan.dst)
    if suffix == ".svg":
        return svg.svg(plan.stages, title)
    if suffix == ".html":
        return svg.html_page(plan.stages, title, f"{plan}\n{plan.total}")
    return f"{title}\n\n{ascii_picture(plan.stages)}\n"


def torch_cost(src: Spec, dst: Spec) -> float:
    """torch's own cost of a redistribution in seconds; infinite where it knows no way.

    >>> import torch
    >>> from localtensor.layout import parse
    >>> src, dst = (Spec(Mesh.of(2), (parse(p),), (8, 8), torch.float32) for p in ("S(0)", "R"))
    >>> f"{torch_cost(src, dst) * 1e6:.1f} us"
    '9.3 us'
    """
    mesh = device_mesh(src.mesh)
    return float(redistribute_cost(to_torch(src, mesh), to_torch(dst, mesh))) / 1e6


OURS: dict[str, tuple[Callable[..., float], str]] = {
    "torch": (torch_cost, "s"), "time": (Time(), "ps"), "bytes": (Sent(), "bytes"),
}  # fmt: skip
"""Known costs with their units: torch's redistribute_cost of two specs, and our prices of one step."""
RANKS = 65536
"""The most ranks of a mesh: torch's mesh is a tensor of them."""


def check_cost(options: CostOptions) -> int:
    """The exit code: 0 it is a metric, 1 it is none, 2 it cannot be called, 3 the report could not be written.

    The cost is `torch`, `time`, `bytes` or `package.module:function`, which is imported from the working folder.
    At most `options.most` broken triples are shown, and as many values that no cost may have.
    """
    cost, call = options.name, "localtensor cost check"
    try:
        mesh, shape = parse_sizes("--mesh", options.mesh, call), parse_sizes("--shape", options.shape, call)
        if not mesh or min(mesh) < 1 or Mesh.of(*mesh).ranks > RANKS:
            shown = ",".join(map(str, mesh)) or "''"
            raise BadCost("--mesh", shown, f"this is no mesh of 1 to {RANKS} ranks", "Write --mesh 2,2.")
        if options.most < 0:
            raise BadCost("--most", str(options.most), "fewer than none cannot be shown", "Write --most 5.")
        with contextlib.redirect_stdout(sys.stderr):  # the output of the user's function is no part of the report
            function, unit = OURS.get(cost) or (cost_function(cost, os.getcwd()), "")
            with progress_bar(error_console(), options.quiet) as progress:
                checked = check_metric(function, Mesh.of(*mesh), shape, name=cost, unit=unit, progress=progress)
    except LocalTensorError as error:
        return fail(str(error), EXIT_USAGE)
    most = options.most
    text = json.dumps(checked.as_json(most), indent=2) if options.as_json else "\n".join(checked.lines(most))
    if problem := write_stdout(text + "\n"):
        return fail(f"localtensor: {problem}", EXIT_NOTHING)
    return EXIT_CLEAN if checked.holds else EXIT_WRONG


def cost_function(cost: str, folder: str) -> Callable[..., Any]:
    """The function named `package.module:function`, imported from `folder`.  Raises `BadCost`."""
    module, colon, name = cost.partition(":")
    if not colon or not name:
        raise BadCost("cost", repr(cost), NO_COST, known_costs(cost))
    value: Any = import_user_module(module, folder, partial(BadCost, "cost"))
    for part in name.split("."):
        if not hasattr(value, part):
            near = get_close_matches(part, [each for each in dir(value) if not each.startswith("_")], n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Name a function of it."
            raise BadCost("cost", repr(cost), f"{module} has no {name}", remedy)
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]  # `check_metric` raises if it is no function

"""What `localtensor plan` does once its options are read: the plan, what else there is, a picture; the exit code."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from localtensor.errors.base import LocalTensorError
from strategies.base.atomic_files import unwritable, write_whole
from strategies.base.exits import CLEAN, NOTHING, USAGE, WRONG, wrote
from strategies.planner.audit.compare_with_torch import Theirs, theirs
from strategies.planner.picture import ascii as plan_picture_text
from strategies.planner.picture import svg as plan_picture_svg
from strategies.planner.search.alternatives import CHEAPEST, Way, ways
from strategies.planner.search.api import NoPlan, plan
from strategies.planner.steps.plan import Plan
from strategies.planner.text import report as plan_shown
from strategies.planner.text.options import Asked, BadPlanOption, asked
from strategies.planner.text.parser import text_of
from strategies.planner.text.plan_code import code_of

PICTURES = (".svg", ".html", ".txt")
SEARCH = "Searching for other ways; --no-alternatives does without them"
"""Shown meanwhile, on a terminal: on a mesh of eight axes they take many seconds, and the plan does not."""
HERE = "-"
"""As the name of a picture: print it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options as they were typed."""

    text: str
    by: str
    topology: str | None
    inner: str | None
    outer: str | None
    per_node: int | None
    memory: str | None
    flattened: tuple[str, ...]
    alternatives: bool
    dtensor: bool
    picture: str | None
    code: bool
    as_json: bool


def run(wanted: Wanted) -> int:
    """0; 1 if there is no plan within the memory; 2 for what cannot be read, or cannot be at all; 3 for a lost picture."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a user's own price prints is no part of the plan
            question = _question(wanted)
            code = code_of(question) if wanted.code else ""
            best = plan(
                question.src, question.dst, question.price, topology=question.topology, memory=question.memory,
                flattened=question.flattened,
            )  # fmt: skip
            with errors.status(SEARCH) if errors.is_terminal else contextlib.nullcontext():
                found, their = _beside(wanted, question, best)
    except LocalTensorError as error:  # why: a user's own price may fail at any step
        errors.print(str(error), markup=False)
        return WRONG if isinstance(error, NoPlan) and error.leanest else USAGE
    text = code + "\n" if wanted.code else _text(wanted, question, found, their)
    problems = [problem for problem in (wrote(text), _drawn(wanted, best)) if problem]
    for problem in problems:
        errors.print(f"localtensor: {problem}", markup=False)
    return NOTHING if problems else CLEAN


def _question(wanted: Wanted) -> Asked:
    question = asked(
        wanted.text, by=wanted.by, topology=wanted.topology, inner=wanted.inner, outer=wanted.outer,
        per_node=wanted.per_node, memory=wanted.memory, flattened=wanted.flattened, folder=str(Path.cwd()),
    )  # fmt: skip
    if wanted.picture is not None and wanted.picture != HERE:
        path = Path(wanted.picture)
        if path.suffix not in PICTURES:
            remedy = f"Name a file that ends in {', '.join(PICTURES)}, or - to print it."
            raise BadPlanOption("--picture", ascii(wanted.picture[:80]), "there is no picture of that kind", remedy)
        problem, remedy = unwritable(path)
        if problem:
            raise BadPlanOption("--picture", ascii(wanted.picture[:80]), problem, remedy)
    given = (("--json", wanted.as_json), ("--code", wanted.code), ("--picture -", wanted.picture == HERE))
    instead = [name for name, is_given in given if is_given]
    if len(instead) > 1:
        problem = f"{instead[1]} prints something else in the same place"
        raise BadPlanOption(instead[0], "given", problem, "Ask for one of the two.")
    return question


def _beside(wanted: Wanted, question: Asked, best: Plan) -> tuple[tuple[Way, ...], tuple[Theirs, ...]]:
    """The other ways, and DTensor's, where they are wanted."""
    src, dst, price, links, sets = question.src, question.dst, question.price, question.topology, question.flattened
    found, their = (Way((CHEAPEST,), best),), ()
    if wanted.code:
        return found, their
    more = ways(best, price, topology=links, memory=question.memory, flattened=sets) if wanted.alternatives else found
    return more, theirs(src, dst, price, topology=links, flattened=sets) if wanted.dtensor else their


def _text(wanted: Wanted, question: Asked, found: tuple[Way, ...], their: tuple[Theirs, ...]) -> str:
    """What is printed."""
    if wanted.as_json:
        return plan_shown.as_json(question, found, their)
    there, shown = Console(), io.StringIO()
    console = Console(file=shown, force_terminal=there.is_terminal, highlight=False, soft_wrap=True, emoji=False)
    console.print(plan_shown.as_text(question, found, their))
    if wanted.picture == HERE:
        signs = plan_picture_text.SIGNS if "utf" in there.encoding.lower() else plan_picture_text.ASCII
        console.print("\n" + plan_picture_text.drawn(found[0].plan.stages, signs=signs), markup=False)
    return shown.getvalue()


def _drawn(wanted: Wanted, best: Plan) -> str:
    """Draw the picture, if a file is named; why it could not be written, or ""."""
    if wanted.picture is None or wanted.picture == HERE:
        return ""
    try:
        write_whole(Path(wanted.picture), picture(best, Path(wanted.picture).suffix))
    except OSError as trouble:
        return f"{wanted.picture}: {trouble.strerror}; the plan above is whole"
    return ""


def picture(plan: Plan, suffix: str) -> str:
    """The picture of a plan as a file of that kind: `.svg`, `.html` or `.txt`."""
    title = text_of(plan.src, plan.dst)
    if suffix == ".svg":
        return plan_picture_svg.svg(plan.stages, title)
    if suffix == ".html":
        return plan_picture_svg.page(plan.stages, title, f"{plan}\n{plan.total}")
    return f"{title}\n\n{plan_picture_text.drawn(plan.stages)}\n"

"""What `localtensor plan` does once its options are read: the plan, what else there is, a picture; the exit code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from strategies import plan_picture_svg, plan_picture_text, plan_shown
from strategies.files import write_whole
from strategies.leaving import CLEAN, NOTHING, USAGE, WRONG
from strategies.plan_alternatives import CHEAPEST, Way, ways
from strategies.plan_asked import Asked, BadPlanOption, asked
from strategies.plan_code import code_of
from strategies.plan_text import BadPlanText, text_of
from strategies.plan_theirs import Theirs, theirs
from strategies.planner import NoPlan, plan
from strategies.plans import Plan
from strategies.topology import BadTopology

PICTURES = (".svg", ".html", ".txt")
HERE = "-"
"""As the name of a picture: print it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options as they were typed."""

    text: str
    by: str
    topology: str
    inner: str
    outer: str
    per_node: int
    memory: str
    flattened: tuple[str, ...]
    alternatives: bool
    dtensor: bool
    picture: str
    code: bool
    as_json: bool


def run(wanted: Wanted) -> int:
    """0; 1 if there is no plan within the memory; 2 for what cannot be read, or cannot be at all; 3 for a lost picture."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        question = _question(wanted)
    except (BadPlanText, BadPlanOption, BadTopology) as error:
        errors.print(str(error), markup=False)
        return USAGE
    try:
        best = plan(
            question.src, question.dst, question.price, topology=question.topology, memory=question.memory,
            flattened=question.flattened,
        )  # fmt: skip
        found, their = _beside(wanted, question, best)
    except NoPlan as error:
        errors.print(str(error), markup=False)
        return WRONG if error.leanest else USAGE
    except BadPlanOption as error:  # why: a user's own price may fail at any step
        errors.print(str(error), markup=False)
        return USAGE
    return _tell(wanted, question, best, found, their, errors)


def _question(wanted: Wanted) -> Asked:
    question = asked(
        wanted.text, by=wanted.by, topology=wanted.topology, inner=wanted.inner, outer=wanted.outer,
        per_node=wanted.per_node, memory=wanted.memory, flattened=wanted.flattened, folder=str(Path.cwd()),
    )  # fmt: skip
    if wanted.picture and wanted.picture != HERE:
        path = Path(wanted.picture)
        if path.suffix not in PICTURES:
            remedy = f"Name a file that ends in {', '.join(PICTURES)}, or - to print it."
            raise BadPlanOption("--picture", ascii(wanted.picture[:80]), "there is no picture of that kind", remedy)
        if path.is_dir():
            raise BadPlanOption("--picture", ascii(wanted.picture[:80]), "this is a folder", "Name a file.")
    if wanted.as_json and (wanted.code or wanted.picture == HERE):
        other = "--code" if wanted.code else "--picture -"
        problem = f"{other} prints something else in the same place"
        raise BadPlanOption("--json", "given", problem, "Ask for one of the two.")
    return question


def _beside(wanted: Wanted, question: Asked, best: Plan) -> tuple[tuple[Way, ...], tuple[Theirs, ...]]:
    """The other ways, and DTensor's, where they are wanted."""
    src, dst, price, links, sets = question.src, question.dst, question.price, question.topology, question.flattened
    found, their = (Way((CHEAPEST,), best),), ()
    if wanted.code:
        return found, their
    more = ways(best, price, topology=links, memory=question.memory, flattened=sets) if wanted.alternatives else found
    return more, theirs(src, dst, price, topology=links, flattened=sets) if wanted.dtensor else their


def _tell(
    wanted: Wanted, question: Asked, best: Plan, found: tuple[Way, ...], their: tuple[Theirs, ...], errors: Console
) -> int:
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    signs = plan_picture_text.SIGNS if "utf" in console.encoding.lower() else plan_picture_text.ASCII
    if wanted.as_json:
        console.out(plan_shown.as_json(question, found, their), end="", highlight=False)
    elif wanted.code:
        console.out(code_of(question), highlight=False)
    else:
        console.print(plan_shown.as_text(question, found, their))
        if wanted.picture == HERE:
            console.print("\n" + plan_picture_text.drawn(best.stages, signs=signs), markup=False)
    if wanted.picture and wanted.picture != HERE:
        try:
            write_whole(Path(wanted.picture), picture(best, Path(wanted.picture).suffix))
        except OSError as trouble:
            errors.print(f"localtensor: {wanted.picture}: {trouble.strerror}; the plan above is whole", markup=False)
            return NOTHING
    return CLEAN


def picture(plan: Plan, suffix: str) -> str:
    """The picture of a plan as a file of that kind: `.svg`, `.html` or `.txt`."""
    title = text_of(plan.src, plan.dst)
    if suffix == ".svg":
        return plan_picture_svg.svg(plan.stages, title)
    if suffix == ".html":
        return plan_picture_svg.page(plan.stages, title, f"{plan}\n{plan.total}")
    return f"{title}\n\n{plan_picture_text.drawn(plan.stages)}\n"

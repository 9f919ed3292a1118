"""The pages of causes: text for a terminal, JSON, and tables for the documentation.  And the run of their scripts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localtensor.layout import shape_text
from strategies.base.progress import Progress
from strategies.model.rule import Program, placements_text
from strategies.model.verdict import Report, digest
from strategies.sweep.causes.cause import Cause
from strategies.sweep.causes.reach import spelled
from strategies.sweep.causes.script import SHOWS, ScriptRun, run_first_that_shows
from strategies.torch_api.rank_runs import RankProcesses

MOST_PRINTED = 400
"""Letters of what a script prints that a page shows; a longer text is cut."""


@dataclass(frozen=True, slots=True)
class Page:
    """A cause with its script and what came of its run; `run` is None where no case could be run or written."""

    cause: Cause
    run: ScriptRun | None
    file: str

    @property
    def reproduces(self) -> bool:
        return self.run is not None and self.run.verdict == SHOWS


def pages_of(causes: Sequence[Cause], progress: Progress) -> list[Page]:
    """The page of each cause, in their order; each script runs on real processes."""
    progress.phase("running scripts", len(causes))
    made: dict[int, Page] = {}
    ranked = sorted(range(len(causes)), key=lambda i: _ranks(causes[i]))  # other ranks need other processes
    with RankProcesses("gloo") as processes:
        for number in ranked:
            cause, name = causes[number], file_name(causes[number])
            script = None
            if cause.case is not None:
                script = run_first_that_shows(processes, cause.case, cause.name, _about(cause), name)
            made[number] = Page(cause, script, name)
            progress.tick()
    return [made[number] for number in range(len(causes))]


def _ranks(cause: Cause) -> int:
    return cause.case.program.ranks if cause.case is not None else 0


def file_name(cause: Cause) -> str:
    """The name of a cause's script: the same for the same cause in every run."""
    words = re.sub(r"\W+", "_", f"{cause.place.name if cause.place else cause.kind} {cause.what}").strip("_")
    return f"{words[:70].rstrip('_')}_{digest(cause.key)[:6]}.py"


def where(cause: Cause) -> str:
    """`torch/distributed/tensor/_ops/_math_ops.py:452`, or the kind of the cause where it has no file."""
    place = cause.place
    return f"{place.file}:{place.line}" if place is not None and place.file else cause.kind


def _about(cause: Cause) -> str:
    count = len(cause.findings)
    tried = f"Tried: {fix_text(cause)}." if cause.fix else "No single replacement makes the result right."
    return f"Found in torch {', '.join(cause.versions)}, {where(cause)}. It makes {count} finding{'s' * (count != 1)}. {tried}"


def fix_text(cause: Cause) -> str:
    """The fix that was tried, and how many of the findings it cured."""
    if not cause.fix:
        return "no single replacement cured it"
    return f"{cause.fix} cured {cause.cured} of {len(cause.findings)} findings"


def severity_text(cause: Cause) -> str:
    return str(cause.case.severity) if cause.case is not None else "no case"


def as_text(report: Report, pages: Sequence[Page]) -> str:
    """One page a cause, then the totals."""
    parts = [_page(number, page) for number, page in enumerate(pages, 1)]
    return "\n\n".join([*parts, totals(report, pages)]) + "\n"


def totals(report: Report, pages: Sequence[Page]) -> str:
    findings = sum(len(page.cause.findings) for page in pages)
    ran = [page for page in pages if page.run is not None]
    again = sum(page.reproduces for page in ran)
    return (
        f"torch {report.torch}: {findings} findings have {len(pages)} causes; the scripts of {len(ran)} were run on gloo, and "
        f"{again} of them show the fault."
    )


def _page(number: int, page: Page) -> str:
    cause = page.cause
    more = f" and {len(cause.ops) - 6} more" if len(cause.ops) > 6 else ""
    lines = [
        f"{number}. {cause.name}",
        f"   {severity_text(cause)}; {where(cause)}; torch {', '.join(cause.versions)}",
        f"   affects {len(cause.findings)} findings, of {', '.join(cause.ops[:6])}{more}",
    ]
    if page.run is None:
        lines.append("   there is no script: no simulated run of its cases shows the fault alone")
    else:
        lines += ["", *(f"       {line}" for line in page.run.lines.splitlines()), ""]
        lines += [f"   prints  {line}" for line in _cut(page.run.prints).splitlines()]
        if not page.reproduces:
            lines.append(f"   this script no longer reproduces it: it {page.run.verdict}")
        else:
            lines.append(f"   run it: python {page.file}")
    return "\n".join([*lines, f"   fix tried: {fix_text(cause)}"])


def _cut(text: str) -> str:
    return text if len(text) <= MOST_PRINTED else f"{text[:MOST_PRINTED]} ..."


def as_json(report: Report, pages: Sequence[Page], code: int) -> str:
    """The causes as JSON text, in their order."""
    body = {
        "schema": 1,
        "torch": report.torch,
        "seed": report.seed,
        "exit_code": code,
        "findings": sum(len(page.cause.findings) for page in pages),
        "causes": [_data(page) for page in pages],
    }
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def _data(page: Page) -> dict[str, Any]:
    cause, one = page.cause, page.run
    place = cause.place
    return {
        "name": cause.name,
        "kind": cause.kind,
        "function": place.name if place else None,
        "file": place.file or None if place else None,
        "line": place.line or None if place else None,
        "detail": place.detail or None if place else None,
        "severity": severity_text(cause),
        "versions": list(cause.versions),
        "ops": list(cause.ops),
        "findings": list(cause.findings),
        "fix": cause.fix or None,
        "cured": cause.cured,
        "call": str(cause.case.program) if cause.case else None,
        "reason": cause.case.reason if cause.case else None,
        "lines": one.lines if one else None,
        "prints": one.prints if one else None,
        "reproduces": page.reproduces,
        "script": page.file if one else None,
    }


def table(pages: Sequence[Page]) -> str:
    """A table in Markdown: a row for each cause."""
    lines = [
        "| # | cause | severity | a case that shows it | what happens | where | findings | fix tried |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, page in enumerate(pages, 1):
        cause = page.cause
        cells = (
            str(number), cause.name, severity_text(cause), f"`{call_text(page)}`", _happening(page), f"`{where(cause)}`",
            str(len(cause.findings)), fix_text(cause),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def short_table(pages: Sequence[Page], most: int) -> str:
    """A table of the first causes that reproduce."""
    lines = ["| what is wrong | case | what happens | where in torch |", "|---|---|---|---|"]
    for page in [page for page in pages if page.reproduces][:most]:
        cells = (page.cause.what, f"`{call_text(page)}`", _happening(page), f"`{where(page.cause)}`")
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def named_tensor(program: Program, number: int) -> str:
    """A tensor of a program with its placements: `f32[4] S(0)`."""
    x = program.sample.tensors[number]
    return f"{shape_text(x.shape, x.dtype)} {placements_text(program.inputs[number])}"


def call_text(page: Page) -> str:
    """The call of the case with shapes and placements: `torch.cumprod(f32[4] S(0), -1)`."""
    case = page.cause.case
    if case is None:
        return page.cause.findings[0]
    program = case.program
    if program.public_call:
        return f"{program.public_call} of {named_tensor(program, 0)}"
    text = re.sub(r"\bx(\d+)\b", lambda found: named_tensor(program, int(found[1])), spelled(program.sample))
    return text + (f", then {program.then}" if program.then else "")


def _happening(page: Page) -> str:
    case = page.cause.case
    if case is None:
        return "no case shows it alone"
    if page.run is not None and not page.reproduces:
        return f"its script {page.run.verdict} on gloo"
    return re.sub(r" \(\d+ of \d+ elements differ\)$", "", case.reason).splitlines()[0][:160]

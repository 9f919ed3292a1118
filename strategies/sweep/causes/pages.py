"""Causes as text for a terminal, and as JSON.  All of it is made of records."""

from __future__ import annotations

import json
import re
from pathlib import Path

from strategies.model.cause import PUBLIC_CALL, CauseRecord, json_data
from strategies.model.verdict import Report
from strategies.validation.difference import excerpt

MOST_PRINTED = 400
"""Letters of what a script prints that a page shows; a longer text is cut."""


def as_text(report: Report, folder: Path | None = None) -> str:
    """One page a cause, then the totals; `folder` has the scripts, if they are written."""
    parts = [_page(number, cause, folder) for number, cause in enumerate(report.causes, 1)]
    return "\n\n".join([*parts, totals(report)]) + "\n"


def totals(report: Report) -> str:
    """One sentence: how many findings and causes there are, and how many scripts were run and show the fault."""
    findings = sum(len(cause.findings) for cause in report.causes)
    ran = [cause for cause in report.causes if cause.verdict]
    showing = sum(cause.reproduces for cause in ran)
    causes = "1 cause" if len(report.causes) == 1 else f"{len(report.causes)} causes"
    return (
        f"torch {report.torch}: {findings} findings have {causes}; the scripts of {len(ran)} were run on "
        f"gloo, and {showing} of them show the fault."
    )


def _page(number: int, cause: CauseRecord, folder: Path | None) -> str:
    more = f" and {len(cause.ops) - 6} more" if len(cause.ops) > 6 else ""
    lines = [
        f"{number}. {cause.name}",
        f"   {cause.severity}; {cause.where}; {cause.versions_text}",
        f"   affects {len(cause.findings)} finding{'s' * (len(cause.findings) != 1)}"
        + (f", of {', '.join(cause.ops[:6])}{more}" if cause.ops and cause.kind != PUBLIC_CALL else ""),
    ]
    if cause.call:
        lines += [f"   case    {cause.call} on {_ranks(cause)}", f"   result  {happening(cause.reason)}"]
    if not cause.script:
        lines.append("   there is no script: no simulated run of its cases shows the fault alone")
    else:
        lines += ["", *(f"       {line}" for line in cause.lines.splitlines()), ""]
        lines += [f"   where   {term}" for term in cause.terms]
        wrong = wrong_results(cause.prints)
        lines += [f"   prints  {line}" for line in cut(wrong).splitlines()]
        lines += [f"   right   {line}" for line in cut(cause.right).splitlines() if " want " not in wrong]
        command = (
            f"python {folder / cause.script_name}" if folder else f"python {cause.script_name}, which --repro writes"
        )
        lines.append(f"   run it: {command}" if cause.reproduces else f"   {cause.run_text}")
    lines += [f"   {cause.tried_text}"] + [f"   {cause.why}"] * bool(cause.why)
    return "\n".join(lines)


def _ranks(cause: CauseRecord) -> str:
    """`2 ranks`, or `4 ranks in a mesh of 2x2`, as its lines make it."""
    axes = re.search(r"init_device_mesh\([^(]*\((\d+(?:, \d+)+)\)", cause.lines)
    return f"{cause.ranks} ranks" + (f" in a mesh of {axes[1].replace(', ', 'x')}" if axes else "")


def wrong_results(prints: str) -> str:
    """The lines that a script prints of the first wrong result, and how many more are wrong; all that it prints if it names none."""
    results = re.split(r"(?<=right)\n|(?<=WRONG)\n", prints)
    first, *more = [one for one in results if one.endswith("WRONG")] or [prints]
    wrong = first + (f"\nfurther wrong results: {len(more)}" if more else "")
    return re.sub(r"^(rank \d+ got  )(.*)\n(rank \d+ want )(.*)$", _where_they_differ, wrong, flags=re.MULTILINE)


def _where_they_differ(pair: re.Match[str]) -> str:
    got, want = (excerpt(one, other, MOST_PRINTED // 3) for one, other in ((pair[2], pair[4]), (pair[4], pair[2])))
    return f"{pair[1]}{got}\n{pair[3]}{want}"


def happening(reason: str) -> str:
    """The first line of the reason of a finding, shortened."""
    return reason.splitlines()[0][:160] if reason else ""


def cut(text: str) -> str:
    """At most `MOST_PRINTED` letters of a text."""
    return text if len(text) <= MOST_PRINTED else f"{text[:MOST_PRINTED]} ..."


def as_json(report: Report, code: int) -> str:
    """The causes as JSON text, in their order."""
    body = {
        "schema": 1,
        "torch": report.torch,
        "seed": report.seed,
        "exit_code": code,
        "findings": sum(len(cause.findings) for cause in report.causes),
        "causes": [json_data(cause) for cause in report.causes],
    }
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"

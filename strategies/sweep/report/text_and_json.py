"""A validation report as a table on a terminal and as JSON.  Files are written whole or not at all."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from localtensor.layout import short
from strategies.base import atomic_files
from strategies.base.foreign_text import path_below, safe_file_name
from strategies.model.cause import CauseRecord, definitions, json_data
from strategies.model.verdict import FAULTS, Counts, Finding, LeftOut, Report, Verdict
from strategies.programs.run.verdict import raises
from strategies.programs.shrink.search import failure_kind

_COLOUR = {
    Verdict.UNSOUND: "bold red", Verdict.REFUSED: "red", Verdict.SUSPECT: "yellow", Verdict.MISSING: "cyan"
}  # fmt: skip
_TITLES = {
    Verdict.UNSOUND: "Unsound: confirmed to give wrong results",
    Verdict.REFUSED: "Refused: calls that plain torch takes, and for which every rank of DTensor raises",
}
_MOST_CRASHES = _MOST_UNTESTED = 8


def write_scripts(report: Report, folder: str | None) -> Report:
    """Write the repro scripts of the findings into `folder`, if it is given.  Returns the report with their paths."""
    if folder is None:
        return report
    findings = []
    for finding in report.findings:
        if not finding.script:
            findings.append(finding)
            continue
        name = file_name(finding)
        path = path_below(Path(folder), name)
        atomic_files.write_whole(path, finding.script.replace("{name}", name))
        findings.append(replace(finding, repro=str(path)))
    return replace(report, findings=tuple(findings))


def file_name(finding: Finding) -> str:
    """The name of a finding's script: it names the op and the rule, is the same in every run, and is no path.

    `cumprod_default__S1__S1__2ranks.py`
    """

    def plain(placements: Sequence[Any]) -> str:
        return "_".join("".join(c for c in short(p) if c.isalnum()) or "none" for p in placements)

    op = finding.rule.op.removeprefix("aten.").replace(".", "_")
    if is_public(finding):
        stem = re.sub(r"\W+", "_", finding.title.replace("-", "minus")).strip("_")
    elif finding.title:
        title = re.sub(r"(, |: )\((?=[A-Z])", r"\1each ", finding.title.partition(" on ")[2])  # where a tensor begins
        words = re.sub(r"\W+", "_", title.replace("-", "minus")).strip("_")
        stem = f"{op}__on_{words}"
    else:
        stem = f"{op}__{plain(finding.rule.inputs)}__{plain(finding.rule.outputs)}__{finding.ranks}ranks"
    return safe_file_name(stem, ".py")


def as_json(report: Report) -> str:
    """The report as JSON text; its schema is strategies/schema/report.json.  Stable but for `seconds`."""
    body = {
        "schema": 1,
        "torch": report.torch,
        "seed": report.seed,
        "ranks": list(report.ranks),
        "confirm": report.confirm,
        "exit_code": report.exit_code,
        "unfinished": report.unfinished,
        "counts": asdict(report.counts),
        "findings": [_finding(f, report.cause_of(f)) for f in report.findings],
        "causes": [json_data(cause) for cause in report.causes],
        "crashed": [asdict(c) for c in report.crashed],
        "untestable": [{"rule": rule, "reason": why} for rule, why in report.untestable],
        "skipped": [{"what": what, "samples": count} for what, count in report.skipped],
        "ignored": [op for op, _ in report.ignored],
        "ignored_because": dict(report.ignored),
        "untested": dict(report.untested),
        "left_out": left_out_data(report.left_out),
        "seconds": dict(report.seconds),
    }
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def left_out_data(found: Iterable[LeftOut]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """What was left out, for JSON: names by overload, class of dtypes, and what they are."""
    data: dict[str, dict[str, dict[str, list[str]]]] = {}
    for one in found:
        data.setdefault(one.op, {}).setdefault(one.dtypes, {})[one.what] = list(one.names)
    return data


def left_out_text(found: Iterable[LeftOut]) -> Iterator[Text]:
    """What was left out, for a terminal: a heading for each overload, and a line for each class of dtypes and each reason."""
    last = ""
    for one in found:
        if one.op != last:
            yield Text(one.op, "bold")
        last = one.op
        yield Text(f"  {one.dtypes}: {one.what}: {', '.join(one.names)}")


def _finding(f: Finding, cause: CauseRecord | None) -> dict[str, Any]:
    return {
        "op": f.rule.op,
        "inputs": [short(p) for p in f.rule.inputs],
        "outputs": [short(p) for p in f.rule.outputs],
        "mesh": list(f.mesh or (f.ranks,)),
        "title": f.title or None,
        "verdict": f.verdict.value,
        "confirmed_on": f.confirmed_on,
        "reason": f.reason,
        "sample": list(f.sample),
        "origin": f.origin,
        "elements": f.elements,
        "kinds": [list(kind) for kind in f.kinds],
        "got": f.got or None,
        "want": f.want or None,
        "picture": f.picture or None,
        "repro": f.repro,
        "command": f.command or None,
        "cause": cause.id if cause else None,
    }


def show(report: Report, console: Console, *, pictures: int = 3) -> None:
    """Print the report: what is wrong, the first few with their picture of ranks, then the totals.

    Names and reasons are `Text`: rich would read "[red]" and ":x:" in a string as markup.
    """
    wrong = [f for f in report.findings if f.verdict in FAULTS]
    for name, why in report.ignored:
        console.print(Text.assemble(("ignored", "bold red"), f" {name}: {why}"))
    for verdict, title in _TITLES.items():
        _rows(console, title, alike([f for f in wrong if f.verdict is verdict], report))
    for finding in wrong[:pictures]:
        console.print()
        console.print(Text.assemble((finding.name, "bold"), f" on {finding.ranks} ranks, {call_text(finding)}"))
        for term in definitions(finding.script, finding.title):
            console.print(Text(f"where {term}"))
        console.print(Text(finding.picture))
        if finding.repro:
            console.print(
                Text(f"run it: torchrun --nproc-per-node {math.prod(finding.mesh or (finding.ranks,))} {finding.repro}")
            )
        if finding.command:
            console.print(Text(f"again:  {finding.command}"), soft_wrap=True)
    _rows(console, "Suspect, not confirmed", [[f] for f in report.findings if f.verdict is Verdict.SUSPECT])
    _rows(console, "Missing: valid, and not registered", [[f] for f in report.findings if f.verdict is Verdict.MISSING])
    for crash in report.crashed[:_MOST_CRASHES]:
        console.print(Text.assemble(("crashed", "magenta"), f" {crash.op}: {crash.sample}: {crash.error}"))
    if len(report.crashed) > _MOST_CRASHES:
        console.print(f"... and {len(report.crashed) - _MOST_CRASHES} more crashes (all of them in --json)")
    for op, why in report.untested[:_MOST_UNTESTED]:
        console.print(Text.assemble(("not tested", "yellow"), f" {op}: {why}"))
    if len(report.untested) > _MOST_UNTESTED:
        console.print(
            f"... and {len(report.untested) - _MOST_UNTESTED} more that were not tested (all of them in --json)"
        )
    console.print(_totals(report))


FOLDED = 4
"""From so many on, findings of one cause that fail in one way are one line, in a table and on a page."""


def alike(findings: Sequence[Finding], report: Report) -> list[list[Finding]]:
    """The findings in their order, those of one cause that fail in one way together, at the place of the first of them."""
    groups: dict[object, list[Finding]] = {}
    for finding in findings:
        cause = report.cause_of(finding)
        how = failure_kind(re.sub(r"\b\w+\.\w+\.\w+", "an op", finding.reason)).what
        groups.setdefault((cause.id, how) if cause else finding.name, []).append(finding)
    return [
        part for group in groups.values() for part in ([group] if len(group) >= FOLDED else [[one] for one in group])
    ]


def ops_text(findings: Sequence[Finding]) -> str:
    """How many findings there are, and of which overloads: `9 findings of aten.min.default, aten.amin.default`."""
    ops = list(dict.fromkeys(finding.rule.op for finding in findings))
    more = f" and {len(ops) - 6} more" if len(ops) > 6 else ""
    return f"{len(findings)} findings of {', '.join(ops[:6])}{more}"


def is_public(finding: Finding) -> bool:
    """Whether the finding is about a public call of DTensor, which its title begins with, and not about an op."""
    return bool(finding.title) and not re.match(r"\w+\.\w+\.\w+ on \(", finding.title)


def call_text(finding: Finding) -> str:
    """The call of the smallest case: `cumprod(f64[2], -1)`; the tensor alone where the finding is about a public call."""
    if is_public(finding):
        return f"x = {', '.join(finding.sample)}"
    packet = finding.rule.op.split(".")[1]
    return f"{packet}({', '.join(finding.sample)})"


def _rows(console: Console, title: str, groups: Sequence[Sequence[Finding]]) -> None:
    if not groups:
        return
    table = Table(title=f"{title} ({sum(map(len, groups))})", title_justify="left", show_lines=False, expand=False)
    for column in ("rule", "ranks", "call", "what happens"):
        table.add_column(column, justify="right" if column == "ranks" else "left", overflow="fold")
    for f, *more in groups:
        mesh = "x".join(map(str, f.mesh or (f.ranks,)))
        name = f"{ops_text([f, *more])} (all of them in --json); {f.name}" if more else f.name
        table.add_row(Text(name, _COLOUR[f.verdict]), mesh, Text(call_text(f)), Text(f.reason))
    console.print(table)


def _totals(report: Report) -> str:
    c: Counts = report.counts
    how = f"confirmed on {report.confirm}" if report.confirm != "none" else "not confirmed: --confirm none"
    parts = [
        f"{c.sound} sound", f"{c.unsound} unsound", f"{c.refused} refused", f"{c.suspect} suspect", f"{c.missing} missing",
        f"{c.untestable} untestable", f"{c.crashed} crashed",
    ]  # fmt: skip
    ranks = ", ".join(map(str, report.ranks))
    text = f"torch {report.torch}, seed {report.seed}, ranks {ranks}: {', '.join(parts)} ({how}); "
    text += f"{c.instances} rule instances on {c.samples} samples of {c.overloads} overload{'s' * (c.overloads != 1)}"
    if c.by_metadata:
        text += f"; {c.by_metadata} of the sound ones by metadata only (random or uninitialised)"
    if not c.instances:
        text += "\nNothing was tested: that is not a pass."
    if report.unfinished:
        text += f"\n{report.unfinished} units of the plan are not in this journal: see `localtensor merge`."
    return text


def by_reason(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Reasons, each with the names that have it: those with the most names first, then by their words."""
    grouped: dict[str, list[str]] = {}
    for reason, name in pairs:
        grouped.setdefault(reason, []).append(name)
    return sorted(grouped.items(), key=lambda pair: (-len(pair[1]), pair[0]))


def is_silent(finding: Finding) -> bool:
    """Whether the rule is silently wrong: no rank raises, hangs or dies."""
    return not raises(finding.reason)

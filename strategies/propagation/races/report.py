"""How findings of races read: on a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from textwrap import fill, indent, shorten
from typing import Any

from strategies.propagation.races.model import Finding, Part

WIDTH = 110
EXAMPLE = 12  # lines of an example that are shown


def as_text(target: str, about: str, parts: Sequence[Part], repeat: str) -> str:
    """A line for each part, each finding with what it means, and a last line that counts."""
    lines = [f"localtensor races --target {target}: {about}", ""]
    lines += [_line(part) for part in parts]
    findings = [finding for part in parts for finding in part.findings]
    for number, finding in enumerate(findings, 1):
        lines += ["", *_told(number, finding)]
    lines += ["", _last(parts, findings)]
    if findings:
        lines.append(repeat)
    return "\n".join(lines)


def as_json(target: str, about: str, parts: Sequence[Part], code: int) -> str:
    """The whole report."""
    return json.dumps({
        "target": target,
        "about": about,
        "exit_code": code,
        "parts": [_part(part) for part in parts],
    }, indent=1) + "\n"  # fmt: skip


def _part(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "asks": part.asks,
        "tried": part.tried,
        "seconds": round(part.seconds, 2),
        "figures": dict(part.figures),
        "trouble": part.trouble,
        "findings": [
            {
                "kind": one.kind,
                "count": one.count,
                "example": one.example,
                "meaning": one.meaning,
                "script": one.script,
            }
            for one in part.findings
        ],
    }


def _line(part: Part) -> str:
    what = f"not run: {shorten(part.trouble, 60)}" if part.trouble else _count(len(part.findings), "finding")
    return f"  {part.name:20} {part.tried:>9,} in {part.seconds:6.1f} s  {what:12}  {part.asks}"


def _told(number: int, finding: Finding) -> list[str]:
    times = "once" if finding.count == 1 else f"{finding.count} times"
    example = finding.example.splitlines()
    shown = [fill(line, WIDTH, subsequent_indent="  ", break_long_words=False) for line in example[:EXAMPLE]]
    if len(example) > EXAMPLE:
        shown.append(f"... and {len(example) - EXAMPLE} more lines")
    told = [f"{number}. {finding.part}: {finding.kind}, {times}", indent("\n".join(shown), "   ")]
    return told + ([indent(fill(f"It means: {finding.meaning}", WIDTH), "   ")] if finding.meaning else [])


def _last(parts: Sequence[Part], findings: Sequence[Finding]) -> str:
    tried, idle = sum(part.tried for part in parts), [part.name for part in parts if part.trouble]
    left = f"; not run: {', '.join(idle)}" if idle else ""
    return f"{_count(len(findings), 'finding')} in {tried:,} tried{left}"


def _count(many: int, word: str) -> str:
    return f"{many or 'no'} {word}{'' if many == 1 else 's'}"

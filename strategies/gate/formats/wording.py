"""The wording that all outputs of the gate share, and the terminal output."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strategies.base.progress import with_count
from strategies.gate.baseline import (
    ANY,
    BaselineEntry,
    FindingKey,
    GateResult,
    ReviewedFinding,
    WrongFunction,
    by_cause,
)
from strategies.model.verdict import Verdict
from strategies.sweep.report.text_and_json import call_text

BASELINE = "localtensor-baseline.json"
"""The location of results that are in no other file."""


def what_happens(reviewed: ReviewedFinding) -> str:
    """What goes wrong, on how many ranks, and on which backend it was confirmed."""
    found = reviewed.finding
    if found.ranks < 2:  # a registration that torch never calls: no run shows it
        return found.reason
    seen = f"; seen on real {found.confirmed_on} processes" if found.confirmed_on else ""
    return f"on {found.ranks} ranks, {call_text(found)}: {found.reason}{seen}"


def kinds_text(keys: Sequence[FindingKey]) -> str:
    """For which classes of dtypes and kinds of mesh, in the order given.

    >>> kinds_text([FindingKey("my.op.default", "R -> R", "real", "1 axis"), FindingKey("my.op.default", "ignored", "any", "any")])
    'real on 1 axis, any dtypes on any mesh'
    """
    dtypes, meshes = {ANY: "any dtypes"}, {ANY: "any mesh"}
    return ", ".join(f"{dtypes.get(key.dtypes, key.dtypes)} on {meshes.get(key.mesh, key.mesh)}" for key in keys)


def stale_remedy(entry: BaselineEntry) -> str:
    """The remedy for an entry of the baseline that no longer reproduces."""
    return f"{entry.key} no longer shows: remove it from the baseline (localtensor gate --update)"


def accepted_keys(result: GateResult) -> tuple[tuple[FindingKey, str], ...]:
    """Each accepted key that was found again, and the reason, in order."""
    found = {entry.key: entry.reason for reviewed in result.findings for entry in reviewed.accepted}
    return tuple(sorted(found.items()))


def fingerprint(key: FindingKey) -> str:
    """A digest of the key, the same on every machine and independent of source lines."""
    text = f"{key.op}\n{key.rule}\n{key.dtypes}\n{key.mesh}"
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


MOST = 12
"""Lines of one kind that are shown; the files have all of them."""
PICTURES = 2


def show(result: GateResult, console: Console, *, done: Sequence[str] = ()) -> None:
    """Print the result: new findings first, the verdict last.  `done` are lines on what was written to the baseline.

    Names and reasons are `Text`: rich would read markup in a string.
    """
    if result.choices:
        console.print(Text(f"Chosen ({len(result.choices)}):", "bold"))
        _lines(console, [Text(f"  {c.op}: {c.reason}") for c in result.choices])
    _new(console, result.new)
    suspects = [f for f in result.report.findings if f.verdict is Verdict.SUSPECT]
    for style, title, texts in (
        ("bold red", "gone, run --update", [f"{e.key}: {e.reason}" for e in result.gone]),
        ("red", "expired", [f"{e.key}: {e.reason} (until {e.expires})" for e in result.expired]),
        ("magenta", "trouble", result.trouble),
        ("yellow", "suspect, not confirmed", [f"{f.name}: {f.reason}" for f in suspects]),
        ("yellow", "not tried", [f"{op}: {why}" for op, why in result.untried]),
        ("cyan", "crash did not come back", [str(e.key) for e in result.unseen]),
        ("cyan", "note", result.notes),
        ("green", "done", done),
    ):
        _lines(console, [Text.assemble((title, style), f" {text}") for text in texts])
    console.print(verdict_line(result), soft_wrap=True)


def forms_text(causes: Sequence[WrongFunction]) -> str:
    """The number of causes, and of the forms of their rules where that is another: `1 (4 forms)`."""
    forms = sum(len(one.findings) for one in causes)
    return str(len(causes)) if forms == len(causes) else f"{len(causes)} ({forms} forms)"


def totals(result: GateResult) -> list[str]:
    """`1 new (4 forms)`, `0 accepted`, `0 gone`, and how many accepted findings are past their date."""
    named = {"new": result.new_causes, "accepted": result.accepted_causes}
    parts = [" ".join(filter(None, (str(len(c)), word, forms_text(c).partition(" ")[2]))) for word, c in named.items()]
    parts.append(f"{len(result.gone)} gone")
    return [*parts, f"{len(result.expired)} expired"] if result.expired else parts


def verdict_line(result: GateResult) -> Text:
    """The last line."""
    counts = result.report.counts
    parts = totals(result)
    parts += [f"{len(result.untried)} not tried"] if result.untried else []
    parts += [f"{len(result.trouble)} in trouble"] if result.trouble else []
    tried = f"{with_count(counts.instances, 'rule instance')} of {with_count(len(result.judged), 'overload')}"
    same = f", {len(result.remembered)} of these from cache" if result.remembered else ""
    head = {0: ("gate passed", "bold green"), 1: ("gate failed", "bold red"), 3: ("gate in trouble", "bold magenta")}
    word, style = head[result.exit_code]
    tail = f": {', '.join(parts)}; {tried}{same}; torch {result.report.torch}, {result.seconds:.1f} s"
    return Text.assemble((word, style), tail)


def _new(console: Console, new: Sequence[ReviewedFinding]) -> None:
    if not new:
        return
    causes = by_cause(new)
    table = Table(title=f"New: wrong, and not accepted: {forms_text(causes)}", title_justify="left")
    new = [reviewed for cause in causes for reviewed in cause.findings]
    for column in ("rule", "new for", "why", "where"):
        table.add_column(column, overflow="fold")
    for reviewed in new:
        f, line = reviewed.finding, reviewed.place
        place = f"{line.file}:{line.line}" if line else "-"
        why = f"{call_text(f)} on {f.ranks} ranks: {f.reason}" if f.sample else f.reason
        table.add_row(Text(f.name, "bold red"), Text(kinds_text(reviewed.new)), Text(why), Text(place))
    console.print(table)
    for f in [reviewed.finding for reviewed in new if reviewed.finding.picture][:PICTURES]:
        console.print(Text.assemble((f.name, "bold"), f" on {f.ranks} ranks"))
        console.print(Text(f.picture))


def _lines(console: Console, lines: Sequence[Text]) -> None:
    for line in lines[:MOST]:
        console.print(line, soft_wrap=True)
    if len(lines) > MOST:
        console.print(Text(f"  ... and {len(lines) - MOST} more (all of them in --json)"), soft_wrap=True)

"""What every output of the gate says of a finding, in the same words."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strategies.base.progress import counted
from strategies.gate.baseline import ANY, Entry, GateResult, Key, ReviewedFinding
from strategies.model.verdict import Verdict
from strategies.sweep.report.text_and_json import call_text

BASELINE = "localtensor-baseline.json"
"""Where a reader is sent for what stands in no other file."""


def happens(judged: ReviewedFinding) -> str:
    """What happens, on how many ranks, and what has shown it."""
    found = judged.finding
    if found.ranks < 2:  # a registration that torch never asks: no run shows it
        return found.reason
    seen = f"; seen on real {found.confirmed_on} processes" if found.confirmed_on else ""
    return f"on {found.ranks} ranks, {call_text(found)}: {found.reason}{seen}"


def where(keys: Sequence[Key]) -> str:
    """For which classes of dtypes and kinds of mesh, in the order given.

    >>> where([Key("my.op.default", "R -> R", "real", "1 axis"), Key("my.op.default", "ignored", "any", "any")])
    'real on 1 axis, any dtypes on any mesh'
    """
    told = ((f"any {what}" if value == ANY else value for what, value in _kinds(key)) for key in keys)
    return ", ".join(" on ".join(words) for words in told)


def _kinds(key: Key) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("dtypes", key.dtypes), ("mesh", key.mesh)


def stale(entry: Entry) -> str:
    """What a person has to do with an entry of the baseline that no longer shows."""
    return f"{entry.key} no longer shows: remove it from the baseline (localtensor gate --update)"


def accepted(result: GateResult) -> tuple[tuple[Key, str], ...]:
    """Each key that somebody has accepted, and why, in order."""
    found = {entry.key: entry.reason for judged in result.findings for entry in judged.accepted}
    return tuple(sorted(found.items()))


def fingerprint(key: Key) -> str:
    """A name for a key that is the same on every machine, whatever line of a file it stands at."""
    return hashlib.sha256(f"{key.op}\n{key.rule}\n{key.dtypes}\n{key.mesh}".encode(errors="surrogatepass")).hexdigest()[
        :32
    ]


# How the gate's result reads on a terminal: what fails first, then what is good to know, the verdict last.

MOST = 12
"""Lines of one kind that are shown; the files have all of them."""
PICTURES = 2


def show(result: GateResult, console: Console, *, done: Sequence[str] = ()) -> None:
    """Print the result; `done` says what was written to the baseline.

    Names and reasons are `Text`, since a string would be read as markup.
    """
    if result.choices:
        console.print(Text(f"Chosen ({len(result.choices)}):", "bold"))
        _lines(console, (Text(f"  {c.op}: {c.reason}") for c in result.choices))
    _new(console, result.new)
    suspects = [f for f in result.report.findings if f.verdict is Verdict.SUSPECT]
    for style, title, told in (
        ("bold red", "gone, run --update", [f"{e.key}: {e.reason}" for e in result.gone]),
        ("red", "expired", [f"{e.key}: {e.reason} (until {e.expires})" for e in result.expired]),
        ("magenta", "trouble", result.trouble),
        ("yellow", "suspect, not confirmed", [f"{f.name}: {f.reason}" for f in suspects]),
        ("yellow", "not tried", [f"{op}: {why}" for op, why in result.untried]),
        ("cyan", "crash did not come back", [str(e.key) for e in result.unseen]),
        ("cyan", "note", result.notes),
        ("green", "done", done),
    ):
        _lines(console, (Text.assemble((title, style), f" {text}") for text in told))
    console.print(verdict(result), soft_wrap=True)


def verdict(result: GateResult) -> Text:
    """The last line."""
    counts = result.report.counts
    parts = [f"{len(result.new)} new", f"{len(accepted(result))} accepted", f"{len(result.gone)} gone"]
    parts += [f"{len(result.untried)} not tried"] if result.untried else []
    parts += [f"{len(result.trouble)} in trouble"] if result.trouble else []
    tried = f"{counted(counts.instances, 'rule instance')} of {counted(len(result.judged), 'overload')}"
    same = f", {len(result.remembered)} of these by the verdict of an equal run" if result.remembered else ""
    head = {0: ("gate passed", "bold green"), 1: ("gate failed", "bold red"), 3: ("gate in trouble", "bold magenta")}
    word, style = head[result.exit_code]
    tail = f": {', '.join(parts)}; {tried}{same}; torch {result.report.torch}, {result.seconds:.1f} s"
    return Text.assemble((word, style), tail)


def _new(console: Console, new: Sequence[ReviewedFinding]) -> None:
    if not new:
        return
    table = Table(title=f"New: wrong, and nobody has accepted it ({len(new)})", title_justify="left")
    for column in ("rule", "new for", "why", "where"):
        table.add_column(column, overflow="fold")
    for judged in new:
        f = judged.finding
        place = f"{judged.place.file}:{judged.place.line}" if judged.place else "-"
        why = f"{call_text(f)} on {f.ranks} ranks: {f.reason}" if f.sample else f.reason
        table.add_row(Text(f.name, "bold red"), Text(where(judged.new)), Text(why), Text(place))
    console.print(table)
    for judged in [j for j in new if j.finding.picture][:PICTURES]:
        console.print(Text.assemble((judged.finding.name, "bold"), f" on {judged.finding.ranks} ranks"))
        console.print(Text(judged.finding.picture))


def _lines(console: Console, lines: Iterable[Text]) -> None:
    for line in _first(list(lines)):
        console.print(line, soft_wrap=True)


def _first(lines: Sequence[Text]) -> Iterator[Text]:
    yield from lines[:MOST]
    if len(lines) > MOST:
        yield Text(f"  ... and {len(lines) - MOST} more (all of them in --json)")

"""The gate's result for GitHub Actions: a Markdown summary of the step, and annotations on lines of the change."""

from collections.abc import Iterable, Iterator

from strategies.base.progress import xml_safe
from strategies.gate.baseline import GateResult
from strategies.gate.formats.wording import BASELINE, accepted_keys, kinds_text, stale_remedy, what_happens
from strategies.sweep.report.text_and_json import call_text, is_silent

MOST = 1 << 20
"""Bytes of a summary that GitHub accepts for one step."""
_HEADROOM = 4096
_SPECIAL = dict.fromkeys(map(ord, "&<>|`*_[]\\~$#!@"))
_ENTITIES = {code: f"&#{code};" for code in _SPECIAL} | dict.fromkeys(map(ord, "\r\n"), " ")


def summary(result: GateResult) -> str:
    """Markdown text under a mebibyte in UTF-8; the lines that do not fit are counted.

    >>> markdown_escaped("a|`b`")
    'a&#124;&#96;b&#96;'
    """
    kept: list[str] = []
    size = 0
    lines = list(_lines(result))
    for number, line in enumerate(lines):
        size += len(line.encode()) + 1
        if size > MOST - _HEADROOM:
            kept += ["", f"**{len(lines) - number} more lines do not fit here.**"]
            break
        kept.append(line)
    return "\n".join(kept) + "\n"


def markdown_escaped(text: str) -> str:
    """The text escaped for Markdown, on one line, in a table or out of it."""
    return xml_safe(text).translate(_ENTITIES)


def _code(text: str) -> str:
    return f"<code>{markdown_escaped(text)}</code>"


def _lines(result: GateResult) -> Iterator[str]:
    yield f"## localtensor gate: {_headline(result)}"
    yield ""
    counts = result.report.counts
    yield (
        f"{len(result.new)} new, {len(accepted_keys(result))} accepted, {len(result.gone)} gone, "
        f"{len(result.untried)} not tried; {counts.sound} rules sound, {counts.instances} instances of "
        f"{counts.overloads} overloads on torch {markdown_escaped(result.report.torch)} in {result.seconds:.1f} s."
    )
    yield from (f"\n> **Trouble:** {markdown_escaped(trouble)}" for trouble in result.trouble)
    heads = ("rule", "new for", "ranks", "call", "what happens", "loud?")
    yield from _table("New: these fail the gate", heads, _new(result))
    gone = [_item(e.key, e.reason) for e in result.gone]
    yield from _listed("Gone: remove these from the baseline with `localtensor gate --update`", gone)
    expired = [f"{_item(e.key, e.reason)} (until {e.expires})" for e in result.expired]
    yield from _listed("Accepted once, and past their date", expired)
    yield from _listed("Crashed", [_item(c.op, c.sample, c.error) for c in result.report.crashed])
    yield from _listed("Good to know", map(markdown_escaped, result.notes))
    yield from _listed("Not tried", [_item(op, why) for op, why in result.untried])
    yield from _listed("Chosen by the change", [_item(c.op, c.reason) for c in result.choices])
    yield from _listed("Accepted crashes that did not come back", [_item(e.key, e.reason) for e in result.unseen])
    yield from _listed("Accepted", [_item(key, why) for key, why in accepted_keys(result)])


def _item(name: object, *texts: str) -> str:
    return ": ".join([_code(str(name)), *map(markdown_escaped, texts)])


def _headline(result: GateResult) -> str:
    if result.new:
        return f"{len(result.new)} new wrong rule{'s' if len(result.new) > 1 else ''}"
    if result.gone:
        return "the baseline must shrink"
    return "in trouble" if result.trouble else "clean"


def _new(result: GateResult) -> Iterator[tuple[str, ...]]:
    for reviewed in result.new:
        found = reviewed.finding
        yield (
            _code(found.name),
            markdown_escaped(kinds_text(reviewed.new)),
            str(found.ranks),
            _code(call_text(found)) if found.sample else "",
            markdown_escaped(found.reason),
            "silent" if is_silent(found) else "loud",
        )


def _table(title: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    found = list(rows)
    if found:
        yield from ("", f"### {title} ({len(found)})", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
        yield from (f"| {' | '.join(row)} |" for row in found)


def _listed(title: str, lines: Iterable[str]) -> Iterator[str]:
    found = list(lines)
    if found:
        yield from ("", f"<details><summary>{title.replace('`', '')} ({len(found)})</summary>", "")
        yield from (f"- {line}" for line in found)
        yield from ("", "</details>")


MOST_ANNOTATIONS = 10
"""Annotations of one kind that GitHub shows for a step."""


def annotations(result: GateResult, *, baseline: str = BASELINE) -> str:
    """An `::error` command for each of the first ten findings that fail the gate, and `+N more`; "" if none fails."""
    lines = list(_annotation_lines(result, baseline))
    left = len(lines) - MOST_ANNOTATIONS
    shown = lines[:MOST_ANNOTATIONS] + ([f"::notice title=localtensor gate::+{left} more"] if left > 0 else [])
    return "".join(f"{line}\n" for line in shown)


def _annotation_lines(result: GateResult, baseline: str) -> Iterator[str]:
    for reviewed in result.new:
        file, line = (reviewed.place.file, reviewed.place.line) if reviewed.place else (baseline, 1)
        text = f"{what_happens(reviewed)} (new for {kinds_text(reviewed.new)})"
        yield _error(file, line, f"Wrong sharding rule {reviewed.finding.name}", text)
    for entry in result.gone:
        yield _error(baseline, 1, "An accepted finding is gone", stale_remedy(entry))
    for trouble in result.trouble:
        yield f"::error title=localtensor gate::{command_escaped(trouble)}"


def _error(file: str, line: int, title: str, text: str) -> str:
    path, name = command_escaped(file, of_property=True), command_escaped(title, of_property=True)
    return f"::error file={path},line={line},title={name}::{command_escaped(text)}"


def command_escaped(text: str, *, of_property: bool = False) -> str:
    """The text escaped for a workflow command, on one line; in a property `:` and `,` are escaped as well.

    >>> command_escaped("50%"), command_escaped("a:b,c", of_property=True)
    ('50%25', 'a%3Ab%2Cc')
    """
    text = xml_safe(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if of_property else text

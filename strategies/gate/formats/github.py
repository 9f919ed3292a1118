"""The gate's result for GitHub Actions: a Markdown summary of the step, and annotations on lines of the change."""

from collections.abc import Iterable, Iterator, Sequence

from localtensor._util.html_page import xml_safe
from strategies.base.progress import with_count
from strategies.gate.baseline import GateResult, ReviewedFinding
from strategies.gate.formats.wording import (
    BASELINE,
    accepted_keys,
    forms_text,
    kinds_text,
    stale_remedy,
    totals,
    what_happens,
)
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
    return _fitting(list(_lines(result)), MOST - _HEADROOM)


def _fitting(lines: Sequence[str], most: int) -> str:
    """The lines that fit into so many bytes of UTF-8, and the number of the others."""
    kept: list[str] = []
    size = 0
    for number, line in enumerate(lines):
        size += len(line.encode()) + 1
        if size > most:
            kept += ["", f"**{len(lines) - number} more lines do not fit here.**"]
            break
        kept.append(line)
    return "\n".join(kept) + "\n"


MOST_COMMENT = 1 << 16
"""Characters of a comment on a pull request that GitHub accepts."""
MARK = "<!-- localtensor gate -->"
"""The first line of a comment, by which a workflow finds its own comment of before, to replace it."""


def comment(result: GateResult) -> str:
    """Markdown for a pull request, under 65,536 bytes: the verdict, and a collapsed table for each wrong rule function."""
    return _fitting(list(_comment_lines(result)), MOST_COMMENT - _HEADROOM)


def _comment_lines(result: GateResult) -> Iterator[str]:
    yield from (MARK, f"### localtensor gate: {_headline(result)}", "", f"{', '.join(totals(result))}.")
    yield from (f"\n> **Trouble:** {markdown_escaped(trouble)}" for trouble in result.trouble)
    for cause in result.new_causes:
        silent = sum(is_silent(one.finding) for one in cause.findings)
        forms = f"{with_count(len(cause.findings), 'wrong form')}, {silent} of them silent"
        heads = ("rule", "new for", "ranks", "call", "what happens", "loud?")
        yield from ("", f"<details><summary>{_code(cause.cause)}: {forms}</summary>")
        yield from _table("", heads, _new(cause.findings))
        yield from ("", "</details>")
    gone = [_item(e.key, e.reason) for e in result.gone]
    yield from _listed("Gone: remove these from the baseline with `localtensor gate --update`", gone)
    expired = [f"{_item(e.key, e.reason)} (until {e.expires})" for e in result.expired]
    yield from _listed("Accepted once, and past their date", expired)
    yield from _listed("Not tried", [_item(op, why) for op, why in result.untried])


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
        f"{', '.join(totals(result))}, {len(result.untried)} not tried; {counts.sound} rules sound, {counts.instances} instances of "
        f"{counts.overloads} overloads on torch {markdown_escaped(result.report.torch)} in {result.seconds:.1f} s."
    )
    yield from (f"\n> **Trouble:** {markdown_escaped(trouble)}" for trouble in result.trouble)
    heads = ("rule", "new for", "ranks", "call", "what happens", "loud?")
    yield from _table(f"New: these fail the gate: {forms_text(result.new_causes)}", heads, _new(result.new))
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
    if causes := result.new_causes:
        return f"{len(causes)} new wrong rule function{'s' if len(causes) > 1 else ''}"
    if result.gone:
        return "the baseline must shrink"
    return "in trouble" if result.trouble else "clean"


def _new(findings: Iterable[ReviewedFinding]) -> Iterator[tuple[str, ...]]:
    for reviewed in findings:
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
        yield from ("", *((f"### {title}", "") if title else ()), f"| {' | '.join(heads)} |", "|---" * len(heads) + "|")
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
    for cause in result.new_causes:
        reviewed, *others = cause.findings
        file, line = (reviewed.place.file, reviewed.place.line) if reviewed.place else (baseline, 1)
        more = f"; and {with_count(len(others), 'other form')} of this function" if others else ""
        text = f"{what_happens(reviewed)} (new for {kinds_text(reviewed.new)}){more}"
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

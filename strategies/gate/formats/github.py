"""The gate's result as workflow commands of GitHub Actions, which its runner shows beside the lines of a change."""

from collections.abc import Iterator

from strategies.gate.formats.wording import BASELINE, happens, printable, stale, where
from strategies.gate.model import GateResult

MOST = 10
"""GitHub shows as many of one kind for a step."""


def annotations(result: GateResult, *, baseline: str = BASELINE) -> str:
    """An `::error` line for each of the first ten that fail the gate, and `+N more` for the rest; "" if none does."""
    lines = list(_lines(result, baseline))
    left = len(lines) - MOST
    shown = lines[:MOST] + ([f"::notice title=localtensor gate::+{left} more"] if left > 0 else [])
    return "".join(f"{line}\n" for line in shown)


def _lines(result: GateResult, baseline: str) -> Iterator[str]:
    for judged in result.new:
        file, line = (judged.place.file, judged.place.line) if judged.place else (baseline, 1)
        text = f"{happens(judged)} (new for {where(judged.new)})"
        yield _error(file, line, f"Wrong sharding rule {judged.finding.name}", text)
    for entry in result.gone:
        yield _error(baseline, 1, "An accepted finding is gone", stale(entry))
    for trouble in result.trouble:
        yield f"::error title=localtensor gate::{escaped(trouble)}"


def _error(file: str, line: int, title: str, text: str) -> str:
    said = f"file={escaped(file, of_property=True)},line={line},title={escaped(title, of_property=True)}"
    return f"::error {said}::{escaped(text)}"


def escaped(text: str, *, of_property: bool = False) -> str:
    """The text as the runner reads it back, on one line; within a property also without `:` and `,`.

    >>> escaped("50%"), escaped("a:b,c", of_property=True)
    ('50%25', 'a%3Ab%2Cc')
    """
    text = printable(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if of_property else text

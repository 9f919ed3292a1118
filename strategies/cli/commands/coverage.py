"""What `localtensor coverage` does: of every overload that DTensor registers what a sweep has made of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from localtensor.errors import LocalTensorError, refusal
from strategies.base.atomic_files import unwritable, write_whole
from strategies.base.exits import printed
from strategies.base.journal import STRANGE, BadJournal, Line, of_kind, open_journal, read, strange
from strategies.base.progress import bar
from strategies.base.uninterrupted import undisturbed
from strategies.model.settings import Settings
from strategies.model.verdict import CLEAN, NOTHING, USAGE, Verdict
from strategies.sweep import coverage
from strategies.sweep.coverage import Tried
from strategies.sweep.session import put_on_trial
from strategies.torch_api import population

CALL = "localtensor coverage"


@undisturbed()
def run(journal: Path | None, json: Path | None, *, seed: int, workers: int, quiet: bool) -> int:
    """The exit code: 0 if anything was tried, 3 if not; 2 for a file that is no journal.

    Without a journal everything is tried now, on 2 and 3 ranks, which takes minutes.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    problem, remedy = unwritable(json) if json is not None else ("", "")
    if problem:
        errors.print(refusal(CALL, "--json", str(json), problem, remedy), markup=False)
        return USAGE
    if json is not None and not json.absolute().parent.is_dir():
        errors.print(f"{CALL}: --json: {json}: its folder is not there. Make it first.", markup=False)
        return USAGE
    try:
        begin, lines = _read(journal) if journal else _now(errors, seed, workers, quiet)
    except BadJournal as error:
        errors.print(str(error), markup=False)
        return USAGE
    except LocalTensorError as error:
        errors.print(f"localtensor itself failed: {error}", markup=False)
        return NOTHING
    try:
        tried, torch_tried, device = of_lines(lines), str(begin["torch"]), str(begin["device"])
    except STRANGE as error:
        errors.print(str(strange(journal or "", error, CALL)), markup=False)
        return USAGE
    found = coverage.table(population.everything(device), tried, torch=torch_tried, device=device)
    lost = ""
    if json is not None:
        try:
            write_whole(json, coverage.as_json(found))
        except OSError as error:  # the table is shown all the same: it may be the work of minutes
            lost = f"cannot write {json}: {error.strerror}."
    if problem := printed(lambda console: console.print(coverage.rendered(found))) or lost:
        errors.print(f"{CALL}: {problem}", markup=False)
        return NOTHING
    return CLEAN if any(one.samples for one in tried.values()) else NOTHING


def _read(path: Path) -> tuple[Line, Sequence[Line]]:
    found = read(path, CALL)
    return found.begin, found.lines


def _now(errors: Console, seed: int, workers: int, quiet: bool) -> tuple[Line, Sequence[Line]]:
    settings = Settings(everything=True, ranks=(2, 3), seed=seed, workers=workers)
    with bar(errors, quiet) as shown, open_journal(None, resume=False) as journal:
        put_on_trial(settings, journal, shown)
        return journal.begun or {}, journal.lines


def of_lines(lines: Iterable[Line]) -> dict[str, Tried]:
    """What became of each overload, by the lines of a journal; trials of one op alone count."""
    samples: Counter[str] = Counter()
    verdicts: dict[str, set[str]] = defaultdict(set)
    reasons: dict[str, list[str]] = defaultdict(list)
    kept = list(lines)
    for line in of_kind(kept, "unit"):
        op, trial = line["unit"].split(" ")[:2]
        if trial != "alone":
            continue
        samples[op] += line.get("samples", 0)
        verdicts[op] |= {Verdict.SOUND.value} if line.get("sound") else set()
        reasons[op] += [*line.get("untestable", {}).values(), *line.get("skipped", {})]
        reasons[op] += [crash["error"] for crash in line.get("crashed", ())]
    for line in of_kind(kept, "settled"):
        op = line["rule"].split(":")[0]
        if op in samples:
            verdicts[op].add(Verdict.SOUND.value if line["verdict"] == "cleared" else line["verdict"])
            reasons[op] += [line["reason"]] if "reason" in line else []
    return {op: Tried(samples[op], frozenset(verdicts[op]), tuple(dict.fromkeys(reasons[op]))) for op in samples}

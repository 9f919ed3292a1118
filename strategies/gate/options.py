"""What the command line asks of the gate, as one frozen value, and the refusals of what it cannot do."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from localtensor.errors import Refusal
from strategies.base.atomic_files import unwritable
from strategies.gate.baseline import date, is_text

CALL = "localtensor gate"
_BUDGET = re.compile(r"(?:([0-9]{1,4})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,7})s?)?")


class BadGate(Refusal, call=CALL):
    """An option of the gate that cannot be used."""


@dataclass(frozen=True, slots=True)
class Files:
    """Where the result is written, beside the terminal; `github` adds annotations to standard output."""

    junit: Path | None = None
    sarif: Path | None = None
    json: Path | None = None
    summary: Path | None = None
    github: bool = False

    def named(self) -> Iterator[tuple[str, Path]]:
        """The files asked for, by their options."""
        every = {"--junit": self.junit, "--sarif": self.sarif, "--json": self.json, "--summary": self.summary}
        return ((option, path) for option, path in every.items() if path is not None)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options as they were read.  `cache` is None with --no-cache.  Raises `BadGate`."""

    ops: tuple[str, ...] = ()
    everything: bool = False
    rules: str = "dtensor"
    baseline: Path = Path("localtensor-baseline.json")
    update: bool = False
    accept: str | None = None
    expires: str = ""
    changed: str | None = None
    budget: str = ""
    files: Files = field(default_factory=Files)
    ranks: tuple[int, ...] = ()
    mesh: tuple[str, ...] = ()
    pairs: bool = False
    confirm: str = "gloo"
    cache: Path | None = Path(".localtensor-cache")
    workers: int = 1
    quiet: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.confirm not in ("gloo", "nccl"):
            problem = "what nobody confirms fails no gate" if self.confirm == "none" else "no such way to confirm"
            raise BadGate("--confirm", self.confirm, problem, "Choose gloo or nccl.")
        if self.accept is not None and not self.accept.strip():
            raise BadGate("--accept", repr(self.accept), "this is no reason", "Say why what is new is accepted.")
        if self.accept is not None and not is_text(self.accept):  # bytes that the locale does not read
            raise BadGate("--accept", ascii(self.accept), "this is no text in UTF-8", "Write it in UTF-8.")
        if self.rules != "dtensor" and self.everything:
            raise BadGate("--all", "given", "--rules names the rules to judge", "Drop one of the two.")
        if self.cache is not None and not _is_folder("--cache", self.cache) and self.cache.exists():
            raise BadGate("--cache", self.cache, "verdicts are kept in a folder", "Name a folder, or pass --no-cache.")
        self.until(0.0)
        seen: dict[Path, str] = {}
        for option, path in (("--baseline", self.baseline), *self.files.named()):
            _check_file(option, path, only_read=path is self.baseline and not self.update and self.accept is None)
            twin = seen.setdefault(path.absolute(), option)
            if twin != option:
                raise BadGate(option, path, f"{twin} names the same file", "Name another.")

    def until(self, start: float) -> float:
        """The time at which a run that began at `start` takes up no more; 0 if there is no such time."""
        if not self.budget:
            return 0.0
        found = _BUDGET.fullmatch(self.budget.strip())
        hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
        total = (hours * 60 + minutes) * 60 + seconds
        if not total:
            raise BadGate("--budget", repr(self.budget), "this is no time to work in", "Write 90s, 5m or 1h.")
        return start + total

    def last_day(self, today: dt.date) -> dt.date | None:
        """The last day on which what is accepted now is accepted; None is for good."""
        if not self.expires:
            return None
        day = date(self.expires)
        if day is None:
            raise BadGate("--expires", self.expires, "this is no date", "Write YYYY-MM-DD.")
        if self.accept is None:
            raise BadGate("--expires", self.expires, "nothing is accepted", 'Give the reason, too: --accept "...".')
        if day < today:
            raise BadGate("--expires", self.expires, f"that day is past (today is {today})", "Name a day to come.")
        return day


def _check_file(option: str, path: Path, *, only_read: bool) -> None:
    """Say before the work, not after it, that a file cannot be written."""
    if _is_folder(option, path):
        raise BadGate(option, path, "this is a folder", "Name a file.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BadGate(option, path, "its folder is not there", "Make the folder first, or name another.")
    if not only_read and unwritable(path)[0]:
        raise BadGate(option, path, "its folder cannot be written", "Name a file in a folder of yours.")


def _is_folder(option: str, path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # too long a name, say
        raise BadGate(option, path, f"it cannot be ({error.strerror})", "Name another.") from error

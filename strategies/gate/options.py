"""The options of `localtensor gate` as one frozen value, with their checks."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from strategies.base.atomic_files import why_not_writable
from strategies.base.foreign_text import is_text, parse_date
from strategies.base.options import BadOption, Quiet, Seed, Workers
from strategies.base.signals import worker_count
from strategies.model.settings import DEFAULT_DTYPES, Settings, check_rules, meshes

_BUDGET = re.compile(r"(?:([0-9]{1,4})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,7})s)?")


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The parameters of the command.  Raises `BadOption`."""

    # fmt: off
    ops: Annotated[tuple[str, ...], Argument(metavar="OP", help="Names or globs of overloads: of the module's, or of torch's own.", show_default=False)] = ()
    everything: Annotated[bool, Option("--all", help="Every overload that DTensor registers.")] = False
    rules: Annotated[str, Option("--rules", help="`dtensor`, or a module that registers rules: just those are tested.")] = "dtensor"
    baseline: Annotated[Path, Option("--baseline", help="The accepted findings; commit this file.")] = Path("localtensor-baseline.json")
    update: Annotated[bool, Option("--update", help="Remove the entries that no longer show; adds none.")] = False
    accept: Annotated[str | None, Option("--accept", metavar="REASON", help="Add the new findings, with this reason.", show_default=False)] = None
    expires: Annotated[str, Option("--expires", metavar="YYYY-MM-DD", help="The last day on which they are accepted.")] = ""
    changed: Annotated[str | None, Option("--changed", metavar="REV", help="Test only rules that changed since this revision, by content.", show_default=False)] = None
    budget: Annotated[str, Option("--budget", metavar="TIME", help="90s, 5m or 1h: no overload is begun after it.")] = ""
    junit: Annotated[Path | None, Option("--junit", help="Write JUnit XML here.", show_default=False)] = None
    sarif: Annotated[Path | None, Option("--sarif", help="Write SARIF 2.1.0 here.", show_default=False)] = None
    json: Annotated[Path | None, Option("--json", help="Write the whole result here.", show_default=False)] = None
    summary: Annotated[Path | None, Option("--summary", help="Write a Markdown summary here; $GITHUB_STEP_SUMMARY is added to.", show_default=False)] = None
    comment: Annotated[Path | None, Option("--comment", help="Write a Markdown comment for a pull request here.", show_default=False)] = None
    github: Annotated[bool, Option("--github", help="Also print annotations for GitHub.")] = False
    ranks: Annotated[tuple[int, ...], Option("--ranks", help="Mesh sizes to try.  [default: 2 3 4]", show_default=False)] = ()
    mesh: Annotated[tuple[str, ...], Option("--mesh", help="Shape of a mesh of several axes to try, repeatable: --mesh 2,2.", show_default=False)] = ()
    dtypes: Annotated[tuple[str, ...], Option("--dtype", help="Dtypes of samples, as for `localtensor validate`.", show_default=False)] = ()
    pairs: Annotated[bool, Option("--pairs", help="Also what follows the op.")] = False
    confirm: Annotated[str, Option("--confirm", help="Real processes that confirm a suspected rule: gloo or nccl.")] = "gloo"
    cache: Annotated[Path, Option("--cache", help="The folder for cached verdicts.")] = Path(".localtensor-cache")
    no_cache: Annotated[bool, Option("--no-cache", help="Neither read nor write cached verdicts.")] = False
    seed: Seed = 0
    workers: Workers = None
    quiet: Quiet = False
    # fmt: on

    def __post_init__(self) -> None:
        if self.confirm not in ("gloo", "nccl"):
            problem = "an unconfirmed finding fails no gate" if self.confirm == "none" else "no such way to confirm"
            raise _bad("--confirm", self.confirm, problem, "Choose gloo or nccl.")
        if self.accept is not None and not self.accept.strip():
            raise _bad("--accept", repr(self.accept), "this is no reason", "Say why what is new is accepted.")
        if self.accept is not None and not is_text(self.accept):  # bytes that the locale cannot decode
            raise _bad("--accept", ascii(self.accept), "this is no text in UTF-8", "Write it in UTF-8.")
        if self.rules != "dtensor" and self.everything:
            raise _bad("--all", "given", "--rules names the rules to judge", "Drop one of the two.")
        if not self.no_cache and not _is_folder("--cache", self.cache) and self.cache.exists():
            raise _bad("--cache", self.cache, "verdicts are kept in a folder", "Name a folder, or pass --no-cache.")
        self.until(0.0)
        seen: dict[Path, str] = {}
        for option, path in (("--baseline", self.baseline), *self.files()):
            _check_file(option, path, only_read=path is self.baseline and not self.update and self.accept is None)
            twin = seen.setdefault(path.absolute(), option)
            if twin != option:
                raise _bad(option, path, f"{twin} names the same file", "Name another.")

    def check(self) -> None:
        """Checks without torch what the run would refuse.  Raises `BadOption`, `BadSetting` or `BadRules`."""
        self.last_day(dt.datetime.now(tz=dt.timezone.utc).date())
        check_rules(self.rules, self.settings(Path.cwd(), 0.0).folder)

    def settings(self, folder: Path, start: float) -> Settings:
        """The settings of a run in `folder` that begins at `start`.  Raises `BadSetting`."""
        ranks, more_meshes = meshes(self.ranks, self.mesh)
        return Settings(
            patterns=self.ops if self.rules == "dtensor" else (),
            everything=self.everything,
            ranks=ranks,
            meshes=more_meshes,
            dtypes=self.dtypes or DEFAULT_DTYPES,
            pairs=self.pairs,
            rules=self.rules,
            confirm=self.confirm,
            seed=self.seed,
            workers=worker_count(self.workers),
            folder=str(folder),
            until=self.until(start),
        )

    def files(self) -> Iterator[tuple[str, Path]]:
        """The requested output files, by their options."""
        every = {
            "--junit": self.junit, "--sarif": self.sarif, "--json": self.json, "--summary": self.summary,
            "--comment": self.comment,
        }  # fmt: skip
        return ((option, path) for option, path in every.items() if path is not None)

    def until(self, start: float) -> float:
        """The time after which a run that began at `start` begins no overload; 0 without a budget."""
        if not self.budget:
            return 0.0
        found = _BUDGET.fullmatch(self.budget.strip())
        hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
        total = (hours * 60 + minutes) * 60 + seconds
        if not total:
            text = self.budget.strip()
            if text.isascii() and text.isdecimal() and int(text[:9]):
                problem, remedy = "a unit is required", f"Write {text}s, {text}m or {text}h."
            else:
                problem, remedy = "this is no time to work in", "Write 90s, 5m or 1h."
            raise _bad("--budget", repr(self.budget), problem, remedy)
        return start + total

    def last_day(self, today: dt.date) -> dt.date | None:
        """The last day of an acceptance; None is for good."""
        if not self.expires:
            return None
        day = parse_date(self.expires)
        if day is None:
            raise _bad("--expires", self.expires, "this is no date", "Write YYYY-MM-DD.")
        if self.accept is None:
            raise _bad("--expires", self.expires, "nothing is accepted", 'Give the reason, too: --accept "...".')
        if day < today:
            raise _bad("--expires", self.expires, f"that day is past (today is {today})", "Name a day to come.")
        return day


_bad = partial(BadOption, "localtensor gate")


def _check_file(option: str, path: Path, *, only_read: bool) -> None:
    """Check before the work, not after it, that a file can be written.  Raises `BadOption`."""
    if _is_folder(option, path):
        raise _bad(option, path, "this is a folder", "Name a file.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise _bad(option, path, "its folder is not there", "Make the folder first, or name another.")
    if not only_read and why_not_writable(path)[0]:
        raise _bad(option, path, "its folder cannot be written", "Name a file in a folder of yours.")


def _is_folder(option: str, path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:  # for instance a name that is too long
        raise _bad(option, path, f"it cannot be ({error.strerror})", "Name another.") from error

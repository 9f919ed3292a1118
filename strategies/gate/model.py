"""What the gate speaks of: keys that outlive edits, entries of a baseline, and what one run of the gate came to."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from strategies.model.verdict import Finding, Report


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """A wrong rule by what it means, never by a line of a file.

    `op` is an overload, `rule` the name of the finding without it, `dtypes` a class of dtypes (units.CLASSES), `mesh`
    a kind of mesh.

    >>> str(Key("aten.cumprod.default", "S(0) -> S(0)", "real", "1 axis"))
    'aten.cumprod.default: S(0) -> S(0) (real, 1 axis)'
    """

    op: str
    rule: str
    dtypes: str
    mesh: str

    def __str__(self) -> str:
        return f"{self.op}: {self.rule} ({self.dtypes}, {self.mesh})"


@dataclass(frozen=True, slots=True)
class Entry:
    """A finding that somebody has accepted, why, and until when; `expires` None is for good."""

    key: Key
    reason: str
    expires: dt.date | None = None


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Where a rule is written: `file` as a path within the repository, with slashes."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class ReviewedFinding:
    """A confirmed finding beside the baseline: `new` are those of its keys that nobody has accepted, or whose
    acceptance has expired.  `accepted` are the entries of the baseline for the others."""

    finding: Finding
    keys: tuple[Key, ...]
    new: tuple[Key, ...]
    place: SourceLine | None = None
    accepted: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """An overload that is judged, and why: `its rule function sharding_of_scale changed`."""

    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class GateResult:
    """What one run of the gate came to.

    `findings` are all confirmed ones; `gone` are entries of the baseline that were tried and no longer show;
    `expired` those that still show and are past their date; `untried` overloads that there was no time for, with the
    reason; `choices` what `--changed` chose (empty without it); `trouble` what leads to exit code 3, in words;
    `judged` all overloads that were tried, those without a finding included; `unseen` entries of crashes that did not
    come back, which is luck as often as a mend and fails nothing; `remembered` overloads whose verdict is that of an
    equal run before; `notes` what is good to know and fails nothing.
    """

    report: Report
    findings: tuple[ReviewedFinding, ...] = ()
    gone: tuple[Entry, ...] = ()
    expired: tuple[Entry, ...] = ()
    untried: tuple[tuple[str, str], ...] = ()
    choices: tuple[Choice, ...] = ()
    trouble: tuple[str, ...] = ()
    seconds: float = 0.0
    unseen: tuple[Entry, ...] = ()
    remembered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()

    @property
    def new(self) -> tuple[ReviewedFinding, ...]:
        """The findings that fail the gate."""
        return tuple(judged for judged in self.findings if judged.new)

    @property
    def exit_code(self) -> int:
        """0 clean, 1 something new or gone, 3 nothing tested or in trouble.  What is wrong outranks trouble."""
        if self.new or self.gone:
            return 1
        return 3 if self.trouble else 0

"""Five words for a claim, and what each is worth as an exit code."""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from strategies.model.rule import Rule, Sample


class Verdict(enum.Enum):
    """SUSPECT is an Unsound that nobody has confirmed end to end: never printed as Unsound."""

    SOUND = "sound"
    UNSOUND = "unsound"
    MISSING = "missing"
    SUSPECT = "suspect"
    UNTESTABLE = "untestable"
    CRASHED = "crashed"


CLEAN, WRONG, USAGE, NOTHING = 0, 1, 2, 3
"""Exit codes: nothing wrong; an Unsound rule or an ignored registration; usage; nothing tested or the tool failed."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What showed that a claim is wrong: the values that ranks hold, and what they make.

    `variant` and `draw` repeat the very same input values and decomposition from the seed.
    """

    reason: str
    variant: str = ""
    draw: int = 0
    got: str = ""
    want: str = ""


@dataclass(frozen=True, slots=True)
class Instance:
    """The verdict on one claim, on one sample, on one mesh size."""

    rule: Rule
    ranks: int
    sample: Sample
    verdict: Verdict
    source: str = ""
    evidence: Evidence = field(default_factory=lambda: Evidence(""))


@dataclass(frozen=True, slots=True)
class Finding:
    """What is reported of one rule, over all samples and meshes.

    `title` and `mesh` are set where it is more than one op on one axis; `elements` are those of all tensors.
    `kinds` are the classes of dtypes and kinds of meshes ("real", "1 axis") on which the rule was suspected.
    """

    rule: Rule
    ranks: int
    verdict: Verdict
    reason: str
    sample: tuple[str, ...]
    origin: str
    confirmed_on: str | None = None
    got: str = ""
    want: str = ""
    picture: str = ""
    repro: str | None = None
    script: str = ""
    title: str = ""
    mesh: tuple[int, ...] = ()
    elements: int = 0
    kinds: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.title or str(self.rule)


@dataclass(frozen=True, slots=True)
class Crash:
    """Our own failure, or torch's native one, on one sample.  Never a statement about a rule."""

    op: str
    sample: str
    error: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """Rules by verdict (each rule once, its worst verdict), and how much was tried for them."""

    sound: int = 0
    unsound: int = 0
    missing: int = 0
    suspect: int = 0
    untestable: int = 0
    crashed: int = 0
    samples: int = 0
    overloads: int = 0
    instances: int = 0
    combinations: int = 0
    by_metadata: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a validation found out.  `ignored` are registrations that torch never asks."""

    torch: str
    seed: int
    ranks: tuple[int, ...]
    confirm: str
    counts: Counts
    findings: tuple[Finding, ...] = ()
    crashed: tuple[Crash, ...] = ()
    untestable: tuple[tuple[str, str], ...] = ()
    skipped: tuple[tuple[str, int], ...] = ()
    ignored: tuple[str, ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()
    unfinished: int = 0
    """Units that are planned and not done: those of other shards, or of a run that was stopped."""

    @property
    def exit_code(self) -> int:
        verdicts = [finding.verdict for finding in self.findings]
        return exit_code(verdicts, tested=self.counts.instances, ignored=len(self.ignored))


def exit_code(verdicts: Iterable[Verdict], *, tested: int, ignored: int = 0) -> int:
    """The table: nothing tested is never a pass, and a crash of ours is never one either.

    >>> exit_code([Verdict.SOUND], tested=1), exit_code([], tested=0)
    (0, 3)
    """
    seen = set(verdicts)
    if Verdict.UNSOUND in seen or ignored:
        return WRONG
    return CLEAN if tested else NOTHING


# What a sweep is made of: units, each an overload, a class of dtypes, a mesh and a kind of trial.
#
# A plan is the product of these, known before anything is tried, so that what is missing can be named.

CLASSES = ("real", "complex", "integer", "bool")
"""Classes of dtypes: that of a sample is the first of complex, real, integer and bool among its tensors."""
ALONE, PAIRS, MESHES = "alone", "pairs", "meshes"
"""Kinds of trial: the op alone on one axis; with what follows it; on several axes."""


@dataclass(frozen=True, slots=True, order=True)
class Unit:
    """`aten.add.Tensor real 2,2 meshes`, as text and as a value."""

    op: str
    trial: str
    dtypes: str
    mesh: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op} {self.trial} {self.dtypes} {mesh_text(self.mesh)}"


def mesh_text(mesh: Sequence[int]) -> str:
    """`2,3`."""
    return ",".join(map(str, mesh))


def mesh_kind(mesh: Sequence[int]) -> str:
    """What matters of a mesh to those who accept that a rule is wrong on it: the number of its axes.

    >>> mesh_kind((4,)), mesh_kind((2, 3))
    ('1 axis', '2 axes')
    """
    return f"{len(mesh)} {'axis' if len(mesh) == 1 else 'axes'}"


def read_unit(text: str) -> Unit:
    """The unit of that text.

    >>> read_unit("aten.add.Tensor meshes real 2,3").mesh
    (2, 3)
    """
    op, trial, dtypes, mesh = text.split(" ")
    return Unit(op, trial, dtypes, tuple(map(int, mesh.split(","))))


def class_of(sample: Sample) -> str:
    """The class of dtypes that a sample is counted to; "real" for a call without tensors."""
    tensors: Sequence[Tensor] = sample.tensors
    if any(t.dtype.is_complex for t in tensors):
        return "complex"
    if not tensors or any(t.dtype.is_floating_point for t in tensors):
        return "real"
    return "bool" if all("bool" in str(t.dtype) for t in tensors) else "integer"


def planned(ops: Iterable[str], trials: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[Unit, ...]:
    """Every unit of these overloads, in order; `trials` are pairs of a kind and a mesh."""
    every = itertools.product(sorted(set(ops)), trials, CLASSES)
    return tuple(sorted(Unit(op, kind, dtypes, mesh) for op, (kind, mesh), dtypes in every))


def share(op: str, count: int) -> int:
    """Which of `count` shards tries this overload: the same on every machine.

    All units of an overload go together, so that a wrong rule is confirmed by one shard and not by each.
    """
    return int.from_bytes(hashlib.sha256(op.encode()).digest()[:8], "big") % count


def digest(texts: Iterable[object]) -> str:
    """A short name for a list of texts, the same in any process."""
    return hashlib.sha256("\n".join(map(str, texts)).encode()).hexdigest()[:16]

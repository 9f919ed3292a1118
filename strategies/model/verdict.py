"""Verdicts, findings and reports; their exit codes; and the units of work of a sweep.

A unit is an overload, a kind of test, a class of dtypes and a mesh.  The plan of a sweep, the product of these, is
known before the first test, so that missing units can be named.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from strategies.model.cause import CauseRecord
from strategies.model.rule import DTYPE_CLASSES, Rule, Sample


class Verdict(enum.Enum):
    """SUSPECT is an unsound rule that no end-to-end run has confirmed; it is never reported as unsound.

    REFUSED is a rule that DTensor applies to a call that plain torch takes, and that makes every rank raise.
    """

    SOUND = "sound"
    UNSOUND = "unsound"
    REFUSED = "refused"
    MISSING = "missing"
    SUSPECT = "suspect"
    UNTESTABLE = "untestable"
    CRASHED = "crashed"


FAULTS = (Verdict.UNSOUND, Verdict.REFUSED)
"""The verdicts that a real run has confirmed, and that fail a validation."""
CLEAN, WRONG, USAGE, NOTHING = 0, 1, 2, 3
"""Exit codes: no finding; an unsound or refused rule or an ignored registration; usage error; nothing tested, or a failure
of ours."""


UNDEFINED = " is not defined"
"""The end of the reason for a partial placement of a dtype that has no such reduction."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence that a claim is wrong: the gathered result `got` and the expected result `want`.

    `variant` and `draw`, with the seed, determine the input values and the decomposition of partial inputs.
    """

    reason: str
    variant: str = ""
    draw: int = 0
    got: str = ""
    want: str = ""

    @property
    def undefined(self) -> bool:
        """Whether the result has a placement that its dtype cannot have: DTensor refuses to gather it, so it is not silent."""
        return self.reason.endswith(UNDEFINED)


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
    """The finding about one rule over all samples and meshes.

    `title` and `mesh` are set for a program, that is more than one op on one axis.  `elements` is the number of elements of all
    tensors.  `kinds` are the classes of dtypes and kinds of meshes ("real", "1 axis") for which the rule was a candidate.
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
    command: str = ""
    """The command that shows this very finding again, with its values; empty where they have no form in it."""

    @property
    def name(self) -> str:
        return self.title or str(self.rule)


@dataclass(frozen=True, slots=True)
class Crash:
    """A failure of this package, or a native crash of torch, on one sample: not a statement about a rule."""

    op: str
    sample: str
    error: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of rules by their worst verdict, and how much was tested."""

    sound: int = 0
    unsound: int = 0
    refused: int = 0
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
class LeftOut:
    """Names of inputs or follow-up steps with which an overload was not tested on one class of dtypes.

    `what` says what they are and why: `forms that do not apply`, `steps without a turn`.
    """

    op: str
    dtypes: str
    what: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a validation.

    `ignored` are registrations that torch never consults, and `untested` overloads none of whose rules was tested; each
    with the reason.
    """

    torch: str
    seed: int
    ranks: tuple[int, ...]
    confirm: str
    counts: Counts
    findings: tuple[Finding, ...] = ()
    crashed: tuple[Crash, ...] = ()
    untestable: tuple[tuple[str, str], ...] = ()
    skipped: tuple[tuple[str, int], ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()
    untested: tuple[tuple[str, str], ...] = ()
    seconds: tuple[tuple[str, float], ...] = ()
    unfinished: int = 0
    """Units that are planned and not done: those of other shards, or of an interrupted run."""
    left_out: tuple[LeftOut, ...] = ()
    causes: tuple[CauseRecord, ...] = ()
    """The causes of findings, where the journal has them: `localtensor causes JOURNAL` computes them."""

    def cause_of(self, finding: Finding) -> CauseRecord | None:
        return next((cause for cause in self.causes if finding.name in cause.findings), None)

    @property
    def exit_code(self) -> int:
        verdicts = [finding.verdict for finding in self.findings]
        return exit_code(verdicts, tested=self.counts.instances, ignored=len(self.ignored))


def exit_code(verdicts: Iterable[Verdict], *, tested: int, ignored: int = 0) -> int:
    """The exit code of these verdicts; a run that tested nothing, or whose tests all crashed, does not pass.

    >>> exit_code([Verdict.SOUND], tested=1), exit_code([], tested=0)
    (0, 3)
    """
    seen = set(verdicts)
    if seen.intersection(FAULTS) or ignored:
        return WRONG
    return CLEAN if tested else NOTHING


ALONE, PAIRS, MESHES = "alone", "pairs", "meshes"
"""Kinds of test: the op alone on one axis; with a follower; on several axes."""


@dataclass(frozen=True, slots=True, order=True)
class WorkUnit:
    """A unit of work; its text is `aten.add.Tensor meshes real 2,2`."""

    op: str
    kind: str
    dtypes: str
    mesh: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op} {self.kind} {self.dtypes} {mesh_text(self.mesh)}"


def mesh_text(mesh: Sequence[int]) -> str:
    """`2,3`."""
    return ",".join(map(str, mesh))


def mesh_kind(mesh: Sequence[int]) -> str:
    """The number of axes as text: accepted findings are recorded by it.

    >>> mesh_kind((4,)), mesh_kind((2, 3))
    ('1 axis', '2 axes')
    """
    return f"{len(mesh)} {'axis' if len(mesh) == 1 else 'axes'}"


def read_unit(text: str) -> WorkUnit:
    """The unit of that text.

    >>> read_unit("aten.add.Tensor meshes real 2,3").mesh
    (2, 3)
    """
    op, kind, dtypes, mesh = text.split(" ")
    return WorkUnit(op, kind, dtypes, tuple(map(int, mesh.split(","))))


def plan_units(ops: Iterable[str], kinds: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[WorkUnit, ...]:
    """Every unit of these overloads, sorted; `kinds` are pairs of a kind of test and a mesh."""
    every = itertools.product(sorted(set(ops)), kinds, DTYPE_CLASSES)
    return tuple(sorted(WorkUnit(op, kind, dtypes, mesh) for op, (kind, mesh), dtypes in every))


def share(op: str, count: int) -> int:
    """The shard, from 0 to `count` - 1, that tests this overload; the same on every machine.

    All units of an overload are in one shard, so that only that one confirms a wrong rule.
    """
    return int.from_bytes(hashlib.sha256(op.encode()).digest()[:8], "big") % count


def digest(texts: Iterable[object]) -> str:
    """A short hash of a list of texts, the same in every process."""
    return hashlib.sha256("\n".join(map(str, texts)).encode()).hexdigest()[:16]

"""Suspects before real processes: DTensor itself, end to end, with exactly those placements.

Only what goes wrong here is called Unsound.  A rule that DTensor does not follow (it redistributes
first), or whose local arguments it rewrites so that the result is right, is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from localtensor._util import Died, Outcome, Raised, Returned, Waiting, patching
from localtensor.layout import short
from localtensor.processes import Pool
from strategies.model.oracle import Truth
from strategies.model.program import Program
from strategies.model.rule import Call
from strategies.programs.run.local_inputs import held_of
from strategies.programs.run.program_oracle import call_of_program, truth_of
from strategies.programs.run.rank_run import Part, play
from strategies.programs.run.verdict import Confirmation, judged
from strategies.validation.difference import coarsest
from strategies.validation.probe import Case

SECONDS = 20.0
"""Time limit of one case."""
PATIENCE = 3.0
"""How many times as long it has once more, where ranks were waiting when the time was up: a busy machine is slow, and
only a rank that waits however long it is given is a finding."""
REAL = {"nccl": "cpu:gloo,cuda:nccl"}
"""What a backend's name stands for here: ranks tell each other who raised by tensors on the CPU."""
Home = tuple[str, str]


class Court:
    """A pool of real processes, started when first needed and reused as long as the number of ranks is the same.

    One pool at a time: each rank is a process of a hundred megabytes of its own.
    """

    def __init__(self, backend: str, device: str = "cpu", home: Home = ("", "")) -> None:
        self.backend, self.device, self.home = backend, device, home
        self._pool: Pool | None = None

    def __enter__(self) -> Court:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def confirm(self, case: Case) -> Confirmation:
        """What the real DTensor makes of this case.  Never hangs: the pool ends what does."""
        return weigh(case, self._played(parts_of(case, self.device, self.home)))

    def confirm_program(self, program: Program, truth: Truth | None = None) -> Confirmation:
        """What the real DTensor makes of this program.  Raises as `held_of` and `truth_of` do."""
        truth = truth or truth_of(program)
        outcomes = self._played(program_parts(program, self.device, self.home))
        return weigh_program(program, truth, outcomes)

    def _played(self, parts: Sequence[Part]) -> list[Outcome]:
        pool = self._pool
        if pool is None or pool.ranks != len(parts):
            self._leave()
            pool = self._pool = Pool(len(parts), backend=REAL.get(self.backend, self.backend), timeout=SECONDS)
        sent = [(patching.dumps(part),) for part in parts]
        outcomes = pool.call(play, sent)
        if _late(outcomes):
            outcomes = pool.call(play, sent, timeout=PATIENCE * pool.timeout)
        return outcomes


def _late(outcomes: Sequence[Outcome]) -> bool:
    """Whether it was the time limit that ended them, and no rank that raised or died."""
    lost = [outcome for outcome in outcomes if not isinstance(outcome, Returned)]
    return bool(lost) and all(isinstance(outcome, Waiting) for outcome in lost)


def parts_of(case: Case, device: str, home: Home = ("", "")) -> list[Part]:
    """What each rank is sent."""
    placements = tuple((p,) for p in case.rule.inputs if p is not None)
    made = Part(case.sample.call, placements, (), (), (), device, home, (case.ranks,))
    return _dealt(made, case.truth.inputs, case.held)


def program_parts(program: Program, device: str, home: Home = ("", "")) -> list[Part]:
    """The same for a program."""
    call: Call = call_of_program(program)
    made = Part(call, program.inputs, (), (), (), device, home, program.mesh, program.flattened)
    return _dealt(made, program.sample.tensors, held_of(program))


def _dealt(part: Part, whole: Sequence[Tensor], held: Sequence[Sequence[Tensor]]) -> list[Part]:
    ranks = len(held[0]) if held else 1
    pieces = [tuple(column[rank].detach().cpu().clone() for column in held) for rank in range(ranks)]
    return [part.of(whole, mine) for mine in pieces]


def weigh(case: Case, outcomes: Sequence[Outcome]) -> Confirmation:
    """The verdict of a real run."""
    claimed = [short(p) for p in case.rule.outputs]
    coarse = coarsest(case.truth.inputs, [(p,) for p in case.rule.inputs])
    return _weighed(case.truth, (case.ranks,), outcomes, claimed, coarse)


def weigh_program(program: Program, truth: Truth, outcomes: Sequence[Outcome]) -> Confirmation:
    """The same for a program."""
    return _weighed(truth, program.mesh, outcomes, (), coarsest(program.sample.tensors, program.inputs))


def _weighed(
    truth: Truth, mesh: tuple[int, ...], outcomes: Sequence[Outcome], claimed: Sequence[str], coarse: float
) -> Confirmation:
    lost = [o for o in outcomes if not isinstance(o, Returned)]
    if lost:
        return _lost(lost)
    heard = [patching.loads(o.value) for o in outcomes if isinstance(o, Returned)]  # type: ignore[arg-type]
    return judged(truth, mesh, heard, claimed, coarse=coarse)


def _lost(lost: Sequence[Outcome]) -> Confirmation:
    for outcome in lost:  # first of all, since the peers of a dead process raise, or wait for it
        if isinstance(outcome, Died):
            return Confirmation(f"the process of rank {outcome.rank} dies (exit code {outcome.exitcode})")
    for outcome in lost:
        if isinstance(outcome, Raised):
            return Confirmation(
                "", f"the stage itself failed: {outcome.kind}: {outcome.message}", failed=outcome.traceback
            )
    waiting = [o for o in lost if isinstance(o, Waiting)]
    where = "; ".join(f"rank {o.rank} waits at {o.where}" for o in waiting)
    return Confirmation(f"hangs: {where}")

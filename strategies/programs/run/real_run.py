"""Suspects before real processes: DTensor itself, end to end, with exactly those placements.

Only what goes wrong here is called Unsound.  A rule that DTensor does not follow (it redistributes
first), or whose local arguments it rewrites so that the result is right, is cleared.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from localtensor._util import Outcome
from localtensor.layout import short
from strategies.model.oracle import Truth
from strategies.model.program import Program
from strategies.model.rule import Call
from strategies.programs.run.local_inputs import held_of
from strategies.programs.run.program_oracle import call_of_program, truth_of
from strategies.programs.run.rank_run import Part, play
from strategies.programs.run.verdict import Confirmation, judged
from strategies.torch_api.rank_runs import RankProcesses, lost, unpacked
from strategies.validation.probe import Case, coarsest

Home = tuple[str, str]


class Court(RankProcesses):
    """Real processes on which cases and programs are confirmed; `home` is where the user's rules module is found."""

    def __init__(self, backend: str, device: str = "cpu", home: Home = ("", "")) -> None:
        super().__init__(backend)
        self.device, self.home = device, home

    def confirm(self, case: Case) -> Confirmation:
        """What the real DTensor makes of this case.  Never hangs: the pool ends what does."""
        return weigh(case, self.run(play, parts_of(case, self.device, self.home)))

    def confirm_program(self, program: Program, truth: Truth | None = None) -> Confirmation:
        """What the real DTensor makes of this program.  Raises as `held_of` and `truth_of` do."""
        truth = truth or truth_of(program)
        return weigh_program(program, truth, self.run(play, program_parts(program, self.device, self.home)))


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
    fault = lost(outcomes)
    if fault is None:
        return judged(truth, mesh, unpacked(outcomes), claimed, coarse=coarse)
    if fault.raised is None:
        return Confirmation(fault.text)
    said = f"{fault.raised.kind}: {fault.raised.message}"
    return Confirmation("", f"the stage itself failed: {said}", failed=fault.raised.traceback)

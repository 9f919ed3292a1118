"""One overload before the court with what follows it, and on meshes of several axes: DTensor's own dispatch, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from localtensor.errors.formatting import in_a_line
from strategies.model.oracle import REFUSALS, Truth, tell
from strategies.model.program import Program
from strategies.model.rule import Claim, Rule, Sample
from strategies.model.verdict import Evidence, Instance, Verdict
from strategies.programs import chained_programs as pairs
from strategies.programs import mesh_validation as meshes
from strategies.programs import redistributions
from strategies.programs.run.simulated_run import play_all
from strategies.programs.run.verdict import Confirmation
from strategies.validation.candidate import Suspect
from strategies.validation.claim_sources import TooMany, claims
from strategies.validation.overload import CHARGES, Bench, Note
from strategies.validation.probe import try_claims
from strategies.validation.task import Docket, Hearing, keep

MOVES = 60
"""Redistributions from any layout to any that are tried on one mesh."""
Found = list[tuple[Program, Confirmation]]
Claimed = dict[int, list[Claim]]
"""The claims along one axis, by its size."""
Play = Callable[[Docket, int, Truth, tuple[int, ...], Claimed], tuple[int, Found]]


def with_followers(docket: Docket, note: Note) -> list[Hearing]:
    """A hearing for each unit: second ops, gradients, the same call again."""
    return _each(docket, note, _pairs)


def on_meshes(docket: Docket, note: Note) -> list[Hearing]:
    """A hearing for each unit: the op on several axes, with placements that are claimed and that are not."""
    return _each(docket, note, _meshes)


def _each(docket: Docket, note: Note, play: Play) -> list[Hearing]:
    bench = Bench(docket)
    for number, sample in enumerate(docket.samples):
        for i in bench.meshes(number):
            note(docket.step(number, i))
            hearing = bench.hearing(sample, docket.meshes[i])
            try:
                asked = _asked(sample, docket.meshes[i], docket.seed)
                if isinstance(asked, str):
                    hearing.skipped[asked] += 1
                    continue
                tried, found = play(docket, number, asked[0], docket.meshes[i], asked[1])
            except Exception as error:  # why: one sample's failure is reported as Crashed, and the trial goes on
                bench.crash(number, error)
                continue
            hearing.samples += 1
            hearing.tried += tried
            for suspect in map(_suspect, found):
                keep(hearing.suspects.setdefault(suspect.name, []), suspect, CHARGES)
    return bench.all()


def _asked(sample: Sample, mesh: tuple[int, ...], seed: int) -> tuple[Truth, Claimed] | str:
    """The truth and the claims, or why there is none.  What is raised later is an error of ours."""
    try:
        truth = tell(sample, seed=seed)
    except REFUSALS as error:
        return in_a_line(error, 90)
    try:
        return truth, {size: claims(sample, size, truth.raw) for size in sorted(set(mesh))}
    except (
        *REFUSALS,
        TooMany,
        AttributeError,
        ArithmeticError,
    ) as error:  # DTensor's own rule says so that it has none
        return in_a_line(error, 90)


def _pairs(
    docket: Docket, number: int, truth: Truth, mesh: tuple[int, ...], claimed: Claimed
) -> tuple[int, Found]:  # fmt: skip
    sample = docket.samples[number]
    if any(isinstance(out, Tensor) and not out.numel() for out in truth.outputs):
        return 0, []  # DTensor 2.13 looks for a view of an empty tensor for ever, and nothing would be seen in it
    tried = pairs.programs(sample, claimed[mesh[-1]], mesh, before=docket.samples, seed=docket.seed)
    return len(tried), pairs.suspects(tried)


def _meshes(
    docket: Docket, number: int, truth: Truth, mesh: tuple[int, ...], claimed: Claimed
) -> tuple[int, Found]:  # fmt: skip
    sample = docket.samples[number]
    by_size = dict(_standing(sample, truth, claimed, docket.seed))
    tried = meshes.try_meshes(sample, by_size, [mesh], seed=docket.seed)
    if sample.op == redistributions.COPY and number == 0:  # what is moved without an op is tried once a mesh, here
        moves = redistributions.draw_redistributions(mesh, seed=docket.seed, budget=MOVES)
        tried += zip(moves, play_all(moves), strict=True)
    return len(tried), meshes.suspects(tried)


def _standing(sample: Sample, truth: Truth, claimed: Claimed, seed: int) -> Iterator[tuple[int, list[Claim]]]:
    """The claims that stand along one axis.  What is wrong there is found there, and would only be found again."""
    for size, found in claimed.items():
        judged = try_claims(sample, truth, size, found, seed=seed)
        yield size, [c for c, i in zip(found, judged, strict=True) if i.verdict is not Verdict.UNSOUND]


def _suspect(found: tuple[Program, Confirmation]) -> Suspect:
    """The program as a suspicion; its rule has the placements along the last axis."""
    program, seen = found
    rule = Rule(program.sample.op, tuple(placements[-1] for placements in program.inputs), ())
    evidence = Evidence(seen.wrong, "", program.draw, seen.got, seen.want)
    instance = Instance(rule, program.ranks, program.sample, Verdict.UNSOUND, "simulated", evidence)
    return Suspect(instance, program)

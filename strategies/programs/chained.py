"""One overload before the court with what follows it, and on meshes of several axes: DTensor's own dispatch, simulated."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from localtensor.errors import in_a_line
from localtensor.layout import is_plain, rounds
from strategies.model.call_signature import others
from strategies.model.oracle import REFUSALS, Truth, tell
from strategies.model.rule import Call, Claim, Leaf, Program, Rule, Sample, overload, results
from strategies.model.verdict import Evidence, Instance, Verdict
from strategies.programs import mesh_programs as redistributions
from strategies.programs import mesh_validation
from strategies.programs.run.follow_ups import GRADS, SIMPLE
from strategies.programs.run.program_oracle import truth_about
from strategies.programs.run.real_run import play_all
from strategies.programs.run.verdict import Confirmation, placements_of
from strategies.validation.claim_sources import TooMany, claims
from strategies.validation.finding import Candidate, Task, TaskResult, keep
from strategies.validation.overload import CHARGES, Note, Recorder
from strategies.validation.probe import try_claims

# Which programs of more than one op to try for a sample, and which of those that went wrong say something new.

MOST = 12
"""Programs of one sample on one mesh, if nobody says otherwise."""
_OF_PARTIAL = (
    "R", "times -1", "plus 1", "sum", "cast float32", "cast int64", "S(0)", "squared", "absolute", "times 2", "slice",
    "full twice", "cast bool", "sum 0", "transpose", "S(1)", "cast float64",
)  # fmt: skip
_OF_SHARDS = (
    "slice", "sum 0", "transpose", "select", "view", "narrow", "sum", "unsqueeze", "R", "S(1)", "plus 1", "sum -1",
    "S(0)", "cast float64", "full twice", "absolute",
)  # fmt: skip

_OF_ITS_OWN = ("full twice", "sum", "times -1")
"""Of a placement of DTensor's own: it may have a state, and is not linear where a plain one is."""


def programs(
    sample: Sample, claims: Sequence[Claim], mesh: tuple[int, ...], *, before: Sequence[Sample] = (), most: int = MOST,
    seed: int = 0,
) -> list[Program]:  # fmt: skip
    """At most `most` programs for the claims about a sample, on a mesh whose last axis has the claims' placements.

    Each claim gets one of the followers that can show whether its outputs are what they are said to be, in turn;
    then gradients, arguments written to, single outputs, and, with calls from `before` first, the same op again.
    """
    lines = _lines(sample, claims)
    turn = zlib.crc32(f"{seed} {sample.op} {sample.arguments()}".encode())
    columns = [list(dict.fromkeys(_named(sample, line, turn + i, before))) for i, line in enumerate(lines)]
    chosen = [
        (line[0], then)
        for row in itertools.zip_longest(*columns)
        for line, then in zip(lines, row, strict=True)
        if then
    ]
    made = [Program(sample, mesh, _on(mesh, inputs), then, seed, turn % 2) for inputs, then in chosen]
    return made[:most]


_Line = tuple[tuple[Placement, ...], tuple[Placement | None, ...]]


def _lines(sample: Sample, claims: Sequence[Claim]) -> list[_Line]:
    """The different inputs among the claims, with the outputs that they should give."""
    found: dict[tuple[Placement, ...], _Line] = {}
    for claim in claims:
        inputs = tuple(p or Replicate() for p in claim.rule.inputs)
        if all(map(is_plain, inputs)) and len(inputs) == len(sample.tensors):
            found.setdefault(inputs, (inputs, claim.rule.outputs))
    return sorted(found.values(), key=lambda line: all(isinstance(p, Replicate) for p in line[0]))


def _named(sample: Sample, line: _Line, turn: int, before: Sequence[Sample]) -> Iterator[str]:
    """Followers for one line, the most telling first."""
    outputs = [p for p in line[1] if p is not None]
    writes = overload(sample.op)._schema.is_mutable
    own = _turned(_OF_PARTIAL, turn) if any(isinstance(p, Partial) for p in outputs) else ()
    own = own or (_turned(_OF_SHARDS, turn) if any(isinstance(p, Shard) for p in outputs) else ())
    if writes:
        yield "base"
    if not all(map(is_plain, outputs)):
        yield from _OF_ITS_OWN
    yield from own[:1]
    if any(map(rounds, sample.tensors)):
        yield tuple(GRADS)[turn % 2]
    yield from itertools.islice(others(sample, before), 1)
    if len(line[1]) > 1:
        yield f"grad of {turn % len(line[1])}"
        yield f"only {turn % len(line[1])}"
    yield from own[1:3]


def _turned(names: tuple[str, ...], turn: int) -> tuple[str, ...]:
    start = turn % len(names)
    return (*names[start:], *names[:start])


def _on(mesh: tuple[int, ...], inputs: Sequence[Placement]) -> tuple[tuple[Placement, ...], ...]:
    return tuple((*[Replicate() for _ in mesh[1:]], p) for p in inputs)


def suspects(tried: Sequence[Program]) -> list[tuple[Program, Confirmation]]:
    """Those that are wrong on simulated ranks although their op alone is right; to be confirmed by `RealRuns`.

    Where what follows is wrong as well on a fresh tensor with the same placements, the op is to blame for nothing: then
    the program is that, on an `alias` of the tensor.
    """
    wrong = [(p, found) for p, found in zip(tried, play_all(tried), strict=True) if found.wrong and p.then]
    alone = play_all([replace(p, then="") for p, _ in wrong])
    left = [(p, found, one) for (p, found), one in zip(wrong, alone, strict=True) if not one.wrong]
    fresh = [_fresh(p, one) for p, _, one in left]
    played = iter(play_all([program for program in fresh if program is not None]))
    made = []
    for (program, found, _), other in zip(left, fresh, strict=True):
        own = next(played) if other is not None else None
        if other is not None and own is not None and own.wrong:
            made.append((other, own))
        else:
            made.append((program, found))
    return made


def _fresh(program: Program, alone: Confirmation) -> Program | None:
    """The follower on a tensor that nobody has computed, with the placements that the op's result had."""
    if program.then not in SIMPLE or not alone.heard:
        return None
    try:
        outs = results(truth_about(program.sample, "", program.seed).raw)
    except REFUSALS:
        return None
    for out, text in zip(outs, alone.heard[0].placements, strict=False):
        placements = placements_of(text)
        if isinstance(out, Tensor) and placements is not None and len(placements) == len(program.mesh):
            call = Call("aten.alias.default", (Leaf(0),))
            sample = Sample(call, (out.detach().clone(),), f"the result of {program.sample.op}")
            return replace(program, sample=sample, inputs=(placements,))
    return None


MOVES = 60
"""Redistributions from any layout to any that are tried on one mesh."""
Found = list[tuple[Program, Confirmation]]
Claimed = dict[int, list[Claim]]
"""The claims along one axis, by its size."""
Play = Callable[[Task, int, Truth, tuple[int, ...], Claimed], tuple[int, Found]]


def with_followers(docket: Task, note: Note) -> list[TaskResult]:
    """A hearing for each unit: second ops, gradients, the same call again."""
    return _each(docket, note, _pairs)


def on_meshes(docket: Task, note: Note) -> list[TaskResult]:
    """A hearing for each unit: the op on several axes, with placements that are claimed and that are not."""
    return _each(docket, note, _meshes)


def _each(docket: Task, note: Note, play: Play) -> list[TaskResult]:
    bench = Recorder(docket)
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
    docket: Task, number: int, truth: Truth, mesh: tuple[int, ...], claimed: Claimed
) -> tuple[int, Found]:  # fmt: skip
    sample = docket.samples[number]
    if any(isinstance(out, Tensor) and not out.numel() for out in truth.outputs):
        return 0, []  # DTensor 2.13 looks for a view of an empty tensor for ever, and nothing would be seen in it
    tried = programs(sample, claimed[mesh[-1]], mesh, before=docket.samples, seed=docket.seed)
    return len(tried), suspects(tried)


def _meshes(
    docket: Task, number: int, truth: Truth, mesh: tuple[int, ...], claimed: Claimed
) -> tuple[int, Found]:  # fmt: skip
    sample = docket.samples[number]
    by_size = dict(_standing(sample, truth, claimed, docket.seed))
    tried = mesh_validation.try_meshes(sample, by_size, [mesh], seed=docket.seed)
    if sample.op == redistributions.COPY and number == 0:  # what is moved without an op is tried once a mesh, here
        moves = redistributions.draw_redistributions(mesh, seed=docket.seed, budget=MOVES)
        tried += zip(moves, play_all(moves), strict=True)
    return len(tried), mesh_validation.suspects(tried)


def _standing(sample: Sample, truth: Truth, claimed: Claimed, seed: int) -> Iterator[tuple[int, list[Claim]]]:
    """The claims that stand along one axis.  What is wrong there is found there, and would only be found again."""
    for size, found in claimed.items():
        judged = try_claims(sample, truth, size, found, seed=seed)
        yield size, [c for c, i in zip(found, judged, strict=True) if i.verdict is not Verdict.UNSOUND]


def _suspect(found: tuple[Program, Confirmation]) -> Candidate:
    """The program as a suspicion; its rule has the placements along the last axis."""
    program, seen = found
    rule = Rule(program.sample.op, tuple(placements[-1] for placements in program.inputs), ())
    evidence = Evidence(seen.wrong, "", program.draw, seen.got, seen.want)
    instance = Instance(rule, program.ranks, program.sample, Verdict.UNSOUND, "simulated", evidence)
    return Candidate(instance, program)

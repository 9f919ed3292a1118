"""Two torchrun scripts, or two configurations of one, compared: `localtensor compare`."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from localtensor._util.events import Call
from localtensor.errors import NeverEnded, NotComparable, RankRaised
from localtensor.processes.pool import run_once_in_processes
from localtensor.runner.torchrun import USAGE, Observer, TorchrunOptions, run_script
from localtensor.testing.compare import programs
from localtensor.testing.compare.api import check_repeated
from localtensor.testing.compare.comparison import (
    FINITE,
    NOT_FINITE,
    Comparison,
    collective_lines,
    comparison_of,
    notes_of_values,
    nothing_compared,
)
from localtensor.testing.compare.divergence import Divergence, Findings, Sides, first_divergence
from localtensor.testing.compare.find_layout import MeshLayout, assemble_layout, find_layout, layout_of_placements
from localtensor.testing.compare.names import NameMap, find_names
from localtensor.testing.compare.script_watch import (
    PASSES,
    RankRecord,
    ScriptWatch,
    Vary,
    mesh_of_groups,
    run_as_process,
)
from localtensor.testing.compare.suspects import CloserLook, closer_look
from localtensor.testing.compare.watch import OF_MODULES, Key, Observation, Region, Watch, region_of
from localtensor.testing.compare_dropout import dropout_off
from localtensor.testing.compare_tolerance import Noise, Repeated, Slacks, doubling

_ERROR = re.compile(r"[A-Z]\w+: |\S+: error: ")  # the line of an error, argparse's too, behind what a script prints
IN_PARTS = "values that the ranks of the reference hold in parts"
FEWER = "values that the reference does not have"
RAISED = ("RankRaised: run: ", ": this is the first rank that raised")
"""What stands around the exception of a rank, and its line, in what a run on rank threads prints."""
OTHER_ROWS = "losses of several backward passes in a step, perhaps of other rows"


@dataclass
class _Ran:
    """One run of a script: what each rank was seen to do, and the calls of collectives."""

    ranks: Sequence[RankRecord]
    calls: Sequence[Call]


@dataclass
class _Scripts:
    """Both scripts, and what is known of them so far: why values of the reference are not compared, for one."""

    reference: TorchrunOptions
    parallel: TorchrunOptions
    mesh: Mapping[str, int] | None
    progress: Callable[[str], None]
    not_compared: dict[Key, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    calls: tuple[str, ...] = ()
    axes: Mapping[str, int] = field(default_factory=dict)
    names: NameMap | None = None


def compare_scripts(
    reference: TorchrunOptions,
    parallel: TorchrunOptions,
    *,
    mesh: Mapping[str, int] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Compare two scripts, each on its own number of ranks; returns what was compared, with the divergence if any.

    The ranks are threads, or real processes over gloo, as the options of each script say.  `mesh` are the axes of the parallel script's ranks; without it they are those of its process groups.  `progress` is called
    with the name of each run.  The reference runs twice, and three times more to measure how far a right value may be away.

    Raises `NotComparable` if a script fails, the reference gives other values when it runs again, or nothing was compared.
    """
    scripts = _Scripts(reference, parallel, mesh, progress)
    sides, findings = _judge(scripts)
    look = None if findings.divergence is None else _look(scripts, sides, findings, findings.divergence)
    why = nothing_compared(sides, findings) if findings.divergence is None else ""
    if why:
        remedy = "Both have to call the same modules; values of modules, gradients, parameters and losses are compared."
        remedy = "Take a reference of one rank." if why == IN_PARTS else remedy
        found = NOT_FINITE in why or why == IN_PARTS
        problem = "no value was compared" if found else "no value of one has its counterpart in the other"
        raise NotComparable(f"{problem} ({why})", "the scripts", FINITE if NOT_FINITE in why else remedy)
    return comparison_of(sides, findings, look, scripts.calls, tuple(dict.fromkeys(scripts.notes)))


def command_of(options: TorchrunOptions) -> str:
    """The script and its number of ranks, as in `train.py -n 4`."""
    return f"{options.name} -n {options.ranks}"


def _judge(scripts: _Scripts) -> tuple[Sides, Findings]:
    """Runs both scripts, and compares them."""
    name = command_of(scripts.reference)
    first = _run(scripts, scripts.reference, "the reference")
    again = _run(scripts, scripts.reference, "the reference again")
    for one, other in zip(first.ranks, again.ranks, strict=True):
        repeated = Repeated(one.watch)
        for key, seen in other.watch.seen.items():
            repeated.take(key, seen.value)
        check_repeated(repeated, name, name)
    del again
    whole = _Whole(scripts, [one.watch for one in first.ranks])
    slacks = Slacks(reference := whole.of_reference())
    for seed in (1, 2):
        what = f"the reference with noise {seed}"
        noisy = _run(scripts, scripts.reference, what, vary=partial(Noise, seed))
        slacks.take(whole.of([one.watch for one in noisy.ranks]))
    slacks.take(whole.of([one.watch for one in _in_double(scripts).ranks]), double=True)
    ran = _run(scripts, scripts.parallel, "the parallel script")
    scripts.axes = scripts.mesh or _mesh(ran, scripts.parallel.ranks)
    sides = Sides(reference, slacks.found, tuple(one.watch for one in ran.ranks), scripts.axes, (), name)
    scripts.names = find_names(sides)
    if scripts.names is not None:
        sides = scripts.names.applied(sides)
        scripts.notes.append(scripts.names.note())
    sides = replace(sides, batch_axes=_batch_axes(sides))
    _leave_out_losses(scripts, sides)
    scripts.calls = collective_lines(scripts.axes, ran.calls)
    findings = first_divergence(sides)
    findings.not_compared.update(scripts.not_compared)
    scripts.notes += notes_of_values(sides, findings)
    if findings.divergence is None:
        others = (key for one in sides.ranks for key in one.seen)
        more = dict.fromkeys(
            key for key in others if key not in sides.reference.seen and key not in scripts.not_compared
        )
        findings.not_compared.update(dict.fromkeys(more, FEWER))
    else:
        scripts.notes += _remarks(findings)
        rows = [_rows_of(side.ranks) for side in (whole, sides)]
        if scripts.reference.ranks > 1 and rows[0] != rows[1]:
            scripts.notes.append(
                f"the batches have different sizes: {rows[1]} different rows on the ranks, and {rows[0]} on {name}"
            )
    return sides, findings


def _look(scripts: _Scripts, sides: Sides, findings: Findings, found: Divergence) -> CloserLook:
    """Both scripts run once more, and the ops around the divergence are compared, if the reference has one rank."""
    region = region_of(found.key, sides.ranks[0].calls)
    names = scripts.names
    there = region if names is None else names.region_on_ranks(region)
    ranks = _run(scripts, scripts.parallel, "the parallel script, op by op", there).ranks
    reference = sides.reference
    if scripts.reference.ranks == 1:
        reference = _run(scripts, scripts.reference, "the reference, op by op", region).ranks[0].watch
    second = replace(sides, reference=reference, ranks=tuple(one.watch for one in ranks))
    return closer_look(second if names is None else names.applied(second), findings, found)


def _run(
    scripts: _Scripts, options: TorchrunOptions, what: str, region: Region | None = None, vary: Vary | None = None
) -> _Ran:
    scripts.progress(what)
    run = _run_on_threads if options.on == "threads" else _run_on_processes
    return run(options, region, vary, options is scripts.reference)


def _run_on_threads(options: TorchrunOptions, region: Region | None, vary: Vary | None, causal: bool) -> _Ran:
    made = (None if vary is None else vary() for _ in range(options.ranks))
    watches = [ScriptWatch(Watch(region=region, causal=causal), one) for one in made]
    observer = Observer(lambda rank: watches[rank].hooks())
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), dropout_off():
        code = run_script(options, observer)
    if code:
        said = [line for line in err.getvalue().splitlines() if line.strip()]
        frames = ("[", " ", "Traceback")
        errors = [line for line in said if _ERROR.match(line)]
        plain = [line for line in said if not line.startswith(frames)]
        at = next(iter([*errors[-1:], *plain, *said[-1:]]), "it says nothing").strip().rstrip(".")
        if at.startswith(RAISED[0]):
            raise _failed(options, at.removeprefix(RAISED[0]).partition(RAISED[1])[0])
        raise _failed(options, at if code == USAGE else f"it ended with exit code {code}: {at}")
    return _Ran([RankRecord(one.watch, one.groups) for one in watches], observer.calls)


def _run_on_processes(options: TorchrunOptions, region: Region | None, vary: Vary | None, causal: bool) -> _Ran:
    """The script on real processes of its own, as each has modules and a default group that no other run may find."""
    given = (options, region, vary, causal)
    try:
        records = run_once_in_processes(run_as_process, [given] * options.ranks, options.seed, options.timeout or None)
    except RankRaised as fault:
        first = fault.raised[0]
        place = fault.where.get(first.rank)
        said = first.message if first.kind in ("Died", "LeftWithError") else f"{first.kind}: {first.message}"
        problem = f"rank {first.rank} on {options.on}: {' '.join(said.split()).rstrip('.')}"
        raise _failed(options, problem + (f", at {place}" if place is not None else "")) from None
    except NeverEnded as fault:
        at = "; ".join(f"rank {one.rank} was at {one.where}" for one in fault.busy)
        raise _failed(options, f"it has not ended in {fault.seconds:g} seconds: {at}") from None
    return _Ran(records, [call for one in records for call in one.calls])


def _failed(options: TorchrunOptions, problem: str) -> NotComparable:
    on = "" if options.on == "threads" else f"--on {options.on} "
    return NotComparable(
        problem, command_of(options), f"See what `localtensor run {on}-n {options.ranks} {options.name}` prints."
    )


def _in_double(scripts: _Scripts) -> _Ran:
    """The reference in double precision; nothing if the script does not run so, as with a dtype that it names itself."""
    try:
        return _run(scripts, scripts.reference, "the reference in double precision", vary=doubling)
    except NotComparable:
        scripts.notes.append("the reference does not run in double precision; the tolerance is measured by noise alone")
        return _Ran([RankRecord(Watch(), {}) for _ in range(scripts.reference.ranks)], ())


def _mesh(ran: _Ran, ranks: int) -> dict[str, int]:
    every = [item for one in ran.ranks for item in one.groups.items()]
    groups = dict(sorted(every, key=lambda item: bool(item[1])))  # a rank outside a group does not know its name
    found = mesh_of_groups(groups, ranks)
    if found is None:
        raise NotComparable("the process groups of the ranks cut no mesh", "mesh", "Name it: --mesh dp=2,tp=2.")
    return found


@dataclass
class _Whole:
    """The reference's ranks put together: what they hold alike, and what a DTensor says to be sharded, by its layout."""

    scripts: _Scripts
    ranks: Sequence[Watch]
    layouts: dict[Key, MeshLayout | None] = field(default_factory=dict)

    def of_reference(self) -> Watch:
        rows = {key.step: one.value.shape[0] for key, one in self.ranks[0].seen.items() if self._is_batch_in_parts(key)}
        for key, one in self.ranks[0].seen.items():
            held = [rank.seen.get(key) for rank in self.ranks]
            on_all = math.prod(one.sizes) == len(self.ranks)  # and not on a part of them
            said = layout_of_placements(one, len(one.sizes)) if on_all else []
            parts = key.kind in OF_MODULES and one.value.shape[:1] == (
                rows.get(key.step),
            )  # equal rows, as of positions
            plain = len(held) == 1 or all(x is not None and x.placements is None for x in held)
            if not parts and plain and self._alike(key):
                self.layouts[key] = None
            elif said and None not in held:
                self.layouts[key] = said[0]
            else:
                self.scripts.not_compared[key] = IN_PARTS
        return self.of(self.ranks)

    def _alike(self, key: Key) -> bool:
        return _equal([rank.seen[key].value for rank in self.ranks if key in rank.seen])

    def _is_batch_in_parts(self, key: Key) -> bool:
        """Whether it is an argument of the model of which each rank has rows of its own."""
        is_batch = (key.kind, key.name) == ("input", "") and self.ranks[0].seen[key].value.dim() > 0
        return is_batch and not self._alike(key)

    def of(self, ranks: Sequence[Watch]) -> Watch:
        """One watch of these ranks, under the layouts that the reference's values have."""
        made = replace(ranks[0], seen={})
        for key, layout in self.layouts.items():
            held = [rank.seen[key] for rank in ranks if key in rank.seen]
            if len(held) < len(ranks):
                continue
            values = [x.value for x in held]
            whole = values[0] if layout is None else assemble_layout(values, held[0].sizes, layout)
            if whole is not None:
                made.seen[key] = Observation(whole, None, held[0].place)
        return made


def _equal(values: Sequence[Tensor]) -> bool:
    one = values[0]
    return all(x.shape == one.shape and torch.equal(x.nan_to_num(), one.nan_to_num()) for x in values[1:])


def _batch_axes(sides: Sides) -> tuple[str, ...]:
    """The axes along which the ranks have rows of the batch: those of the first argument of the model, and by name."""
    found = set(programs.batch_axes_of(sides.mesh))
    for key, one in sides.reference.seen.items():
        if key.kind == "input" and key.name == "" and one.value.dim():
            held = [rank.seen[key].value for rank in sides.ranks if key in rank.seen]
            layout = (
                find_layout(held, sides.sizes, one.value, sides.slack(key)) if len(held) == len(sides.ranks) else None
            )
            axes = layout.axes if layout is not None else ()
            found |= {name for name, axis in zip(sides.mesh, axes, strict=False) if (axis.kind, axis.dim) == ("S", 0)}
            break
    return tuple(name for name in sides.mesh if name in found)


def _rows_of(ranks: Sequence[Watch]) -> int:
    """How many different rows the ranks have of the first argument of the model's first call."""
    different: list[Tensor] = []
    for rank in ranks:
        one = next((x.value for key, x in rank.seen.items() if (key.kind, key.name) == ("input", "")), None)
        if one is not None and one.dim() and not any(_equal([one, other]) for other in different):
            different.append(one)
    return sum(len(x) for x in different)


def _leave_out_losses(scripts: _Scripts, sides: Sides) -> None:
    """Losses of accumulated gradients: another number of them, or of other rows, does not correspond."""
    for key in [key for key in sides.reference.seen if key.kind == "loss"]:
        alone, many = (watch.calls[key.step, PASSES] for watch in (sides.reference, sides.ranks[0]))
        if alone != many or (alone > 1 and sides.batch_axes):
            scripts.not_compared[key] = OTHER_ROWS
            del sides.reference.seen[key]


def _remarks(findings: Findings) -> Iterable[str]:
    """What a divergence at the start of a script means: the scripts do not start alike."""
    key = findings.divergence.key if findings.divergence is not None else Key(0, "", "")
    if key.kind == "input" and key.name == "":
        yield "the global batches differ: both scripts have to draw the same one, and each rank its rows of it"
    if key.kind in ("parameter", "buffer"):
        yield "the scripts start from different parameters: let both load the same ones, or make them from one seed"

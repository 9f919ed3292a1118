"""The samples of every overload to test: captured from OpInfo, derived for the rest, and reduced to a diverse subset.

The samples of a sweep are stored beside its journal as JSON, one line per overload, so that resuming captures nothing again.

Which op calls are tested is selected first: from names and globs to OpInfos and overloads, and the number of samples of each.
"""

from __future__ import annotations

import fnmatch
import functools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from strategies.base import worker_pool
from strategies.base.atomic_files import read_bytes
from strategies.base.foreign_text import misfit, read_json
from strategies.base.journal import FOREIGN_LINE_ERRORS
from strategies.base.progress import Progress
from strategies.base.worker_pool import Workers
from strategies.inputs import derived_samples, opinfo_samples
from strategies.model import codec
from strategies.model.call_signature import diverse_subset
from strategies.model.rule import Sample, overload
from strategies.model.settings import DEFAULT_DTYPES, DTYPES, BadSetting, Settings, UnknownOp, torch_dtype
from strategies.model.verdict import Crash
from strategies.torch_api import dtensor, user_modules
from strategies.torch_api.user_modules import RegisteredRules

SAMPLES, TRACED, NAMED, SEARCHED = 24, 6, 64, 10
"""Samples tested per overload: in a sweep, of a decomposition, of an op that the user named, and in a search."""


@dataclass(frozen=True, slots=True)
class SampleSelection:
    """OpInfos to run, by number, and the overloads whose calls are recorded."""

    infos: tuple[int, ...]
    overloads: frozenset[str] = frozenset()
    whole: tuple[int, ...] = ()
    """OpInfos that the user named: all their own calls are recorded."""
    everything: bool = False
    guessed: bool = False
    """Whether all OpInfos stand here because no name tells which of them reach the overloads."""

    def wants(self, number: int, sample: Sample) -> bool:
        """Whether a sample that OpInfo `number` reaches is recorded."""
        if self.everything or sample.op in self.overloads:
            return True
        return number in self.whole and ("backward" not in sample.origin or "backward" in sample.op)


def pick(settings: Settings, rules: RegisteredRules | None) -> SampleSelection:
    """The OpInfos and overloads that the settings select.  Raises `UnknownOp`."""
    if rules is not None:
        theirs = frozenset(name for name in rules.ops if name.startswith("aten."))
        # Importing OpInfo takes seconds.
        return select_overloads(theirs, opinfo_samples.database()) if theirs else SampleSelection(())
    known = sorted({str(op) for op in dtensor.registered_overloads()})
    quoted = opinfo_samples.quoted_names()
    for pattern in settings.patterns if quoted and not settings.everything else ():  # before OpInfo's import
        if fnmatch.filter(quoted, pattern) or any(fnmatch.filter(overload_names(op), pattern) for op in known):
            continue
        if not _decomposed(pattern):
            raise UnknownOp(pattern, {*filter(_is_torch_function, quoted), *known})
    database = opinfo_samples.database()
    if settings.everything:
        return SampleSelection(tuple(range(len(database))), everything=True)
    whole: list[int] = []
    overloads: set[str] = set()
    for pattern in settings.patterns:
        infos = [n for n, info in enumerate(database) if fnmatch.filter(opinfo_samples.names(info), pattern)]
        named = [op for op in known if fnmatch.filter(overload_names(op), pattern)] or _decomposed(pattern)
        if not infos and not named:
            raise UnknownOp(pattern, {*(x for info in database for x in opinfo_samples.names(info)), *known})
        whole += infos
        overloads |= set(() if infos else named)
    others = select_overloads(frozenset(overloads), database)
    every = tuple(sorted({*whole, *others.infos}))
    return SampleSelection(every, frozenset(overloads), tuple(sorted(set(whole))), guessed=others.guessed)


def _is_torch_function(name: str) -> bool:
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return callable(found)


def _decomposed(name: str) -> list[str]:
    """The overload of that full name, if DTensor has a rule for it in none of its registries."""
    try:
        op = overload(name)
    except (ValueError, AttributeError):  # not three names, or no such op
        return []
    return [name] if dtensor.registry_of(op) else []


def overload_names(op: str) -> tuple[str, ...]:
    """The names by which a user may select an overload: `aten.add.Tensor`, `add.Tensor`, `aten.add` and `add`."""
    namespace, packet, which = op.split(".")
    return op, f"{packet}.{which}", f"{namespace}.{packet}", packet


def matching_overloads(patterns: Sequence[str], ops: Sequence[str]) -> tuple[str, ...]:
    """The overloads that match the patterns.  Raises `UnknownOp` for a pattern without a match."""
    found: set[str] = set()
    for pattern in patterns:
        named = {op for op in ops if fnmatch.filter(overload_names(op), pattern)}
        if not named:
            raise UnknownOp(pattern, {name for op in ops for name in overload_names(op)})
        found |= named
    return tuple(sorted(found))


def overloads_of_rules(rules: RegisteredRules, patterns: Sequence[str]) -> tuple[str, ...]:
    """The overloads of a rules module that match the patterns.  Raises `UnknownOp`, which names the module."""
    try:
        return matching_overloads(patterns, rules.every)
    except UnknownOp as unknown:
        raise UnknownOp(unknown.name, unknown.known, rules.module, rules.every) from None


def select_overloads(ops: frozenset[str], database: Sequence[Any]) -> SampleSelection:
    """The OpInfos with the overloads' names, else with a part of them (`select` for `select_backward`), else all."""
    if not ops:
        return SampleSelection(())
    bearers: set[int] = set()
    names = list(map(opinfo_samples.plain_names, database))
    for op in ops:
        packet = op.split(".")[1]
        found = {n for n, known in enumerate(names) if {packet, packet.strip("_")} & known}
        found = found or {n for n, known in enumerate(names) if any(x in packet for x in known if len(x) > 3)}
        bearers |= found or set(range(len(database)))
    return SampleSelection(tuple(sorted(bearers)), ops, guessed=len(bearers) == len(database) > len(ops))


def wider(picked: SampleSelection, met: Collection[str]) -> SampleSelection:
    """The OpInfos not yet run, for the selected overloads without samples; none if all have some."""
    lacking = frozenset(picked.overloads) - set(met)
    rest = set(range(len(opinfo_samples.database()))) - set(picked.infos) if lacking else set()
    return SampleSelection(tuple(sorted(rest)), lacking)


def chosen_samples(
    by_op: dict[str, list[Sample]], picked: SampleSelection, settings: Settings
) -> Iterable[tuple[str, list[Sample]]]:
    """The samples to test of each overload, sorted by overload."""
    for op in sorted(by_op):
        many = SEARCHED if settings.search else SAMPLES if picked.everything else NAMED
        if dtensor.registry_of(overload(op)) == "decomposition":
            many = TRACED if picked.everything else 2 * TRACED
        if by_op[op]:
            yield op, diverse_subset(by_op[op], many)


SECONDS = 60.0
"""Time limit of one pass, and of the draws of one op."""
DERIVED = 10
"""Samples tested of an overload whose samples are derived."""
SamplesByOp = dict[str, tuple[Sequence[Sample], str]]
"""By overload: its samples, and the reason if there are none."""


@dataclass(frozen=True, slots=True)
class CapturedSamples:
    """The samples, the crashes while capturing them, and the number of samples that torch rejected by reason."""

    shelf: SamplesByOp
    crashed: tuple[Crash, ...]
    refused: Counter[str]


def gather_samples(
    workers: Workers, settings: Settings, rules: user_modules.RegisteredRules | None, progress: Progress
) -> CapturedSamples:
    """The samples of the selected overloads.  If the likely OpInfos do not reach one of them, all OpInfos run."""
    picked = pick(settings, rules)
    device, settings = settings.device, replace(settings, device="cpu")  # a sample has the same numbers on every device

    def passes(count: int) -> None:
        progress.phase("capturing samples", count)

    if picked.guessed:
        picked = _scouted(workers, picked, settings, progress)
    by_op, crashed, refused = gather(workers, picked, settings, progress.tick, passes)
    there = _passes_on(device, picked, settings, by_op)
    if there:
        found, dead, no = capture(workers, there, picked, progress.tick, passes)
        by_op, crashed, refused = {**found, **by_op}, [*crashed, *dead], refused + no
    drawn, without = derived_samples.user_op_draws(
        workers, settings, [op for op in (rules.ops if rules else ()) if not by_op.get(op)]
    )
    by_op |= drawn
    more = wider(picked, by_op)
    if more.infos:
        found, dead, no = gather(workers, more, settings, progress.tick, passes)
        by_op, crashed, refused = {**by_op, **found}, [*crashed, *dead], refused + no
    crashed += [dead for dead in without.values() if isinstance(dead, Crash)]
    wanted = sorted(picked.overloads)
    if picked.everything:
        wanted = [m.op for m in user_modules.all_registered_overloads(device)]
    progress.phase("deriving samples", len(derived_samples.lacking(by_op, wanted, settings.seed)))
    made, reasons = derived_samples.gather(workers, by_op, wanted, settings.seed, progress.tick, device)
    shelf: SamplesByOp = {op: ((), why) for op, why in {**without, **reasons}.items() if isinstance(why, str)}
    for op, own in (
        *chosen_samples(by_op, picked, settings),
        *((op, diverse_subset(s, DERIVED)) for op, s in made.items()),
    ):
        kept = [sample for sample in own if codec.is_encodable(sample)]
        shelf[op] = kept, "" if kept else "its calls hold values that have no form in a journal"
        if 0 < len(kept) < len(own):
            refused[f"{op}: a call holds a value that has no form in a journal"] += len(own) - len(kept)
    return CapturedSamples(dict(sorted(shelf.items())), tuple(crashed), refused)


def _scouted(workers: Workers, picked: SampleSelection, settings: Settings, progress: Progress) -> SampleSelection:
    """The same with those OpInfos alone that reach an overload with one dtype; all of them where none does.

    That takes a sixth of the time of all dtypes: `convolution` is reached by eight OpInfos, none of that name.
    """
    database = opinfo_samples.database()
    first = {
        n: [d for d in settings.dtypes if torch_dtype(d) in database[n].supported_dtypes(settings.device)]
        for n in picked.infos
    }
    todo = [
        CapturePass(n, dtypes[0], next(iter(opinfo_samples.SIZES)), settings.device, settings.seed)
        for n, dtypes in first.items()
        if dtypes
    ]
    progress.phase("looking for calls", len(todo))
    answers = workers.run(run_capture_pass, todo, limit=SECONDS, tick=progress.tick)
    reached = {
        one.info
        for one, answer in zip(todo, answers, strict=True)
        if isinstance(answer, worker_pool.TaskDone)
        and any(picked.wants(one.info, sample) for sample in answer.value[0])
    }
    return replace(picked, infos=tuple(sorted(reached)), guessed=False) if reached else picked


@dataclass(frozen=True, slots=True)
class CapturePass:
    """A worker's task: one OpInfo with one dtype and the sizes of one pass (see `opinfo_samples.SIZES`)."""

    info: int
    dtype: str
    sizes: str
    device: str
    seed: int


def run_capture_pass(one: CapturePass, note: Callable[[int], None]) -> tuple[list[Sample], Counter[str]]:
    """Run by a worker: the calls of overloads for which DTensor has rules, while one OpInfo's samples run."""
    info = opinfo_samples.database()[one.info]
    dtype = torch_dtype(one.dtype)
    return opinfo_samples.capture_calls(info, dtype, one.sizes, device=one.device, seed=one.seed, wanted=_has_rule)


@functools.cache
def _has_rule(op: torch._ops.OpOverload) -> bool:
    return bool(dtensor.registry_of(op))


def gather(
    workers: Workers,
    picked: SampleSelection,
    settings: Settings,
    tick: Callable[[int], None],
    passes: Callable[[int], None],
) -> tuple[dict[str, list[Sample]], list[Crash], Counter[str]]:
    """Every overload's samples, the crashes while capturing them, and the samples that torch rejected by reason.

    `passes` is called with the number of passes, `tick` after each.
    """
    database = opinfo_samples.database() if picked.infos else []
    todo = [
        CapturePass(n, dtype, which, settings.device, settings.seed)
        for n in picked.infos
        for dtype in settings.dtypes
        if torch_dtype(dtype) in database[n].supported_dtypes(settings.device)
        for which in opinfo_samples.SIZES
    ]
    _check_dtypes(picked, settings, bool(todo))
    return capture(workers, todo, picked, tick, passes)


NARROW = ("float32", "bfloat16")
"""Dtypes of kernels that a GPU alone has: attention takes nothing wider."""


def _passes_on(
    device: str, picked: SampleSelection, settings: Settings, met: Mapping[str, Sequence[Sample]]
) -> list[CapturePass]:
    """Passes on a GPU in which the overloads for which it alone has a kernel may be reached."""
    if device == "cpu" or settings.dtypes != DEFAULT_DTYPES:
        return []
    members = user_modules.all_registered_overloads(device)
    here = [m.op for m in members if not m.cannot and user_modules.missing_kernel_reason(m.op)]
    infos = {*opinfo_samples.bearers([op for op in here if not met.get(op)])} & {*picked.infos}
    return [
        CapturePass(n, dtype, which, device, settings.seed)
        for n in sorted(infos)
        for dtype in (*settings.dtypes[:1], *NARROW)
        if torch_dtype(dtype) in opinfo_samples.database()[n].supported_dtypes(device)
        for which in opinfo_samples.SIZES
    ]


def capture(
    workers: Workers,
    todo: Sequence[CapturePass],
    picked: SampleSelection,
    tick: Callable[[int], None],
    passes: Callable[[int], None],
) -> tuple[dict[str, list[Sample]], list[Crash], Counter[str]]:
    """What these passes capture, as `gather`."""
    passes(len(todo))
    database = opinfo_samples.database() if todo else []
    by_op: dict[str, list[Sample]] = defaultdict(list)
    crashed: list[Crash] = []
    refused: Counter[str] = Counter()
    answers = workers.run(run_capture_pass, todo, limit=SECONDS, tick=tick)
    for one, answer in zip(todo, answers, strict=True):
        name = f"{database[one.info].formatted_name}[{one.dtype},{one.sizes}]"
        if isinstance(answer, worker_pool.TaskDone):
            for sample in answer.value[0]:
                if picked.wants(one.info, sample):
                    by_op[sample.op].append(sample)
            refused.update({f"{name}: {why}": n for why, n in answer.value[1].items()})
        else:
            crashed.append(derived_samples.capture_crash(name, answer))
    return by_op, crashed, refused


def _check_dtypes(picked: SampleSelection, settings: Settings, supported: bool) -> None:
    if picked.infos and not supported:
        takes = {str(d).removeprefix("torch.") for n in picked.infos for d in opinfo_samples.database()[n].dtypes}
        able = ", ".join(sorted(takes & set(DTYPES))) or "none of those tried"
        given = " ".join(settings.dtypes)
        raise BadSetting("--dtype", given, f"no op that you named takes it on {settings.device}", f"They take {able}.")


def samples_path(journal: Path) -> Path:
    """The file of the samples that belongs to a journal."""
    return journal.with_name(journal.name + ".samples")


def samples_lines(run: str, shelf: Mapping[str, tuple[Sequence[Sample], str]]) -> Iterator[str]:
    """The lines of the samples file of a run.  All samples must have a JSON form (see `codec.has_form`)."""
    yield json.dumps({"run": run, "overloads": len(shelf)})
    for op, (found, why) in shelf.items():
        yield json.dumps({"op": op, "why": why, "samples": list(map(codec.sample, found))}, separators=(",", ":"))


def read_samples(path: Path, run: str, wanted: Container[str]) -> SamplesByOp | None:
    """The samples of the wanted overloads; None if the file is missing, truncated, of another run, or holds something
    else: then samples are captured anew."""
    found: SamplesByOp = {}
    try:
        head, *rows = read_bytes(path).splitlines()
        if misfit(run_line := read_json(head), {"run": str, "overloads": int}) or run_line["run"] != run:
            return None
        if len(rows) != run_line["overloads"]:
            return None
        for row in rows:
            if row.split(b'"', 4)[3].decode() in wanted:  # the op stands first: the others need not be parsed
                data = read_json(row)
                found[data["op"]] = [codec.read_sample(s) for s in data["samples"]], data["why"]
    except (OSError, *FOREIGN_LINE_ERRORS):
        return None
    return found if not misfit([why for _, why in found.values()], [str]) else None

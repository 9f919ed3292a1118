"""Which op calls to try: from names and globs to samples, captured in worker processes."""

from __future__ import annotations

import fnmatch
import functools
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from strategies import generated, samples, workers
from strategies import torch_dtensor as dtensor
from strategies.choice import choose
from strategies.executors import Hands
from strategies.modules import Registered
from strategies.rules import Sample, overload
from strategies.settings import BadSetting, Settings, UnknownOp
from strategies.stage import at_home
from strategies.verdicts import Crash

SECONDS = 60.0
"""Time limit of one OpInfo with one dtype."""
SAMPLES, TRACED, NAMED, SEARCHED = 24, 6, 64, 10
"""Samples tried of one overload: in a sweep, of a decomposition, of an op that the user named, and in a search."""


@dataclass(frozen=True, slots=True)
class Pick:
    """OpInfos to run, by their number, and which of the calls met there are wanted."""

    infos: tuple[int, ...]
    overloads: frozenset[str] = frozenset()
    whole: tuple[int, ...] = ()
    """OpInfos that were named themselves: all their own calls are wanted."""
    everything: bool = False

    def wants(self, number: int, sample: Sample) -> bool:
        if self.everything or sample.op in self.overloads:
            return True
        return number in self.whole and ("backward" not in sample.origin or "backward" in sample.op)


@dataclass(frozen=True, slots=True)
class Unit:
    """One OpInfo, dtype and pass: what a worker captures at a time."""

    info: int
    dtype: str
    sizes: str
    device: str
    seed: int


def capture(unit: Unit, note: Callable[[int], None]) -> tuple[list[Sample], Counter[str]]:
    """A worker's part: run one OpInfo's samples and bring home the calls that DTensor has rules for."""
    info = samples.database()[unit.info]
    dtype = samples.DTYPES[unit.dtype]
    return samples.capture(info, dtype, unit.sizes, device=unit.device, seed=unit.seed, wanted=_ruled)


@functools.cache
def _ruled(op: Any) -> bool:
    return bool(dtensor.source_of(op))


def pick(settings: Settings, rules: Registered | None) -> Pick:
    """The OpInfos and overloads that the settings ask for.  Raises `UnknownOp`."""
    if rules is not None:
        theirs = frozenset(name for name in rules.ops if name.startswith("aten."))
        return _pick_overloads(theirs, samples.database()) if theirs else Pick(())  # OpInfo takes seconds to import
    database = samples.database()
    if settings.everything:
        return Pick(tuple(range(len(database))), everything=True)
    whole: list[int] = []
    overloads: set[str] = set()
    known = sorted({str(op) for op in dtensor.registered()})
    for pattern in settings.patterns:
        infos = [
            n for n, info in enumerate(database) if any(fnmatch.fnmatchcase(x, pattern) for x in samples.names(info))
        ]
        named = [op for op in known if any(fnmatch.fnmatchcase(x, pattern) for x in spellings(op))]
        named = named or _decomposed(pattern)
        if not infos and not named:
            raise UnknownOp(pattern, {*(x for info in database for x in samples.names(info)), *known})
        whole += infos
        overloads |= set(() if infos else named)
    others = _pick_overloads(frozenset(overloads), database)
    return Pick(tuple(sorted({*whole, *others.infos})), frozenset(overloads), tuple(sorted(set(whole))))


def _decomposed(name: str) -> list[str]:
    """The overload of that full name, if it is in no registry but DTensor has a rule for it all the same."""
    try:
        op = overload(name)
    except (ValueError, AttributeError):  # not three names, or no such op
        return []
    return [name] if dtensor.source_of(op) else []


def spellings(op: str) -> tuple[str, ...]:
    """`aten.add.Tensor` answers to itself, `add.Tensor`, `aten.add` and `add`."""
    namespace, packet, which = op.split(".")
    return op, f"{packet}.{which}", f"{namespace}.{packet}", packet


def matching(patterns: Sequence[str], ops: Sequence[str]) -> tuple[str, ...]:
    """The overloads that the patterns name.  Raises `UnknownOp` for one that names none."""
    found: set[str] = set()
    for pattern in patterns:
        named = {op for op in ops if any(fnmatch.fnmatchcase(name, pattern) for name in spellings(op))}
        if not named:
            raise UnknownOp(pattern, {name for op in ops for name in spellings(op)})
        found |= named
    return tuple(sorted(found))


def _pick_overloads(ops: frozenset[str], database: Sequence[Any]) -> Pick:
    """The OpInfos that bear the overloads' names, else a part of them (`select` for `select_backward`); all
    of them for an overload that has not even that."""
    if not ops:
        return Pick(())
    bearers: set[int] = set()
    for op in ops:
        packet = op.split(".")[1]
        found = {n for n, info in enumerate(database) if {packet, packet.strip("_")} & _plain_names(info)}
        found = found or {
            n for n, info in enumerate(database) if any(x in packet for x in _plain_names(info) if len(x) > 3)
        }
        bearers |= found or set(range(len(database)))
    return Pick(tuple(sorted(bearers)), ops)


def _plain_names(info: Any) -> set[str]:
    return {part for name in samples.names(info) for part in (name, name.split(".")[-1], name.replace(".", "_"))}


def wider(picked: Pick, met: Collection[str]) -> Pick:
    """The OpInfos not yet run, for the overloads asked for that no sample has reached; none if all were."""
    lacking = frozenset(picked.overloads) - set(met)
    rest = set(range(len(samples.database()))) - set(picked.infos) if lacking else set()
    return Pick(tuple(sorted(rest)), lacking)


def gather(
    crew: Hands,
    picked: Pick,
    settings: Settings,
    rules: Registered | None,
    tick: Callable[[int], None],
    units: Callable[[int], None],
) -> tuple[dict[str, list[Sample]], list[Crash], Counter[str]]:
    """Every overload's samples; what crashed on the way, and what torch itself refused."""
    database = samples.database() if picked.infos else []
    todo = [
        Unit(n, dtype, which, settings.device, settings.seed)
        for n in picked.infos
        for dtype in settings.dtypes
        if samples.DTYPES[dtype] in database[n].supported_dtypes(settings.device)
        for which in samples.SIZES
    ]
    units(len(todo))
    by_op: dict[str, list[Sample]] = defaultdict(list)
    crashed: list[Crash] = []
    refused: Counter[str] = Counter()
    _check_dtypes(picked, settings, bool(todo))
    answers = crew.run(capture, todo, limit=SECONDS, tick=tick)
    for unit, answer in zip(todo, answers, strict=True):
        name = f"{database[unit.info].formatted_name}[{unit.dtype},{unit.sizes}]"
        if isinstance(answer, workers.Done):
            for sample in answer.value[0]:
                if picked.wants(unit.info, sample):
                    by_op[sample.op].append(sample)
            refused.update({f"{name}: {why}": n for why, n in answer.value[1].items()})
        else:
            crashed.append(_crash(name, answer))
    own = [Unknown(op, settings.dtypes, settings.seed, settings.rules, settings.folder)
           for op in (rules.ops if rules else ()) if not by_op.get(op)]  # fmt: skip
    for unknown, answer in zip(own, crew.run(draw, own, limit=SECONDS), strict=True):
        if isinstance(answer, workers.Done):
            by_op[unknown.op] = answer.value
        else:
            crashed.append(_crash(unknown.op, answer))
    return by_op, crashed, refused


def _check_dtypes(picked: Pick, settings: Settings, some: bool) -> None:
    if picked.infos and not some:
        takes = {str(d).removeprefix("torch.") for n in picked.infos for d in samples.database()[n].dtypes}
        able = ", ".join(sorted(takes & set(samples.DTYPES))) or "none of those tried"
        asked = " ".join(settings.dtypes)
        raise BadSetting("--dtype", asked, f"no op that you named takes it on {settings.device}", f"They take {able}.")


def _crash(name: str, answer: workers.Failed | workers.Lost) -> Crash:
    if isinstance(answer, workers.Failed):
        return Crash(name, "its samples", answer.error, answer.trace)
    return Crash(name, "its samples", answer.why)


@dataclass(frozen=True, slots=True)
class Unknown:
    """An overload that no OpInfo reaches, and the rules module that registered it."""

    op: str
    dtypes: tuple[str, ...]
    seed: int
    module: str
    folder: str


def draw(unknown: Unknown, note: Callable[[int], None]) -> list[Sample]:
    """A worker's part: the samples that the module gives, or what its op accepts of calls drawn from the schema."""
    at_home(unknown.module, unknown.folder)
    hook = getattr(sys.modules[unknown.module], "samples", None)
    target = overload(unknown.op)
    if hook is not None:
        return generated.given(target, hook(target))
    return generated.calls(target, [samples.DTYPES[d] for d in unknown.dtypes], unknown.seed)


def chosen(by_op: dict[str, list[Sample]], picked: Pick, settings: Settings) -> Iterable[tuple[str, list[Sample]]]:
    """The samples to try of each overload, overloads in the order of their names."""
    for op in sorted(by_op):
        many = SEARCHED if settings.search else SAMPLES if picked.everything else NAMED
        if dtensor.source_of(overload(op)) == "decomposition":
            many = TRACED if picked.everything else 2 * TRACED
        if by_op[op]:
            yield op, choose(by_op[op], many)

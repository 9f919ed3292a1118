"""Every overload's samples, ready to be tried: captured, derived where no capture reaches, and chosen."""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strategies.base import worker_pool
from strategies.base.progress import Progress
from strategies.base.worker_pool import Workers
from strategies.inputs import opinfo_samples, schema_samples, selection
from strategies.inputs.selection import Pick
from strategies.model import codec
from strategies.model.call_signature import choose
from strategies.model.rule import Sample, overload
from strategies.model.settings import DTYPES, BadSetting, Settings
from strategies.model.verdict import Crash
from strategies.torch_api import dtensor, population, user_modules
from strategies.torch_api.user_modules import at_home

SECONDS = 60.0
"""Time limit of one pass, and of one op that is drawn for."""
DERIVED = 10
"""Samples that are tried of an overload that no capture reaches."""
Shelf = dict[str, tuple[Sequence[Sample], str]]
"""Of each overload its samples, and why there are none."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The samples; what crashed on the way, and what torch itself refused."""

    shelf: Shelf
    crashed: tuple[Crash, ...]
    refused: Counter[str]


def capture(hands: Workers, settings: Settings, rules: user_modules.Registered | None, progress: Progress) -> Captured:
    """Where the likely OpInfos do not reach an overload that is asked for, the samples of all OpInfos."""
    picked = selection.pick(settings, rules)

    def passes(count: int) -> None:
        progress.phase("capturing samples", count)

    by_op, crashed, refused = gather(hands, picked, settings, rules, progress.tick, passes)
    more = selection.wider(picked, by_op)
    if more.infos:
        found, dead, no = gather(hands, more, settings, None, progress.tick, passes)
        by_op, crashed, refused = {**by_op, **found}, [*crashed, *dead], refused + no
    wanted = [m.op for m in population.everything(settings.device)] if picked.everything else sorted(picked.overloads)
    progress.phase("deriving samples", len(opinfo_samples.lacking(by_op, wanted, settings.seed)))
    made, reasons = opinfo_samples.gather(hands, by_op, wanted, settings.seed, progress.tick)
    shelf: Shelf = {op: ((), why) for op, why in reasons.items()}
    for op, own in (*selection.chosen(by_op, picked, settings), *((op, choose(s, DERIVED)) for op, s in made.items())):
        kept = [sample for sample in own if codec.has_form(sample)]
        shelf[op] = kept, "" if kept else "its calls hold values that have no form in a journal"
        if 0 < len(kept) < len(own):
            refused[f"{op}: a call holds a value that has no form in a journal"] += len(own) - len(kept)
    return Captured(dict(sorted(shelf.items())), tuple(crashed), refused)


@dataclass(frozen=True, slots=True)
class Pass:
    """One OpInfo with one dtype and the sizes of one pass (see `samples.SIZES`): what a worker captures at a time."""

    info: int
    dtype: str
    sizes: str
    device: str
    seed: int


def run_pass(one: Pass, note: Callable[[int], None]) -> tuple[list[Sample], Counter[str]]:
    """A worker's part: run one OpInfo's samples and bring home the calls that DTensor has rules for."""
    info = opinfo_samples.database()[one.info]
    dtype = DTYPES[one.dtype]
    return opinfo_samples.capture(info, dtype, one.sizes, device=one.device, seed=one.seed, wanted=_ruled)


@functools.cache
def _ruled(op: Any) -> bool:
    return bool(dtensor.source_of(op))


def gather(
    hands: Workers,
    picked: Pick,
    settings: Settings,
    rules: user_modules.Registered | None,
    tick: Callable[[int], None],
    passes: Callable[[int], None],
) -> tuple[dict[str, list[Sample]], list[Crash], Counter[str]]:
    """Every overload's samples; what crashed on the way, and what torch itself refused.

    `tick` hears of each pass done, `passes` how many there are.
    """
    database = opinfo_samples.database() if picked.infos else []
    todo = [
        Pass(n, dtype, which, settings.device, settings.seed)
        for n in picked.infos
        for dtype in settings.dtypes
        if DTYPES[dtype] in database[n].supported_dtypes(settings.device)
        for which in opinfo_samples.SIZES
    ]
    passes(len(todo))
    by_op: dict[str, list[Sample]] = defaultdict(list)
    crashed: list[Crash] = []
    refused: Counter[str] = Counter()
    _check_dtypes(picked, settings, bool(todo))
    answers = hands.run(run_pass, todo, limit=SECONDS, tick=tick)
    for one, answer in zip(todo, answers, strict=True):
        name = f"{database[one.info].formatted_name}[{one.dtype},{one.sizes}]"
        if isinstance(answer, worker_pool.Done):
            for sample in answer.value[0]:
                if picked.wants(one.info, sample):
                    by_op[sample.op].append(sample)
            refused.update({f"{name}: {why}": n for why, n in answer.value[1].items()})
        else:
            crashed.append(_crash(name, answer))
    own = [Unknown(op, settings.dtypes, settings.seed, settings.rules, settings.folder)
           for op in (rules.ops if rules else ()) if not by_op.get(op)]  # fmt: skip
    for unknown, answer in zip(own, hands.run(draw, own, limit=SECONDS), strict=True):
        if isinstance(answer, worker_pool.Done):
            by_op[unknown.op] = answer.value
        else:
            crashed.append(_crash(unknown.op, answer))
    return by_op, crashed, refused


def _check_dtypes(picked: Pick, settings: Settings, some: bool) -> None:
    if picked.infos and not some:
        takes = {str(d).removeprefix("torch.") for n in picked.infos for d in opinfo_samples.database()[n].dtypes}
        able = ", ".join(sorted(takes & set(DTYPES))) or "none of those tried"
        asked = " ".join(settings.dtypes)
        raise BadSetting("--dtype", asked, f"no op that you named takes it on {settings.device}", f"They take {able}.")


def _crash(name: str, answer: worker_pool.Failed | worker_pool.Lost) -> Crash:
    if isinstance(answer, worker_pool.Failed):
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
        return schema_samples.given(target, hook(target))
    return schema_samples.calls(target, [DTYPES[d] for d in unknown.dtypes], unknown.seed)


# The samples of a sweep, beside its journal, so that going on with it captures nothing again: JSON, a line an overload.


def path_of(journal: Path) -> Path:
    return journal.with_name(journal.name + ".samples")


def lines(run: str, shelf: Mapping[str, tuple[Sequence[Sample], str]]) -> Iterator[str]:
    """The lines of the file.  All samples must have a form in JSON (see `codec.has_form`)."""
    yield json.dumps({"run": run, "overloads": len(shelf)})
    for op, (found, why) in shelf.items():
        yield json.dumps({"op": op, "why": why, "samples": list(map(codec.sample, found))}, separators=(",", ":"))


def read(path: Path, run: str, wanted: Container[str]) -> dict[str, tuple[Sequence[Sample], str]] | None:
    """The samples of the wanted overloads; None if the file is not there, not whole, or of another run."""
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
            if head["run"] != run:
                return None
            rows = list(file)
            if len(rows) != head["overloads"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found: dict[str, tuple[Sequence[Sample], str]] = {}
    for row in rows:
        if row.split('"', 4)[3] in wanted:  # the op stands first: the others need not be parsed
            told = json.loads(row)
            found[told["op"]] = [codec.read_sample(s) for s in told["samples"]], told["why"]
    return found

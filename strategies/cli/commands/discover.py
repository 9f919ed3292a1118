"""What `localtensor discover` does once its options are read: the search, what it prints, the exit code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from localtensor.errors import LocalTensorError
from strategies.base import worker_pool
from strategies.base.signals import undisturbed, wrote
from strategies.model.settings import BadSetting
from strategies.model.verdict import CLEAN, NOTHING, USAGE
from strategies.validation.discovery.codegen import NotEmitted, emit
from strategies.validation.discovery.discover import CALL, Discovery, discover, overloads
from strategies.validation.discovery.rule_inference import in_words, lines

SECONDS = 600.0
"""Time limit of one overload."""


@dataclass(frozen=True, slots=True)
class _Task:
    op: str
    ranks: tuple[int, ...]
    seed: int


@undisturbed()
def discover_command(name: str, *, emitted: bool, ranks: Sequence[int] = (2, 3), seed: int = 0, many: int = 1) -> int:
    """The exit code: 0 whether or not rules are missing, as for `validate --search`, since a missing rule is slow
    and not wrong; 2 for an unknown op or setting, and where --emit has nothing to print that is one module;
    3 where no call of the op could be searched, or the search itself failed.

    The module, or the list of rules, goes to standard output; all else to standard error.  `many` workers.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    try:
        _check(ranks, seed, many)
        tasks = [_Task(op, tuple(dict.fromkeys(ranks)), seed) for op in overloads(name)]
    except LocalTensorError as error:
        errors.print(str(error), markup=False)
        return USAGE
    found: list[Discovery] = []
    for task, answer in zip(tasks, worker_pool.run(_work, tasks, workers=many, limit=SECONDS), strict=True):
        if isinstance(answer, worker_pool.Done):
            found.append(answer.value)
        else:
            why = answer.error if isinstance(answer, worker_pool.Failed) else answer.why
            errors.print(f"{CALL}: the search of {task.op} failed: {why}.", markup=False)
    searched = [one for one in found if one.samples]
    if not searched:
        errors.print(f"{CALL}: no call of {name} could be searched; nothing was tested.", markup=False)
        return NOTHING
    try:
        text = _emitted(searched) if emitted else _listed(searched)
    except NotEmitted as error:
        errors.print(str(error), markup=False)
        return USAGE
    if problem := wrote(text):
        errors.print(f"{CALL}: {problem}", markup=False)
        return NOTHING
    return CLEAN


def _work(task: _Task, note: Callable[[int], None]) -> Discovery:
    return discover(task.op, task.ranks, task.seed)


def _check(ranks: Sequence[int], seed: int, many: int) -> None:
    if many < 1:
        raise BadSetting("--workers", many, "somebody must do the work", "Pass --workers 1 or more.", CALL)
    for n in ranks:
        if not 2 <= n <= 64:
            raise BadSetting("--ranks", n, "a rule speaks of at least 2 ranks", "Pass --ranks 2 to 64.", CALL)
    if not 0 <= seed < 2**63:
        raise BadSetting("--seed", seed, "torch's generators do not take it", "Pass 0 to 2**63 - 1.", CALL)


def _listed(found: Sequence[Discovery]) -> str:
    text = []
    for one in found:
        count = f"{len(one.missing)} {'rule is' if len(one.missing) == 1 else 'rules are'} missing"
        tried = f"{one.combinations} combinations of placements in {len(one.samples)} calls"
        text.append(f"{one.op}: {count} ({tried}; {one.source or 'no rule in DTensor'})\n")
        text += [f"  {in_words(line)}\n" for line in lines(one.surveys)]
    return "".join(text)


def _emitted(found: Sequence[Discovery]) -> str:
    """Raises `NotEmitted`."""
    some = [one for one in found if one.missing]
    if len(some) > 1:
        names = " or ".join(one.op for one in some)
        raise NotEmitted(some[0].op, "rules of several overloads are missing", f"Name one: {names}.")
    return emit((some or list(found))[0])

"""`localtensor discover`: searches for missing rules, prints them or a module that registers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from localtensor.errors import LocalTensorError
from strategies.base import worker_pool
from strategies.base.progress import error_console, progress_bar
from strategies.base.signals import print_error, quiet_on_one_thread, worker_count, write_stdout
from strategies.cli.options import DiscoverOptions, fail
from strategies.model.verdict import CLEAN, NOTHING, USAGE
from strategies.validation.discover import CALL, Discovery, NotEmitted, discover, module_text, resolve_overloads
from strategies.validation.rule_inference import infer_lines, line_text

SECONDS = 600.0
"""Time limit of one overload."""


@quiet_on_one_thread()
def run(options: DiscoverOptions) -> int:
    """The exit code: 0 whether or not rules are missing, as for `validate --search`, since a missing rule is slow
    and not wrong; 2 for an unknown op or setting, and where --emit has nothing to print that is one module;
    3 where no call of the op could be searched, or the search itself failed.

    The module, or the list of rules, goes to standard output; all else to standard error.
    """
    try:
        tasks = [(op, tuple(dict.fromkeys(options.ranks)), options.seed) for op in resolve_overloads(options.op)]
    except LocalTensorError as error:
        return fail(str(error), USAGE)
    found: list[Discovery] = []
    workers = worker_count(options.workers)
    with progress_bar(error_console(), options.quiet) as progress:
        progress.phase(f"searching {options.op}", len(tasks))
        progress.now(", ".join(op for op, *_ in tasks))
        answers = worker_pool.run_tasks(_discover, tasks, workers=workers, limit=SECONDS, tick=progress.tick)
        for (op, *_), answer in zip(tasks, answers, strict=True):
            if isinstance(answer, worker_pool.TaskDone):
                found.append(answer.value)
            else:
                why = answer.error if isinstance(answer, worker_pool.TaskFailed) else answer.why
                print_error(f"{CALL}: the search of {op} failed: {why}.")
    searched = [one for one in found if one.samples]
    if not searched:
        return fail(f"{CALL}: no call of {options.op} could be searched; nothing was tested.", NOTHING)
    try:
        text = _module_text(searched) if options.emit else _listing(searched)
    except NotEmitted as error:
        return fail(str(error), USAGE)
    if problem := write_stdout(text):
        return fail(f"{CALL}: {problem}", NOTHING)
    return CLEAN


def _discover(task: tuple[str, tuple[int, ...], int], note: Callable[[int], None]) -> Discovery:
    return discover(*task)


def _listing(found: Sequence[Discovery]) -> str:
    text = []
    for one in found:
        count = f"{len(one.missing)} {'rule is' if len(one.missing) == 1 else 'rules are'} missing"
        tried = f"{one.combinations} combinations of placements in {len(one.samples)} calls"
        text.append(f"{one.op}: {count} ({tried}; {one.source or 'no rule in DTensor'})\n")
        text += [f"  {line_text(line)}\n" for line in infer_lines(one.surveys)]
    return "".join(text)


def _module_text(found: Sequence[Discovery]) -> str:
    """A module of the missing rules of the one overload that lacks any.  Raises `NotEmitted`."""
    lacking = [one for one in found if one.missing]
    if len(lacking) > 1:
        names = " or ".join(one.op for one in lacking)
        raise NotEmitted(lacking[0].op, "rules of several overloads are missing", f"Name one: {names}.")
    return module_text((lacking or list(found))[0])

"""Dockets heard in workers, into lines of a journal: what dies, hangs or raises on the way costs one step, and is said."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from strategies.base.journal import Journal
from strategies.base.worker_pool import LATE, Done, Failed, Lost
from strategies.model.verdict import Crash
from strategies.model.work_unit import ALONE, MESHES, PAIRS, class_of
from strategies.programs.chained_validation import on_meshes, with_followers
from strategies.programs.run.rank_run import at_home
from strategies.sweep.executors import Hands
from strategies.validation import task as dockets
from strategies.validation.overload import Note, alone
from strategies.validation.task import Docket, Hearing

SECONDS = 30.0
"""Time limit of one step: one sample on one mesh."""
RETRIES = 40
"""Steps of one docket that may kill a worker before the rest of it is given up."""
_KINDS = {ALONE: alone, PAIRS: with_followers, MESHES: on_meshes}


def hear(docket: Docket, note: Note) -> list[Hearing]:
    """A worker's part: one hearing for each unit of the docket, none if its time is up.

    The rules module that it names is imported.  `note` hears the number of each step before it is begun.
    """
    if docket.until and time.time() >= docket.until:
        return []
    at_home(*docket.home)
    return _KINDS[docket.trial](docket, note)


def hear_all(
    hands: Hands, dockets: Sequence[Docket], journal: Journal, run: str, tick: Callable[[int], None],
    suspected: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """A line for every unit of the dockets that is begun in time.  A step that kills the process is left out the next time; a process that
    is killed before its first step, by somebody else perhaps, is forgiven once.  `suspected` is called whenever there
    is something to confirm."""
    dead: dict[int, list[tuple[Docket, Lost]]] = defaultdict(list)
    forgiven: set[int] = set()
    todo = dict(enumerate(dockets))
    for attempt in range(RETRIES + 1):
        answers = hands.run(hear, list(todo.values()), limit=SECONDS, tick=tick if not attempt else None)
        again: dict[int, Docket] = {}
        since = time.perf_counter()
        for (at, docket), answer in zip(todo.items(), answers, strict=True):
            if isinstance(answer, Done):
                found = answer.value
            elif isinstance(answer, Lost) and attempt < RETRIES and (answer.noted >= 0 or at not in forgiven):
                if answer.noted < 0:
                    forgiven.add(at)
                    again[at] = docket
                else:
                    dead[at].append((docket, answer))
                    again[at] = replace(docket, skip=docket.skip | _left_out(docket, answer), until=0.0)  # it is begun
                continue
            else:
                found = _given_up(docket, answer)
            _add(journal, run, _with_deaths(found, dead.pop(at, [])), time.perf_counter() - since)
            if any(hearing.suspects or hearing.whole for hearing in found):
                suspected()
            since = time.perf_counter()
        todo = again
        if not todo:
            return


def _left_out(docket: Docket, lost: Lost) -> set[int]:
    """What is not tried again: the step that killed, and of a sample that hung all: it would hang on each mesh."""
    number, _ = docket.at(lost.noted)
    return {lost.noted, docket.truth_step(number)} if lost.why.startswith(LATE) else {lost.noted}


def _add(journal: Journal, run: str, found: Sequence[Hearing], seconds: float) -> None:
    for hearing in found:
        journal.add({**dockets.line(hearing, seconds / len(found)), "run": run})


def _with_deaths(found: list[Hearing], deaths: Sequence[tuple[Docket, Lost]]) -> list[Hearing]:
    for docket, lost in deaths:
        number, mesh = docket.at(lost.noted)
        sample = docket.samples[number]
        told = f"{', '.join(sample.arguments())} from {sample.origin}"
        where = "the whole tensors" if lost.noted >= docket.truth_step(0) else "a rank's piece"
        crash = Crash(docket.op, told, f"{lost.why} on {where}")
        units = [h for h in found if (h.unit.dtypes, h.unit.mesh) == (class_of(sample), mesh)]
        (units or found)[0].crashed.append(crash)
    return found


def _given_up(docket: Docket, answer: Failed | Lost) -> list[Hearing]:
    found = [Hearing(unit) for unit in docket.units()]
    if isinstance(answer, Failed):
        crash = Crash(docket.op, "the whole overload", answer.error, answer.trace)
    else:
        crash = Crash(docket.op, "before its first sample" if answer.noted < 0 else "again and again", answer.why)
    found[0].crashed.append(crash)
    return found

"""With workers of a test's own: what each does is said by its answer, so that nothing has to die here."""

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from strategies.base.journal import open_journal
from strategies.base.worker_pool import TIMED_OUT, TaskDone, TaskFailed, TaskLost, WorkerPool
from strategies.model.kernels import kernel_device
from strategies.model.rule import overload
from strategies.model.verdict import WorkUnit
from strategies.sweep import session
from strategies.sweep.session import RETRIES, SECONDS, validate_task, validate_tasks
from strategies.torch_api import user_modules
from strategies.validation.finding import OverloadTask, TaskResult
from strategies.validation.overload import validate_overload
from tests.strategies import users
from tests.strategies.cases import numbers, sample, silent
from tests.strategies.planted_ops import plant, planted
from tests.strategies.wrong_here import if_cumprod_is_wrong


def sleepy(x):
    """Hangs on what one of two ranks has of six rows."""
    if x.shape == (3, 5):
        threading.Event().wait()
    return x * 2


plant("sleepy(Tensor x) -> Tensor", sleepy, "S")

SAMPLES = tuple(sample("neg.default", numbers(n + 1)) for n in range(3))
ONE = OverloadTask("aten.neg.default", SAMPLES, ((2,), (3,)), 0)
TWO = replace(ONE, op="aten.abs.default", meshes=((2,),))


def validated(task_of):
    return TaskDone([TaskResult(unit, samples=1) for unit in task_of.units()])


class Scripted:
    """`answer(task_of)` for each task, and what was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def run(self, work, tasks, *, limit, tick=None, again=None, arrived=None):
        assert (work, limit) == (validate_task, SECONDS)
        for number, first in enumerate(tasks):
            task = first
            while task is not None:
                self.asked.append(task)
                answer = self.answer(task)
                task = again(number, answer) if isinstance(answer, TaskLost) else None
            tick(1)
            arrived(number, answer)
            yield answer


def swept(tasks, answer):
    """The lines, what was asked, and the ticks."""
    hands, ticks = Scripted(answer), []
    with open_journal(None, resume=False) as journal:
        validate_tasks(hands, tasks, journal, "this run", ticks.append)
    return journal.lines, hands.asked, sum(ticks)


def crashes(lines):
    return {
        line["unit"]: [(c["op"], c["sample"], c["error"]) for c in line["crashed"]]
        for line in lines
        if "crashed" in line
    }


def test_every_unit_has_a_line_and_each_task_a_tick():
    lines, asked, ticks = swept([ONE, TWO], validated)
    assert [line["unit"] for line in lines] == [str(u) for d in (ONE, TWO) for u in d.units()]
    assert {(line["kind"], line["run"], line["samples"]) for line in lines} == {("unit", "this run", 1)}
    assert all(line["seconds"] >= 0 for line in lines)
    assert (asked, ticks) == ([ONE, TWO], 2)


def test_only_the_units_that_are_wanted_have_a_line():
    only = frozenset([WorkUnit(ONE.op, "alone", "real", (3,))])
    lines, _, _ = swept([replace(ONE, only=only)], validated)
    assert [line["unit"] for line in lines] == ["aten.neg.default alone real 3"]


def dies_at(*steps, why="the process died with SIGSEGV"):
    """As long as one of these steps is still taken, at the first of them."""

    def answer(task_of):
        left = [step for step in steps if step not in task_of.skip]
        return TaskLost(why, left[0]) if task_of.op == ONE.op and left else validated(task_of)

    return answer


def test_a_step_that_kills_is_left_out_the_next_time_and_said():
    step = ONE.step(1, 1)
    lines, asked, ticks = swept([ONE, TWO], dies_at(step))
    assert [(d.op, d.skip) for d in asked] == [
        (ONE.op, frozenset()),
        (ONE.op, frozenset([step])),
        (TWO.op, frozenset()),
    ]
    assert ticks == 2
    assert sorted(line["unit"] for line in lines) == sorted(str(u) for d in (ONE, TWO) for u in d.units())
    assert crashes(lines) == {
        "aten.neg.default alone real 3": [
            ("aten.neg.default", "f64[2] from test", "the process died with SIGSEGV on a rank's piece")
        ]
    }


def test_several_deaths_are_all_said_each_with_its_unit():
    lines, asked, _ = swept([ONE], dies_at(ONE.step(0, 0), ONE.step(2, 1), ONE.step(2, 0)))
    assert len(asked) == 4
    assert {unit: [sample for _, sample, _ in of] for unit, of in crashes(lines).items()} == {
        "aten.neg.default alone real 2": ["f64[1] from test", "f64[3] from test"],
        "aten.neg.default alone real 3": ["f64[3] from test"],
    }


def test_a_death_on_whole_tensors_is_not_said_to_be_on_a_piece():
    lines, asked, _ = swept([ONE], dies_at(ONE.oracle_step(2), why="no answer within 60 s"))
    ((_, (crash,)),) = crashes(lines).items()
    assert crash[:2] == ("aten.neg.default", "f64[3] from test")
    assert crash[2] == "no answer within 60 s on the whole tensors"
    assert asked[1].skip == {ONE.oracle_step(2)}


def test_of_a_sample_that_hung_nothing_is_tried_again():
    step = ONE.step(1, 0)
    lines, asked, _ = swept([ONE], dies_at(step, why=f"{TIMED_OUT} 30 s"))
    assert [task_of.skip for task_of in asked] == [frozenset(), {step, ONE.oracle_step(1)}]
    ((unit, (crash,)),) = crashes(lines).items()
    assert (unit, crash[2]) == ("aten.neg.default alone real 2", "no answer within 30 s on a rank's piece")


class Watched:
    """Workers of flesh and blood, and what they were asked."""

    def __init__(self, crew):
        self.crew, self.asked = crew, []

    def run(self, work, tasks, *, again, **given):
        self.asked += tasks

        def noted(at, lost):
            self.asked += filter(None, [again(at, lost)])
            return self.asked[-1]

        yield from self.crew.run(work, tasks, again=noted, **given)


def test_a_sample_that_hangs_on_one_mesh_is_left_out_on_all_of_them(monkeypatch):
    monkeypatch.setattr(session, "SECONDS", 0.5)
    samples = (planted("sleepy", numbers(6, 5)), planted("sleepy", numbers(8, 7)))
    task_of = OverloadTask(samples[0].op, samples, ((3,), (2,), (4,)), 0)
    with WorkerPool(1) as crew, open_journal(None, resume=False) as journal:
        hands = Watched(crew)
        validate_tasks(hands, [task_of], journal, "this run", lambda count: None)
        only = replace(task_of, samples=samples[1:])
        validate_tasks(hands, [only], journal, "the other alone", lambda count: None)
    assert [one.skip for one in hands.asked] == [frozenset(), {task_of.step(0, 1), task_of.oracle_step(0)}, frozenset()]
    tried = {run: [line.get("tried", 0) for line in journal.lines if line["run"] == run]
             for run in ("this run", "the other alone")}  # fmt: skip
    assert crashes(journal.lines) == {
        "planted.sleepy.default alone real 2": [
            ("planted.sleepy.default", "f64[6,5] from test", "no answer within 0.5 s on a rank's piece")
        ]
    }
    assert sum(tried["this run"]) > 0 and [n > 0 for n in tried["this run"]] == [
        n > 0 for n in tried["the other alone"]
    ]


def test_a_task_that_raises_is_a_crash_and_its_units_are_done():
    lines, asked, _ = swept(
        [ONE, TWO], lambda d: TaskFailed("KeyError: 'x'", "Traceback") if d is ONE else validated(d)
    )
    assert len(lines) == len(ONE.units()) + len(TWO.units()) and asked == [ONE, TWO]
    ((unit, (crash,)),) = crashes(lines).items()
    assert (unit, crash) == (str(ONE.units()[0]), ("aten.neg.default", "the whole overload", "KeyError: 'x'"))


def test_a_worker_that_was_killed_before_it_noted_anything_costs_nothing():
    answers = [TaskLost("the process died with SIGKILL", -1), validated(ONE)]
    lines, asked, _ = swept([ONE], lambda d: answers.pop(0))
    assert (len(lines), asked, crashes(lines)) == (len(ONE.units()), [ONE, ONE], {})


def test_a_task_that_kills_twice_before_it_noted_anything_is_given_up():
    lines, asked, _ = swept(
        [ONE, TWO], lambda d: TaskLost("it used more than 2048 MiB", -1) if d is ONE else validated(d)
    )
    assert (len(lines), asked) == (len(ONE.units()) + len(TWO.units()), [ONE, ONE, TWO])
    ((_, (crash,)),) = crashes(lines).items()
    assert crash == ("aten.neg.default", "before its first sample", "it used more than 2048 MiB")


@pytest.mark.parametrize("tries", [1, RETRIES])
def test_an_overload_that_kills_without_end_is_given_up_and_what_it_did_is_said(tries, monkeypatch):
    monkeypatch.setattr(session, "RETRIES", tries)
    many = replace(ONE, samples=SAMPLES[:1] * 99)
    lines, asked, _ = swept([many], dies_at(*range(198)))
    assert len(asked) == tries + 1
    assert [line["unit"] for line in lines] == [str(unit) for unit in many.units()]
    errors = [error for of in crashes(lines).values() for *_, error in of]
    assert len(errors) == tries + 1 and "the process died with SIGSEGV" in errors


def test_the_lines_are_the_same_every_time():
    def lines():
        return [{**line, "seconds": 0} for line in swept([ONE, TWO], dies_at(1, 4))[0]]

    assert lines() == lines()


def test_a_task_that_was_not_begun_in_time_has_no_line():
    lines, asked, ticks = swept([ONE, TWO], lambda task_of: TaskDone([]) if task_of is TWO else validated(task_of))
    assert {line["unit"].split()[0] for line in lines} == {ONE.op}
    assert (asked, ticks) == ([ONE, TWO], 2)


def test_a_task_that_was_begun_is_finished_however_late():
    late = replace(ONE, until=1.0)
    lines, asked, _ = swept([late], lambda task_of: validated(task_of) if task_of.skip else TaskLost("it died", 0))
    assert [task_of.until for task_of in asked] == [1.0, 0.0]
    assert len(lines) == len(ONE.units()) and len(crashes(lines)) == 1


@pytest.mark.parametrize("held", ["suspects", "whole"])
def test_what_has_to_be_confirmed_is_announced_as_soon_as_it_is_known(held):
    told = []

    def answer(task_of):
        told.append(task_of.op)
        found = TaskResult(task_of.units()[0])
        if task_of is TWO:
            getattr(found, held)["a rule"] = []
        return TaskDone([found])

    with open_journal(None, resume=False) as journal:
        validate_tasks(Scripted(answer), [ONE, TWO, ONE], journal, "run", lambda _: None, lambda: told.append("!"))
    assert told == [ONE.op, TWO.op, "!", ONE.op]


# A worker's part.

CUMPROD = sample("cumprod.default", numbers(4, 6), -1)


@if_cumprod_is_wrong
def test_an_op_alone_is_judged_as_the_validation_judges_it():
    task_of = OverloadTask(CUMPROD.op, (CUMPROD,), ((2,),), 0)
    assert repr(validate_task(task_of, silent)) == repr(validate_overload(task_of, silent))
    assert [list(h.suspects) for h in validate_task(task_of, silent) if h.suspects] == [
        ["aten.cumprod.default: S(1) -> S(1)"]
    ]


@pytest.mark.parametrize(("until", "count"), [(1.0, 0), (0.0, 4), (4e9, 4)])
def test_a_task_whose_time_is_up_is_not_begun(until, count):
    assert len(validate_task(OverloadTask(CUMPROD.op, (CUMPROD,), ((2,),), 0, until=until), silent)) == count


def test_the_users_module_is_imported_first(tmp_path):
    name = users.write(tmp_path, "heard_rules", users.RIGHT_AND_WRONG)
    assert name not in sys.modules
    task_of = OverloadTask(f"{name}.running.default", (), ((2,),), 0, home=(name, str(tmp_path)))
    try:
        with users.undone():
            assert [h.unit for h in validate_task(task_of, silent)] == list(task_of.units())
            assert overload(f"{name}.running.default")
    finally:
        user_modules.import_rules.cache_clear()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_a_gpu_alone_can_run_comes_first_there(device):
    attention, others = "aten._scaled_dot_product_flash_attention.default", ["aten.abs.default", "aten.neg.default"]
    run = SimpleNamespace(
        settings=SimpleNamespace(device=device), done=set(), _tasks_of=lambda op, found, why: [replace(ONE, op=op)]
    )
    every = session._Validation._tasks(run, dict.fromkeys([others[0], attention, others[1]], ((), "")))
    names = [task.op for task in every]
    assert names == ([attention, *others] if device == "cuda" else [others[0], attention, others[1]])


@pytest.mark.parametrize(("kind", "source"), [("alone", "dtensor"), ("pairs", "dtensor"), ("alone", "mine")])
def test_an_op_alone_runs_on_the_device_and_what_is_simulated_on_the_host(monkeypatch, kind, source):
    ran = []
    validators = {kind: lambda task, note: ran.append(kernel_device()) or []}
    monkeypatch.setattr(session, "_VALIDATORS", validators)
    for name in ("validate_laws", "validate_context_parallel", "validate_handlers"):
        monkeypatch.setattr(session, name, lambda *_: None)
    validate_task(replace(ONE, kind=kind, source=source, device="cpu:0"), silent)
    # There calls are made twice: at first they are sent, then their results are there.
    assert ran == (["cpu:0"] * 2 if (kind, source) == ("alone", "dtensor") else ["cpu"])
    assert kernel_device() == "cpu"

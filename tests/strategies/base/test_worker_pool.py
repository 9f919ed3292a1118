import ctypes
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from localtensor._util import pickling
from strategies.base import worker_pool
from strategies.base.worker_pool import (
    SubprocessPool,
    TaskDone,
    TaskFailed,
    TaskLost,
    WorkerPool,
    exit_reason,
    private_memory,
    run_in_subprocess,
    run_tasks,
)
from tests.tools import warm


def work(task, note):
    note(7)
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "raise":
        raise ValueError("no good")
    if task == "hang":
        threading.Event().wait()
    return task * 2


def listed(task, note):
    """Adds its name to a file, and dies if that is its name."""
    path, name = task
    with open(path, "a", encoding="ascii") as file:
        file.write(f"{name} ")
    note(3)
    return work(name, note)


def test_what_is_made_of_a_lost_task_runs_in_its_place_before_the_others_until_there_is_no_more(tmp_path):
    path, lost, ticks = tmp_path / "names", [], []

    def again(at, answer):
        lost.append((at, answer))
        return (path, "b" if len(lost) == 2 else "die") if len(lost) < 4 else None

    with WorkerPool(1) as pool:
        tasks = [(path, name) for name in ("a", "die", "c", "die", "e")]
        found = list(pool.run(listed, tasks, limit=60, tick=ticks.append, again=again))
    dead = TaskLost("the process died with SIGKILL", 7)
    assert found == [TaskDone("aa"), TaskDone("bb"), TaskDone("cc"), dead, TaskDone("ee")]
    assert path.read_text().split() == ["a", "die", "die", "b", "c", "die", "die", "e"]
    assert (lost, sum(ticks)) == ([(1, dead), (1, dead), (3, dead), (3, dead)], 5)


def read(path, note):
    with open(path, encoding="ascii") as file:
        return file.read()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="what a task waits for is a named pipe")
def test_answers_arrive_as_they_come_and_are_given_in_order(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("at once")
    seen = []

    def arrived(number, answer):
        seen.append(number)
        if number == 1:  # only now the first task goes on
            (tmp_path / "pipe").write_text("later")

    with WorkerPool(2) as pool:
        tasks = [str(tmp_path / "pipe"), str(tmp_path / "file")]
        found = [answer.value for answer in pool.run(read, tasks, limit=60, arrived=arrived)]
    assert (seen, found) == ([1, 0], ["later", "at once"])


def alive(pids):
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def pid_of(task, note):
    return os.getpid()


@pytest.mark.parametrize(
    ("frozen", "triton", "after"), [(False, True, False), (True, True, True), (False, False, True)]
)
def test_beside_triton_what_is_frozen_for_the_workers_is_collected_unless_it_was_frozen_before(
    frozen, triton, after, monkeypatch
):
    monkeypatch.setitem(sys.modules, "triton", sys) if triton else monkeypatch.delitem(sys.modules, "triton", False)
    before = gc.get_freeze_count()
    gc.freeze() if frozen else gc.unfreeze()
    try:
        with WorkerPool(1) as pool:
            assert [answer.value for answer in pool.run(work, ["a"], limit=60)] == ["aa"]
            assert gc.get_freeze_count() > 0
        assert (gc.get_freeze_count() > 0) == after
    finally:
        gc.freeze() if before else gc.unfreeze()


def hoard(task, note):
    """Holds so many bytes, and waits to be ended."""
    note(1)
    held = bytearray(b"x") * task
    threading.Event().wait(60)
    return len(held)


def slow_but_alive(task, note):
    for n in range(4):
        note(n)
        threading.Event().wait(task)
    return "done"


def test_answers_come_in_the_order_of_the_tasks():
    assert [a.value for a in run_tasks(work, list(range(20)), workers=3, limit=30)] == [2 * i for i in range(20)]


def test_a_dead_worker_costs_its_unit_only_and_says_how_far_it_was():
    first, dead, last = run_tasks(work, [1, "die", 3], workers=1, limit=30)
    assert (first, last) == (TaskDone(2), TaskDone(6))
    assert dead == TaskLost("the process died with SIGKILL", 7)


def test_a_unit_that_raises_keeps_its_traceback():
    (answer,) = run_tasks(work, ["raise"], workers=1, limit=30)
    assert isinstance(answer, TaskFailed)
    assert answer.error == "ValueError: no good"
    assert "in work" in answer.trace


def test_a_hang_ends_at_the_limit():
    hung, after = run_tasks(work, ["hang", 4], workers=1, limit=0.5)
    assert hung == TaskLost("no answer within 0.5 s", 7)
    assert after == TaskDone(8)


def test_the_limit_is_from_one_note_to_the_next():
    assert list(run_tasks(slow_but_alive, [0.4], workers=1, limit=1.2)) == [TaskDone("done")]


def test_what_eats_memory_is_ended_and_the_rest_goes_on(monkeypatch):
    monkeypatch.setattr(worker_pool, "MEMORY", private_memory(os.getpid()) + (64 << 20))
    lost, after = run_tasks(hoard, [256 << 20, 1], workers=1, limit=0.5)
    assert lost == TaskLost(f"it used more than {worker_pool.MEMORY >> 20} MiB", 1)
    assert after == TaskLost("no answer within 0.5 s", 1)  # a little is not too much: it waits as it was told


def loses_its_gpu(task, note):
    """As on a GPU on which a kernel fails after the second note of task 1; each later call on it fails, too."""
    lost = []

    def synchronize():
        if lost:
            raise RuntimeError("CUDA error: device-side assert triggered")

    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
    for n in range(4):
        note(n)
        lost += [n] * (task == n == 1)
    return task


def test_a_gpu_that_serves_no_more_costs_the_step_that_lost_it_and_no_later_task():
    kept, lost, after = run_tasks(loses_its_gpu, [0, 1, 2], workers=1, limit=60.0)
    assert (kept, after) == (TaskDone(0), TaskDone(2))
    assert lost == TaskLost(exit_reason(worker_pool.GPU_LOST), 1)
    assert "a kernel failed on the GPU" in lost.why


def test_what_the_parent_holds_and_what_files_back_is_no_more_than_what_is_there():
    held = bytearray(b"x") * (64 << 20)
    here = private_memory(os.getpid())
    assert len(held) < here < 8 << 30
    assert private_memory(None) == private_memory(2**22 + 1) == 0


@pytest.mark.parametrize("when", ["it is idle", "work is on its way"])
def test_a_worker_that_somebody_kills_is_replaced(when, monkeypatch):
    with WorkerPool(1) as crew:
        (pid,) = (a.value for a in crew.run(pid_of, [0], limit=60))
        os.kill(pid, signal.SIGKILL)
        crew._workers[0].process.join()
        if when == "work is on its way":  # it died a moment after somebody looked
            monkeypatch.setattr(crew._workers[0].process, "is_alive", lambda: True)
        first, second = crew.run(work, [1, 2], limit=60)
    assert (first, second) == (
        TaskDone(2) if when == "it is idle" else TaskLost("the process died with SIGKILL", -1),
        TaskDone(4),
    )


def test_workers_are_kept_from_one_run_to_the_next_and_replaced_when_they_retire(monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_TASKS_PER_WORKER", 3)
    with WorkerPool(1) as crew:
        pids = [a.value for _ in range(2) for a in crew.run(pid_of, [0, 0], limit=60)]
    assert pids[0] == pids[1] == pids[2] != pids[3]
    assert not alive(pids)


@pytest.mark.parametrize(("code", "said"), [
    (-11, "the process died with SIGSEGV"), (-40, "the process died with SIGRTMIN+6"), (0, "the process left with code 0"), (None, "the process left with code None"),
])  # fmt: skip
def test_how_a_process_ended_is_said(code, said):
    assert exit_reason(code) == said


def test_no_process_is_left_behind_when_the_caller_stops_early():
    answers = run_tasks(pid_of, [0] * 50, workers=2, limit=30)
    pids = {next(answers).value, next(answers).value}
    answers.close()
    assert not alive(pids)


def test_ticks_count_every_task():
    ticks = []
    assert len(list(run_tasks(work, [1, "die", "raise"], workers=2, limit=30, tick=ticks.append))) == 3
    assert sum(ticks) == 3


def test_a_tick_of_nothing_names_the_tasks_at_work_while_they_are():
    seen = []
    with WorkerPool(2) as pool:
        assert (
            len(list(pool.run(work, [1, 2, 3], limit=30, tick=lambda count: seen.append((count, *pool.running))))) == 3
        )
        assert pool.running == []
    assert all(set(tasks) <= {1, 2, 3} for _, *tasks in seen) and (0,) in seen and sum(count for count, *_ in seen) == 3


@pytest.mark.parametrize("tasks", [[], [5]])
def test_few_tasks_need_few_workers(tasks):
    assert len(list(run_tasks(work, tasks, workers=4, limit=30))) == len(tasks)


ORPHANS = """
import os
from strategies.base.worker_pool import WorkerPool
from tests.strategies.base.test_worker_pool import pid_of

with WorkerPool(2) as crew:
    list(crew.run(pid_of, [0, 0], limit=30))
    print(*[worker.process.pid for worker in crew._workers], flush=True)
    os.kill(os.getpid(), 9)
"""


def test_workers_end_when_their_parent_is_killed():
    root = Path(__file__).parents[3]
    parent = warm.run([sys.executable, "-c", ORPHANS], cwd=root)
    pids = parent.stdout.split()
    assert (parent.returncode, len(pids)) == (-signal.SIGKILL, 2)
    deadline = time.monotonic() + 10
    while left := alive(pids):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


DEAF = """
import sys
from strategies.base.worker_pool import WorkerPool
from tests.strategies.base.test_worker_pool import deaf

with WorkerPool(1) as crew:
    list(crew.run(deaf, sys.argv[1:], limit=60))
"""


def deaf(task, note):
    """Tells who it is, ends its parent, and holds Python's lock in a native call that nothing of Python's interrupts."""
    Path(task).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    ctypes.PyDLL(None).sleep(60)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_worker_that_hangs_in_native_code_ends_with_its_parent(tmp_path):
    root, told = Path(__file__).parents[3], tmp_path / "pid"
    parent = warm.run([sys.executable, "-c", DEAF, str(told)], cwd=root)
    assert parent.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while left := alive([int(told.read_text())]):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def child():
    """One child for all tests that leave it alive, or see it replaced."""
    with SubprocessPool() as one:
        yield one


def ran(child, task, *tasks, limit=60.0, what=work):
    return list(child.run(what, [task, *tasks], limit=limit))


def big(task, note):
    """As many bytes as it was sent, the other way round."""
    return task.flip(0)


def talks(task, note):
    print("to whoever listens")
    os.write(1, b"and to the pipe itself")
    os.write(2, b"and beside it")
    return "said"


def count(task, note):
    for n in range(task):
        note(n)
    return task


def imported(task, note):
    import beside_the_test

    return beside_the_test.VALUE


def test_answers_come_in_order_from_one_process(child):
    first, second = ran(child, 0, 0, what=pid_of)
    assert first == second != TaskDone(os.getpid())
    assert ran(child, 1, 2, 3) == [TaskDone(2), TaskDone(4), TaskDone(6)]


def test_what_raises_keeps_its_traceback_and_the_child(child):
    (pid,) = ran(child, 0, what=pid_of)
    (failed,) = ran(child, "raise")
    assert isinstance(failed, TaskFailed) and failed.error == "ValueError: no good" and "in work" in failed.trace
    assert ran(child, 0, what=pid_of) == [pid]


def test_a_crash_costs_its_task_and_says_how_far_it_was(child):
    assert ran(child, 1, "die", 3) == [TaskDone(2), TaskLost("the process died with SIGKILL", 7), TaskDone(6)]


def test_a_hang_of_a_subprocess_ends_at_the_limit(child):
    assert ran(child, 1) == [TaskDone(2)]  # it has started
    start = time.monotonic()
    assert ran(child, "hang", limit=0.5) == [TaskLost("no answer within 0.5 s", 7)]
    assert time.monotonic() - start < 20
    assert ran(child, 4) == [TaskDone(8)]


def test_the_limit_of_a_subprocess_is_from_one_note_to_the_next(child):
    assert ran(child, 0.4, limit=1.2, what=slow_but_alive) == [TaskDone("done")]


def test_what_eats_memory_is_ended(child, monkeypatch):
    assert ran(child, 1) == [TaskDone(2)]  # it has started
    monkeypatch.setattr(worker_pool, "MEMORY", worker_pool.private_memory(child._workers[0].process.pid) + (64 << 20))
    (lost,) = ran(child, 256 << 20, what=hoard)
    assert lost.why == f"it used more than {worker_pool.MEMORY >> 20} MiB" and lost.noted == 1


def test_ten_megabytes_go_and_come_back(child):
    x = torch.arange(10 << 20, dtype=torch.int64).to(torch.uint8)
    (answer,) = ran(child, x, what=big)
    assert torch.equal(answer.value, x.flip(0))


def test_many_notes_are_no_answer(child):
    assert ran(child, 20_000, what=count) == [TaskDone(20_000)]


def test_what_a_task_prints_is_no_answer(child):
    assert ran(child, 0, what=talks) == [TaskDone("said")]


@pytest.mark.slow
def test_the_path_is_where_modules_are_found_and_no_one_is_left_behind(tmp_path):
    (tmp_path / "beside_the_test.py").write_text("VALUE = 7\n")
    with SubprocessPool([str(tmp_path)]) as child:
        assert ran(child, 0, what=imported) == [TaskDone(7)]
        pid = child._workers[0].process.pid
    assert not alive([pid])


@pytest.mark.slow
def test_a_child_that_somebody_killed_between_two_tasks_costs_nothing(child):
    assert ran(child, 1) == [TaskDone(2)]
    child._workers[0].process.kill()
    child._workers[0].process.wait()
    assert ran(child, 1, 2) == [TaskDone(2), TaskDone(4)]


@pytest.mark.slow
def test_serving_is_all_of_it_in_one_call_and_in_any_thread(tmp_path):
    sent = pickling.dumps((work, [1, "raise", 2], 60.0, (str(tmp_path),)))
    validated = []
    thread = threading.Thread(target=lambda: validated.extend(pickling.loads(run_in_subprocess(sent))))
    thread.start()
    thread.join(120)
    assert [type(a) for a in validated] == [TaskDone, TaskFailed, TaskDone]


ORPHAN = """
import os
from strategies.base.worker_pool import SubprocessPool
from tests.strategies.base.test_worker_pool import pid_of

child = SubprocessPool()
print(*[a.value for a in child.run(pid_of, [0], limit=60.0)], flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_child_ends_when_its_parent_is_killed():
    root = Path(__file__).parents[3]
    parent = warm.run([sys.executable, "-c", ORPHAN], cwd=root)
    (pid,) = parent.stdout.split()
    deadline = time.monotonic() + 10
    while alive([pid]):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.05)
    assert parent.returncode == -signal.SIGKILL

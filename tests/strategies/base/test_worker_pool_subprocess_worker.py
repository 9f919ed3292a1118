import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from localtensor._util import pickling
from strategies.base import worker_pool
from strategies.base.worker_pool import SubprocessPool, TaskDone, TaskFailed, TaskLost, run_in_subprocess
from tests.strategies.base.test_worker_pool import alive, hoard, pid_of, work


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


def slow_but_alive(task, note):
    """Longer than the limit in all, but never without a word for so long."""
    for n in range(4):
        note(n)
        threading.Event().wait(task)
    return "done"


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


def test_a_hang_ends_at_the_limit(child):
    assert ran(child, 1) == [TaskDone(2)]  # it has started
    start = time.monotonic()
    assert ran(child, "hang", limit=0.5) == [TaskLost("no answer within 0.5 s", 7)]
    assert time.monotonic() - start < 20
    assert ran(child, 4) == [TaskDone(8)]


def test_the_limit_is_from_one_note_to_the_next(child):
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


def test_the_path_is_where_modules_are_found_and_nobody_is_left_behind(tmp_path):
    (tmp_path / "beside_the_test.py").write_text("VALUE = 7\n")
    with SubprocessPool([str(tmp_path)]) as child:
        assert ran(child, 0, what=imported) == [TaskDone(7)]
        pid = child._workers[0].process.pid
    assert not alive([pid])


def test_a_child_that_somebody_killed_between_two_tasks_costs_nothing(child):
    assert ran(child, 1) == [TaskDone(2)]
    child._workers[0].process.kill()
    child._workers[0].process.wait()
    assert ran(child, 1, 2) == [TaskDone(2), TaskDone(4)]


def test_serving_is_all_of_it_in_one_call_and_in_any_thread(tmp_path):
    sent = pickling.dumps((work, [1, "raise", 2], 60.0, (str(tmp_path),)))
    heard = []
    thread = threading.Thread(target=lambda: heard.extend(pickling.loads(run_in_subprocess(sent))))
    thread.start()
    thread.join(120)
    assert [type(a) for a in heard] == [TaskDone, TaskFailed, TaskDone]


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
    parent = subprocess.run([sys.executable, "-c", ORPHAN], cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    (pid,) = parent.stdout.split()
    deadline = time.monotonic() + 10
    while alive([pid]):
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.05)
    assert parent.returncode == -signal.SIGKILL

"""localtensor.torch_suites.rank_run: a rank thread that ends as a process would."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from localtensor import run
from localtensor.torch_suites.rank_run import RankKilled, RankProcess, as_processes, exit_code


@pytest.mark.parametrize(("end", "code"), [
    (lambda: os._exit(3), 3),
    (lambda: os.abort(), -6),  # noqa: PLW0108  # looked up when it is called
    (lambda: os.kill(os.getpid(), signal.SIGTERM), -15),
    (lambda: signal.raise_signal(signal.SIGINT), -2),
])  # fmt: skip
def test_what_ends_a_process_ends_only_the_rank(end, code):
    def rank():
        try:
            end()
        except Exception:  # why: a program may catch all that it can
            return "caught"
        except RankKilled as killed:
            return killed.code

    with as_processes():
        assert run(rank, ranks=2).values == (code, code)


def test_each_rank_has_a_process_number_and_none_is_the_systems():
    with as_processes():
        numbers = run(os.getpid, ranks=3).values
        assert len({*numbers, os.getpid()}) == 4 and min(numbers) > 2**22
        os.kill(os.getpid(), 0)


def test_a_rank_that_sleeps_lets_the_others_run():
    seen = []

    def waits_for_rank_1():
        while dist.get_rank() == 0 and not seen:
            time.sleep(0)
        seen.append(dist.get_rank())

    with as_processes():
        run(waits_for_rank_1, ranks=2, timeout=20)
    assert seen == [1, 0]


def test_a_stand_in_for_a_process_has_ended_and_harms_no_one():
    process = RankProcess(2)
    process.start()
    process.terminate()
    process.send("Traceback")
    assert (process.is_alive(), process.exitcode, process.recv(), process.poll()) == (False, None, "Traceback", True)
    with pytest.raises(TypeError):
        os.kill(process.pid, 9)


def test_exit_codes_are_those_of_a_process():
    assert [exit_code(SystemExit(*said)) for said in ((), (86,), ("a sentence",))] == [0, 86, 1]

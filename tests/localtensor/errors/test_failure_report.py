import pytest
import torch
import torch.distributed as dist

from localtensor import run
from localtensor._util.events import Call, Place, Raised, Wait, Waiting
from localtensor.errors import LocalTensorError, RankRaised
from localtensor.errors.failure_report import WIDTH, failure_text, last_call_lines

REPLAY = "pytest test_a.py::test_sum --rank-schedule 'random(3)'"
HERE = Place("test_a.py", 7, "test_sum")
THERE = Place("test_a.py", 9, "test_sum")


def report(raised, ranks, passed=None, places=None, **others):
    """The lines before the replay line, of ranks that raised as given."""
    fault = RankRaised(raised, places=places or {one.rank: HERE for one in raised}, **others)
    *lines, replay = failure_text(fault, ranks, REPLAY, passed).splitlines()
    assert replay == f"Replay: {REPLAY}"
    return lines


def compared(rank, text):
    return Raised(rank, "AssertionError", text, "")


def call(rank, number, kind="all_reduce", ranks=(0, 1)):
    return Call(rank, kind, "0", ranks, number, ("f32[2]",), op="sum", place=HERE)


def fault_of(program, ranks):
    with pytest.raises(LocalTensorError) as caught:
        run(program, ranks=ranks)
    return caught.value


def test_ranks_that_agree_with_the_first_cause_are_named_and_share_its_line():
    assert report([compared(rank, "assert 3 == 6") for rank in (2, 0, 1)], 3) == [
        "First cause: rank 2 of 3, at test_a.py:7 in test_sum; ranks 0, 1 agree",
        "  ranks 0, 1, 2: assert 3 == 6",
    ]


def test_what_each_rank_compared_stands_with_it_and_the_rarest_comes_right_after_the_first_cause():
    values = {3: 1, 0: 5, 1: 5, 2: 4}
    assert report([compared(rank, f"assert {value} == 6") for rank, value in values.items()], 4) == [
        "First cause: rank 3 of 4, at test_a.py:7 in test_sum",
        "  rank 3: assert 1 == 6",
        "  rank 2: assert 4 == 6",
        "  ranks 0, 1: assert 5 == 6",
    ]


def test_the_same_words_from_another_line_or_of_another_kind_do_not_agree():
    raised = [compared(0, "no"), compared(1, "no"), Raised(2, "ValueError", "no", "")]
    assert report(raised, 3, places={0: HERE, 1: THERE, 2: HERE}) == [
        "First cause: rank 0 of 3, at test_a.py:7 in test_sum",
        "  rank 0: no",
        "  rank 1: no, at test_a.py:9 in test_sum",
        "  rank 2: ValueError: no",
    ]


def test_ranks_that_passed_wait_or_were_ended_are_distinguished():
    waiting = [Wait(rank, (0,), call(rank, 2, ranks=tuple(range(6)))) for rank in (1, 2)]
    lines = report([compared(0, "assert 0")], 6, waiting=waiting, busy=[Waiting(3, "test_a.py:8")])
    assert lines[2:] == [
        "  ranks 4, 5: passed",
        "  ranks 1, 2 wait for rank 0 in all_reduce #2 in group 0 at test_a.py:7 in test_sum",
        "  rank 3 was at test_a.py:8",
    ]


def test_what_ranks_compared_where_the_assertion_went_through_is_reported_if_somebody_saw_it():
    lines = report([compared(0, "assert 5 == 6")], 4, passed={1: "6 == 6", 2: "\x1b[94m6\x1b[39m == 6"})
    assert lines[2:] == ["  rank 3: passed", "  ranks 1, 2: passed: 6 == 6"]
    lines = report([compared(0, "assert 5 == 6")], 2, passed={1: "6 == 6"}, waiting=[Wait(1, (0,), call(1, 0))])
    assert lines[2:] == [
        "  rank 1: passed: 6 == 6",
        "  rank 1 waits for rank 0 in all_reduce #0 in group 0 at test_a.py:7 in test_sum",
    ]


def test_of_a_long_message_the_others_tell_only_the_lines_that_the_first_cause_does_not_have():
    message = "Tensor-likes are not close!\n\nMismatched elements: {} / 4\nGreatest absolute difference: 1.0"
    assert report([compared(rank, message.format(rank + 1)) for rank in range(2)], 2)[1:] == [
        "  rank 0: Tensor-likes are not close!",
        "      Mismatched elements: 1 / 4",
        "      Greatest absolute difference: 1.0",
        "  rank 1: Mismatched elements: 2 / 4",
    ]


def test_colours_and_advice_of_pytest_are_left_out():
    text = "assert \x1b[94m1\x1b[39;49;00m == 2\n  \n  Full diff:\n  Use -v to get more diff"
    assert report([compared(0, text)], 1)[1:] == ["  rank 0: assert 1 == 2"]


def test_ranks_that_hold_alike_objects_at_other_addresses_agree():
    raised = [
        compared(rank, f"assert 3 == 6\n +  where 3 = <method of Tensor at 0x7f99d12bc{rank}60>()") for rank in (0, 1)
    ]
    assert report(raised, 2) == [
        "First cause: rank 0 of 2, at test_a.py:7 in test_sum; rank 1 agrees",
        "  ranks 0, 1: assert 3 == 6",
        "       +  where 3 = <method of Tensor at 0x...>()",
    ]


def test_an_exception_without_words_is_reported_by_its_kind():
    assert report([compared(0, "")], 1)[1:] == ["  rank 0: AssertionError"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 11, 14, 256])
def test_the_report_stays_short_however_many_ranks_fail_each_in_its_own_way(ranks):
    stories = [compared(rank, f"assert {rank} == -1\n" + f"and {rank} " * 50 + "\nmore" * 30) for rank in range(ranks)]
    log = [call(rank, number, kind=f"step{rank % 9}") for number in range(9) for rank in range(ranks)]
    fault = RankRaised(stories, places=dict.fromkeys(range(ranks), HERE))
    fault.log = tuple(log)
    lines = failure_text(fault, ranks, REPLAY).splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= WIDTH
    assert all(any(f"rank {rank}: assert {rank} == -1" in line for line in lines) for rank in range(min(ranks, 10)))
    left = [line for line in lines if "other ways to fail" in line]
    assert left == ([f"  and {ranks - 10} other ways to fail, on ranks 10-{ranks - 1}"] if ranks > 11 else [])


def test_the_last_collectives_are_reported_in_order_and_ranks_that_did_the_same_share_a_line():
    log = [call(rank, number) for number in range(9) for rank in (1, 0)] + [call(0, 9, kind="barrier")]
    heading, *lines = last_call_lines(log)
    assert heading == "Last collectives:"
    assert [line.partition(" of ")[0] for line in lines] == [
        *(f"  ranks 0, 1: all_reduce #{number}" for number in (5, 6, 7, 8)),
        "  rank 0: barrier #9",
    ]


def test_no_collective_no_heading():
    assert last_call_lines([]) == []


def disagree():
    rank = dist.get_rank()
    total = torch.tensor(rank)
    dist.all_reduce(total)
    if rank != 1:
        assert total == 6, f"{total.item()} is not 6"
    if rank == 1:
        pytest.fail("by hand")
    dist.barrier()


def test_a_real_failure_names_the_lines_of_the_test_and_not_those_of_pytest():
    fault = fault_of(disagree, 3)
    first = disagree.__code__.co_firstlineno
    lines = failure_text(fault, 3, REPLAY).splitlines()
    assert lines[0] == f"First cause: rank 2 of 3, at test_failure_report.py:{first + 5} in disagree; rank 0 agrees"
    assert lines[1] == "  ranks 0, 2: 3 is not 6"
    assert f"  rank 1: Failed: by hand, at test_failure_report.py:{first + 7} in disagree" in lines
    assert lines[-3] == "Last collectives:" and lines[-2].startswith("  ranks 0, 1, 2: all_reduce #0 of i64[]")
    assert lines[-1] == f"Replay: {REPLAY}"


def never_meet():
    dist.barrier()
    dist.recv(torch.zeros(1), src=1 - dist.get_rank())


def other_kinds():
    dist.barrier()
    dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(1))


def test_of_another_fault_only_what_its_own_text_does_not_say():
    stuck, mixed = fault_of(never_meet, 2), fault_of(other_kinds, 2)
    assert failure_text(stuck, 2, REPLAY).splitlines()[0] == "Last collectives:"
    calls = [line.partition(": ")[2].split()[0] for line in failure_text(stuck, 2, REPLAY).splitlines()[1:-1]]
    assert calls == ["barrier", "recv", "recv"]
    assert "Last collectives:" in str(mixed)
    assert failure_text(mixed, 2, REPLAY) == f"Replay: {REPLAY}"


def test_where_nothing_can_be_replayed_no_line_says_so():
    assert failure_text(LocalTensorError("broken"), 2, "") == ""

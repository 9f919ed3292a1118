"""What a real run would not tell, word for word: who waits for whom, at which line, and what to do."""

from dataclasses import dataclass

import pytest

from localtensor import errors
from localtensor._util.events import Call, Place, Raised, Wait
from localtensor.errors.programs import _find_cycle as circle

HERE, THERE = Place("project/a.py", 3, "f"), Place("project/a.py", 9, "g")


def call(rank, **facts):
    own = {"kind": "all_reduce", "group_name": "0", "group": (0, 1, 2), "number": 4, "tensors": ("f32[8]",)}
    return Call(rank, **{**own, "device": "cpu", "place": HERE, **facts})


def message(rank, kind, peer, **facts):
    return call(rank, kind=kind, peer=peer, **{"number": 0, "tag": 0, **facts})


@dataclass
class Case:
    error: errors.ProgramFault
    message: str
    places: tuple[Place, ...] = (HERE,)
    ranks: tuple[int, ...] = (0,)


CASES = {
    "early return": Case(errors.EarlyReturn([Wait(0, (1,), call(0)), Wait(2, (1,), call(2))], {1: THERE}),
        "rank 1 returned while ranks 0, 2 wait for it: a rank must take part in every collective that "
        "its groups call. Look for a return, a break or a branch that depends on the rank, and make the call on "
        "every rank.\n"
        "  rank 1 returned, last seen at a.py:9 in g\n"
        "  ranks 0, 2 wait for rank 1 in all_reduce #4 in group 0 at a.py:3 in f",
        places=(THERE, HERE),
        ranks=(1, 0, 2)),
    "early return of ranks never seen": Case(errors.EarlyReturn([Wait(0, (1, 2), call(0))], {1: None, 2: None}),
        "ranks 1, 2 returned while rank 0 waits for them: a rank must take part in every collective "
        "that its groups call. Look for a return, a break or a branch that depends on the rank, and make the "
        "call on every rank.\n"
        "  ranks 1, 2 returned, last seen in no call\n"
        "  rank 0 waits for ranks 1, 2 in all_reduce #4 in group 0 at a.py:3 in f",
        ranks=(1, 2, 0)),
    "deadlock": Case(errors.Deadlock([
            Wait(2, (0, 1), call(2)),
            Wait(1, (0,), message(1, "recv", 0, place=THERE)),
            Wait(0, (1,), message(0, "recv", 1, place=THERE)),
        ]),
        "ranks 0, 1, 2 wait: no rank can go on, they wait for each other in a circle: 0 -> 1 -> 0. Let "
        "one of the ranks send before it receives.\n"
        "  rank 0 waits for rank 1 in recv #0 from 1 at a.py:9 in g\n"
        "  rank 1 waits for rank 0 in recv #0 from 0 at a.py:9 in g\n"
        "  rank 2 waits for ranks 0, 1 in all_reduce #4 in group 0 at a.py:3 in f",
        places=(THERE, HERE),
        ranks=(0, 1, 2)),
    "deadlock without a circle": Case(errors.Deadlock([Wait(0, (5,), message(0, "recv", 5, tag=7))]),
        "rank 0 waits: no rank can go on. Let the ranks that are waited for make the call too.\n"
        "  rank 0 waits for rank 5 in recv #0 from 5 with tag 7 at a.py:3 in f"),
    "not waited": Case(errors.WorkNotWaited([call(0), call(1)]),
        "all_reduce #4 in group 0: async_op: not waited for on ranks 0, 1: the function returned while its "
        "output may still be on the way. Keep the Work that the call returns, and call its wait() before the "
        "output is read.\n"
        "  ranks 0, 1: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f",
        ranks=(0, 1)),
    "not waited, several": Case(errors.WorkNotWaited([call(0), call(0, number=5, place=THERE)]),
        "all_reduce #4 in group 0 and others: async_op: not waited for on rank 0: the function returned while "
        "its output may still be on the way. Keep the Work that the call returns, and call its wait() before the "
        "output is read.\n"
        "  rank 0: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f\n"
        "  rank 0: all_reduce #5 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:9 in g",
        places=(HERE, THERE)),
    "read": Case(errors.ReadBeforeWait(call(0), "aten.add.Tensor", THERE),
        "all_reduce #4 in group 0: output: read by aten.add.Tensor on rank 0 at a.py:9 in g: until wait() it may "
        "hold the old numbers, the new ones or some of both. Call wait() on the Work that the call returned "
        "before this line.\n"
        "  rank 0: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f",
        places=(THERE, HERE)),
    "read, nobody knows where": Case(errors.ReadBeforeWait(call(0), "aten.add.Tensor", None),
        "all_reduce #4 in group 0: output: read by aten.add.Tensor on rank 0: until wait() it may hold the old "
        "numbers, the new ones or some of both. Call wait() on the Work that the call returned before this line.\n"
        "  rank 0: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f"),
    "written": Case(errors.BufferReused(call(0), "aten.add_.Tensor", THERE),
        "all_reduce #4 in group 0: buffer: written by aten.add_.Tensor on rank 0 at a.py:9 in g: until wait() "
        "the collective may still read it, or write to it. Call wait() before the tensor is written, or pass the "
        "call a clone.\n"
        "  rank 0: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f",
        places=(THERE, HERE)),
    "found changed": Case(errors.BufferReused(call(0), None, THERE),
        "all_reduce #4 in group 0: buffer: found changed on rank 0 at its wait at a.py:9 in g: until wait() the "
        "collective may still read it, or write to it. Call wait() before the tensor is written, or pass the "
        "call a clone.\n"
        "  rank 0: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f",
        places=(THERE, HERE)),
    "messages": Case(errors.MessagesLeftOver([message(0, "send", 1, tag=2), message(1, "recv", 0, tag=3, place=THERE)]),
        "send #0 to 1 with tag 2 and others: peer: never met on ranks 0, 1: a send meets the recv of the rank "
        "that it names, in the same group and with the same tag. Make the other half of each call on the rank "
        "that it names, or leave the call out.\n"
        "  rank 0: send #0 of f32[8] on cpu, peer=1, tag=2, in group 0 (ranks 0, 1, 2), at a.py:3 in f\n"
        "  rank 1: recv #0 of f32[8] on cpu, peer=0, tag=3, in group 0 (ranks 0, 1, 2), at a.py:9 in g\n"
        "  rank 0's send and rank 1's recv differ in their tags 2 and 3",
        places=(HERE, THERE),
        ranks=(0, 1)),
    "groups": Case(errors.GroupsLeftOver({"1": (0, 1), "2": (0, 1, 2, 3)}, [0, 1], {"2": THERE}),
        "new_group: group: groups 1, 2 on ranks 0, 1: made by the function, and still there when it returned. "
        "Call torch.distributed.destroy_process_group(group) on each rank that made it.\n"
        "  group 1 of ranks 0, 1\n"
        "  group 2 of ranks 0-3 at a.py:9 in g",
        places=(THERE,),
        ranks=(0, 1)),
    "one group": Case(errors.GroupsLeftOver({"1": (0, 1)}, [0], {"1": HERE}),
        "new_group: group: group 1 on rank 0: made by the function, and still there when it returned. Call "
        "torch.distributed.destroy_process_group(group) on each rank that made it.\n"
        "  group 1 of ranks 0, 1 at a.py:3 in f"),
    "disagree": Case(errors.RanksDisagree("loss", {0: "1.0", 1: "2.0", 2: "1.0"}, {0: HERE, 1: THERE, 2: HERE}),
        "assert_same_on_all_ranks: loss: 2.0 on rank 1, 1.0 on ranks 0, 2: the ranks disagree. Compute it from "
        "what all ranks share: the same seed, the same input, or a broadcast from one rank.\n"
        "Likely culprit: rank 1; ranks 0, 2 agree.\n"
        "  rank 1: 2.0 at a.py:9 in g\n"
        "  ranks 0, 2: 1.0 at a.py:3 in f",
        places=(THERE, HERE),
        ranks=(1, 0, 2)),
    "disagree, and how": Case(errors.RanksDisagree("loss", {0: "1.0", 1: "2.0"}, {}, "first at [3]"),
        "assert_same_on_all_ranks: loss: 1.0 on rank 0, 2.0 on rank 1: the ranks disagree, first at [3]. Compute "
        "it from what all ranks share: the same seed, the same input, or a broadcast from one rank.\n"
        "  rank 0: 1.0\n"
        "  rank 1: 2.0",
        places=(),
        ranks=(0, 1)),
    "raised": Case(errors.RankRaised(
            [Raised(2, "ValueError", "boom", "tb"), Raised(3, "KeyError", "'a'", "tb"), Raised(1, "KeyError", "'a'", "tb")],
            [Wait(0, (1, 2), call(0))],
            {2: THERE},
        ),
        "run: rank 2: ValueError: boom at a.py:9 in g: this is the first rank that raised, and rank 0 waits for "
        "others since. Repair this line first: what the other ranks say may only be its echo.\n"
        "  ranks 1, 3: KeyError: 'a'\n"
        "  rank 0 waits for ranks 1, 2 in all_reduce #4 in group 0 at a.py:3 in f",
        places=(THERE, HERE),
        ranks=(2, 1, 3, 0)),
    "failed": Case(errors.CollectiveFailed([call(0), call(1)], "all_reduce: op: 'max' of c64: no such. Pass x.abs()."),
        "all_reduce #4 in group 0: tensors: of ranks 0, 1: all ranks have arrived, and what they bring is "
        "refused. all_reduce: op: 'max' of c64: no such. Pass x.abs().\n"
        "  ranks 0, 1: all_reduce #4 of f32[8] on cpu, in group 0 (ranks 0, 1, 2), at a.py:3 in f",
        ranks=(0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_fault_word_for_word(name):
    assert str(CASES[name].error) == CASES[name].message


@pytest.mark.parametrize("name", CASES)
def test_a_fault_names_its_lines_and_ranks_the_culprits_first(name):
    assert (CASES[name].error.places, CASES[name].error.ranks) == (CASES[name].places, CASES[name].ranks)


def test_every_fault_has_its_words_tested():
    public = {
        kind for kind in vars(errors).values() if getattr(kind, "__module__", "") == "localtensor.errors.programs"
    }
    compared = {errors.Diverged, errors.NotComparable}  # their words: tests/localtensor/testing/compare
    of_graphs = {errors.NotCheckable}  # its words: tests/localtensor/testing/test_graph_check.py
    assert public - compared - of_graphs == {type(case.error) for case in CASES.values()}


def test_a_circle_is_found_wherever_it_is_and_begins_at_its_lowest_rank():
    assert circle({0: {1}, 1: {0}}) == (0, 1)
    assert circle({0: {3}, 3: {2}, 2: {1}, 1: {3}}) == (1, 3, 2)
    assert circle({0: {1, 2}, 1: {9}, 2: {0}}) == (0, 2)
    assert circle({4: {4}}) == (4,)


def test_without_a_circle_there_is_none():
    assert circle({}) == ()
    assert circle({0: {1}, 1: {2}, 2: {3}, 5: set()}) == ()


def test_a_long_circle_is_cut_and_kept_whole_in_the_error():
    ring = [Wait(rank, ((rank + 1) % 40,), message(rank, "recv", (rank + 1) % 40)) for rank in range(40)]
    error = errors.Deadlock(ring)
    first, *lines = str(error).splitlines()
    assert ": 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 7 -> 8 -> 9 -> 10 -> 11 -> ... -> 0. " in first
    assert len(lines) == 25 and lines[-1] == "  and 16 lines more"
    assert error.circle == tuple(range(40)) and error.waits == tuple(ring)


@pytest.mark.parametrize(("kinds", "remedy"), [
    (("recv", "irecv"), "Let one of the ranks send before it receives."),
    (("send", "send"), "Let one of the ranks receive before it sends, or start both by batch_isend_irecv and wait for them after."),
    (("send", "recv"), "Put the sends, receives and collectives of these ranks into one order, in which each meets its other half."),
    (("recv", "all_reduce"), "Put the sends, receives and collectives of these ranks into one order, in which each meets its other half."),
    (("all_reduce", "all_gather"), "Call the collectives of all groups in one order on every rank."),
    (("store.wait('key')", "barrier"), "Let the rank that sets the key do it before its own call, which waits for the rank that needs the key."),
    (("symm_mem.barrier", "symm_mem.wait_signal(channel=0)"), "Let one of the ranks put its signal before it waits for the other's."),
    (("all_reduce", "symm_mem.wait_signal(channel=0)"), "Let the rank that puts the signal do it before its own call, which waits for the rank that needs the signal."),
])  # fmt: skip
def test_the_way_out_of_a_deadlock_depends_on_its_calls(kinds, remedy):
    waits = [
        Wait(rank, (1 - rank,), call(rank, kind=kind, peer=1 - rank if kind in ("send", "recv", "irecv") else None))
        for rank, kind in enumerate(kinds)
    ]
    assert str(errors.Deadlock(waits)).splitlines()[0].endswith(f"in a circle: 0 -> 1 -> 0. {remedy}")


def test_only_those_who_are_waited_for_are_said_to_have_returned_early():
    error = errors.EarlyReturn([Wait(0, (1,), call(0))], {1: THERE, 2: HERE})
    assert error.ranks == (1, 0) and error.returned == {1: THERE, 2: HERE}
    assert errors.EarlyReturn([Wait(0, (3,), call(0))], {1: THERE}).ranks == (1, 0)


def test_halves_that_name_each_other_are_distinguished_by_tag_and_group():
    other = message(1, "recv", 0, tag=2, group_name="5")
    said = str(errors.MessagesLeftOver([message(0, "send", 1, tag=1), other])).splitlines()[-1]
    assert said == "  rank 0's send and rank 1's recv differ in their groups 0 and 5 and tags 1 and 2"
    assert "differ" not in str(errors.MessagesLeftOver([message(0, "send", 1), message(1, "recv", 2, tag=5)]))


def test_nine_groups_are_eight_and_others():
    error = errors.GroupsLeftOver({str(n): (0,) for n in range(9)}, [0], {})
    assert "group: groups 0, 1, 2, 3, 4, 5, 6, 7 and others on rank 0: " in str(error)


def test_an_exception_of_many_lines_is_reported_in_one():
    error = errors.RankRaised([Raised(0, "RuntimeError", "\nboom\nand more", "tb"), Raised(1, "KeyError", "", "tb")])
    assert str(error).splitlines()[1:] == ["  rank 1: KeyError"]
    assert str(error).startswith("run: rank 0: RuntimeError: boom: this is the first rank that raised. ")
    assert error.raised[0].message == "\nboom\nand more"

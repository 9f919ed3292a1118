import random
import subprocess
import sys
import timeit
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localtensor.concurrency.schedule import MOST_TEXT, RecordedSchedule, pct, replay, round_robin, shuffled
from localtensor.errors import BadSchedule, ReplayDiverged
from localtensor.testing import check_schedule

POLICIES = ["round_robin", "shuffled:42", "shuffled:18446744073709551615", "pct:7", "pct:7:20:50"]
WIDE = range(10**6)  # a million ranks that can run


@st.composite
def programs(draw, max_questions=400):
    """A number of ranks, and questions: which of these ranks?  or a number below this?"""
    ranks, count = draw(st.integers(1, 300)), draw(st.integers(0, max_questions))
    rng = random.Random(draw(st.integers(0, 99)))  # hundreds of draws of Hypothesis's own would take seconds
    questions = []
    for _ in range(count):
        able = sorted(rng.sample(range(ranks), rng.randint(1, min(ranks, 6))))
        questions.append(able if rng.random() < 0.8 else rng.randint(1, 12))
    return ranks, questions


def ask(schedule, questions):
    current, answers = None, []
    for question in questions:
        if isinstance(question, int):
            answers.append(schedule.number(question))
        else:
            current = schedule.next(question, current)
            answers.append(current)
    return answers


def run(schedule, program):
    ranks, questions = program
    schedule.begin(ranks)
    return ask(schedule, questions)


# -- laws


@pytest.mark.parametrize("policy", POLICIES)
@given(program=programs())
def test_the_text_of_a_run_repeats_it_and_the_repeat_has_the_same_text(policy, program):
    schedule = RecordedSchedule(replay(policy)) if policy == "round_robin" else replay(policy)
    answers = run(schedule, program)
    again = replay(schedule.text)
    assert run(again, program) == answers
    assert again.text == schedule.text


@pytest.mark.parametrize("policy", POLICIES)
@given(program=programs(), part=st.floats(0, 1))
def test_a_replay_goes_on_as_the_run_would_have(policy, program, part):
    ranks, questions = program
    cut = int(part * len(questions))
    whole = run(replay(policy), program)
    beginning = RecordedSchedule(replay(policy)) if policy == "round_robin" else replay(policy)
    run(beginning, (ranks, questions[:cut]))
    assert run(replay(beginning.text), program) == whole


@pytest.mark.parametrize("policy", POLICIES)
@given(program=programs())
def test_a_text_is_one_line_that_fits_and_a_shell_leaves_alone(policy, program):
    schedule = RecordedSchedule(replay(policy))
    run(schedule, program)
    assert len(schedule.text) <= MOST_TEXT
    assert set(schedule.text) <= set("abcdefghijklmnopqrstuvwxyz_0123456789:=,@#")


@given(program=programs(60), other=programs(60), seed=st.integers(0, 2**64 - 1))
def test_begin_forgets_the_last_run(program, other, seed):
    schedule = shuffled(seed)
    first = run(schedule, program)
    run(schedule, other)
    assert run(schedule, program) == first


@given(program=programs(), seed=st.integers(0, 2**64 - 1), at=st.integers(0, 399), change=st.integers(1, 299))
def test_a_run_that_answered_otherwise_is_noticed(program, seed, at, change):
    schedule = shuffled(seed)
    answers = run(schedule, program)
    if not answers:
        return
    at %= len(answers)
    ranks, questions = program
    other = [q if not isinstance(q, list) else [(rank + change) % ranks for rank in q] for q in questions[at:]]
    changed = [sorted(q) if isinstance(q, list) else q for q in other]
    again = replay(schedule.text)
    try:
        same = run(again, (ranks, questions[:at] + changed)) == answers
    except ReplayDiverged:
        same = False
    assert same == (run(shuffled(seed), (ranks, questions[:at] + changed)) == answers)


# -- the policies


@pytest.mark.parametrize(("runnable", "current", "want"), [
    ([2, 5], None, 2),
    ([2, 5], 2, 2),
    ([2, 5], 5, 5),
    ([2, 5], 3, 5),
    ([2, 5], 0, 2),
    ([2, 5], 7, 2),
])  # fmt: skip
def test_round_robin_keeps_who_ran_else_takes_the_next_higher(runnable, current, want):
    assert round_robin().next(runnable, current) == want


def test_round_robin_takes_the_first_sender():
    assert round_robin().number(5) == 0


def test_round_robin_does_not_look_at_every_rank():
    """Twice as fast as a walk over a thousand of the million would be at best; by bisection, a thousand times."""
    schedule = round_robin()
    ours = min(timeit.repeat(lambda: schedule.next(WIDE, 999_999), number=20, repeat=3))
    walk = min(timeit.repeat(lambda: 999_999 in list(WIDE[-20_000:]), number=20, repeat=3))
    assert ours < walk / 2


def test_round_robin_remembers_nothing():
    schedule = round_robin()
    run(schedule, (3, [[0, 1, 2], 5] * 50))
    assert schedule.text == "round_robin"
    assert vars(schedule) == {}


def test_shuffled_takes_each_rank_about_as_often():
    schedule = shuffled(0)
    answers = run(schedule, (5, [[0, 2, 3]] * 3000))
    assert {rank: round(answers.count(rank) / 100) for rank in (0, 2, 3)} == {0: 10, 2: 10, 3: 10}


def test_a_seed_that_was_drawn_is_shown_and_draws_differ():
    texts = {maker().text for maker in (shuffled, pct) for _ in range(4)}
    assert len(texts) == 8
    assert {type(replay(text)) for text in texts} == {RecordedSchedule}
    assert {text.split(":")[0] for text in texts} == {"shuffled", "pct"}


@pytest.mark.parametrize("policy", ["shuffled:42", "pct:42:3:20"])
def test_what_a_seed_means_stays_the_same(policy):
    """A text outlives an upgrade, of Python's or of ours.  If this is red, old texts mean other runs."""
    schedule = replay(policy)
    run(schedule, (4, [[0, 1, 2, 3]] * 20 + [9]))
    assert (
        schedule.text
        == {
            "shuffled:42": "shuffled:42=4:2,0,1,0,2x2,3,0,1,0x2,2,0x2,2x2,0,2,3,0,n7",
            "pct:42:3:20": "pct:42:3:20=4:0x14,2,3x5,n8",
        }[policy]
    )


def lost_update(schedule):
    """Whether rank 1's one step fell exactly between rank 0's fifth and sixth of ten."""
    schedule.begin(2)
    left, order, current = [10, 1], [], None
    while any(left):
        current = schedule.next([rank for rank in (0, 1) if left[rank]], current)
        left[current] -= 1
        order.append(current)
    return order.index(1) == 5


def test_pct_finds_a_bug_of_depth_two_as_often_as_its_paper_promises():
    seeds = range(1000)
    found = sum(lost_update(pct(seed, depth=2, steps=11)) for seed in seeds)
    assert found >= len(seeds) / (2 * 11)
    assert not lost_update(round_robin())
    assert sum(lost_update(shuffled(seed)) for seed in seeds) < found


def test_pct_of_depth_one_never_changes_its_mind():
    answers = run(pct(3, depth=1), (4, [[0, 1, 2, 3]] * 500))
    assert len(set(answers)) == 1


def test_pct_runs_the_highest_priority_and_falls_at_most_depth_minus_one_times():
    answers = run(pct(5, depth=4, steps=100), (8, [list(range(8))] * 100))
    assert sum(a != b for a, b in pairwise(answers)) == 3


# -- texts


@pytest.mark.parametrize(
    "text", ["round_robin", "shuffled:42", "pct:7:3:1000", "shuffled:1=2:0x3,n4", "shuffled:1@9#00c0ffee"]
)
def test_a_text_that_has_not_run_reads_as_it_was_written(text):
    schedule = replay(text)
    assert schedule.text == text.partition("@")[0]


def test_settings_left_out_are_the_makers_own():
    assert replay("pct:7").text == pct(7).text == "pct:7:3:1000"
    assert replay("pct:7:4").text == "pct:7:4:1000"
    assert replay("shuffled").text.startswith("shuffled:")


def test_many_turns_in_a_row_take_little_room_and_no_memory():
    schedule = replay("round_robin=2:1x999999999999")
    assert run(schedule, (2, [[0, 1]] * 5)) == [1] * 5
    assert schedule.text == "round_robin=2:1x5"


def test_a_hand_written_list_is_obeyed_then_its_policy_goes_on():
    schedule = replay("round_robin=3:2,0x2,n1")
    assert run(schedule, (3, [[0, 1, 2], [0, 1], [0, 1], 2, [0, 1], [1, 2]])) == [2, 0, 0, 1, 0, 1]


def test_a_hand_written_list_is_obeyed_again_in_the_next_run():
    schedule = replay("round_robin=3:2,0")
    program = (3, [[0, 1, 2]] * 4)
    assert [run(schedule, program), run(schedule, program)] == [[2, 0, 0, 0]] * 2


def test_a_list_that_outgrows_its_text_keeps_it_beside_the_digest():
    schedule = replay("round_robin=3:2,0")
    program = (3, [[0, 1, 2]] + [[n % 3] for n in range(200)])
    answers = run(schedule, program)
    head, _, digest = schedule.text.partition("@")
    assert (head, digest[:4], len(schedule.text)) == ("round_robin=3:2,0", "201#", 30)
    assert run(replay(schedule.text), program) == answers


@pytest.mark.parametrize("over", [0, 1])
def test_a_list_is_in_the_text_as_long_as_there_is_room_for_a_digest_beside_it(over):
    turns = [0, 1] * 100
    listed = "round_robin=2:" + ",".join(map(str, turns))
    listed = listed[: MOST_TEXT - len("@999999999999#1c0ffee5") - 1].rstrip(",")
    answers = [int(answer) for answer in listed.partition(":")[2].split(",")]
    schedule = RecordedSchedule(AsTold([*answers[:-1], 10 ** (1 + over)]))
    schedule.begin(2)
    for _ in answers:
        schedule.next([0, 1], None)
    assert ("#" in schedule.text) == (over == 1)
    assert over or len(schedule.text) == MOST_TEXT - len("@999999999999#1c0ffee5")


class AsTold:
    """A policy that answers from a list."""

    text = "round_robin"

    def __init__(self, answers):
        self.answers = answers

    def begin(self, ranks):
        self.left = iter(self.answers)

    def next(self, runnable, current):
        return next(self.left)


def test_the_diary_of_a_long_run_is_small():
    schedule = shuffled(1)
    run(schedule, (9, [list(range(9))] * 5000))
    assert len(schedule.text) < 30
    assert all(value is None or not hasattr(value, "__len__") for value in vars(schedule).values())


# -- refusals


@pytest.mark.parametrize(("text", "problem"), [
    ("", "it is no POLICY[=RANKS:ANSWERS][@COUNT#DIGEST] of up to 160 characters"),
    ("shuffled:42 ", "it is no POLICY[=RANKS:ANSWERS][@COUNT#DIGEST] of up to 160 characters"),
    ("shuffled:-1", "it is no POLICY[=RANKS:ANSWERS][@COUNT#DIGEST] of up to 160 characters"),
    ("shuffled:1=4:", "it is no POLICY[=RANKS:ANSWERS][@COUNT#DIGEST] of up to 160 characters"),
    ("shuffled:1@9#C0FFEE", "it is no POLICY[=RANKS:ANSWERS][@COUNT#DIGEST] of up to 160 characters"),
    ("shuffled:٤", "it is no POLICY[=RANKS:ANSWERS][@COUNT#DIGEST] of up to 160 characters"),
    ("bounded:0", "it is no bounded[:PLACE:ANSWER]..."),
    ("bounded:0:1=2:0", "it is no bounded[:PLACE:ANSWER]..."),
    ("bounded:7:1:3:0", "its places do not ascend"),
    ("shufled:42", "there is no policy shufled, only round_robin, shuffled, pct"),
    ("round_robin:1", "round_robin takes no settings, not 1 numbers"),
    ("shuffled:1:2", "shuffled takes seed, not 2 numbers"),
    ("pct:1:2:3:4", "pct takes seed, depth, steps, not 4 numbers"),
    ("shuffled:18446744073709551616", "seed has to be a whole number from 0 to 18446744073709551615"),
    ("pct:1:0:1000", "depth has to be a whole number from 1 to 100"),
    ("pct:1:3:0", "steps has to be a whole number from 1 to 1000000000"),
    ("shuffled:1=2:" + "0,1," * 33 + "0", "what stands before the digest has more than 138 characters"),
])  # fmt: skip
def test_a_text_that_cannot_be_read_is_refused(text, problem):
    with pytest.raises(BadSchedule) as refused:
        replay(text)
    assert str(refused.value) == str(BadSchedule(text, problem))


def test_the_refusal_of_a_long_text_is_short():
    with pytest.raises(BadSchedule) as refused:
        replay("x" * 10**6)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "7"])
def test_a_maker_refuses_a_seed_that_no_text_could_hold(seed):
    with pytest.raises(BadSchedule, match="seed has to be a whole number from 0 to 18446744073709551615"):
        shuffled(seed)
    with pytest.raises(BadSchedule, match="seed has to be a whole number from 0 to 18446744073709551615"):
        pct(seed)


def test_what_is_no_text_is_refused():
    with pytest.raises(BadSchedule, match="None"):
        replay(None)


@pytest.mark.parametrize(("text", "program", "problem"), [
    ("round_robin=4:0", (2, []), "the text is of a run of 4 ranks, and this one has 2"),
    ("round_robin=4:0,2", (4, [[0], [0, 1, 3]]), "answer 2 in the text is rank 2, and what can run is 0, 1, 3"),
    ("round_robin=20:19", (20, [list(range(12))]), "answer 1 in the text is rank 19, and what can run is 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"),
    ("round_robin=2:n1", (2, [[0, 1]]), "answer 1 in the text is the number 1, and what can run is 0, 1"),
    ("round_robin=2:1", (2, [7]), "answer 1 in the text is rank 1, and the program asks for a number below 7"),
    ("round_robin=2:0x2,n3", (2, [[0], [0], 3]), "answer 3 in the text is the number 3, and the program asks for a number below 3"),
    ("round_robin@2#c0ffee00", (2, [[0], [1]]), "the digest of the first 2 answers is 26188b56, and the text has c0ffee00"),
])  # fmt: skip
def test_a_program_that_went_another_way_is_told_where(text, program, problem):
    with pytest.raises(ReplayDiverged) as diverged:
        run(replay(text), program)
    assert str(diverged.value) == str(ReplayDiverged(problem))


def test_a_long_run_that_went_another_way_is_noticed_at_its_last_answer():
    rng = random.Random(0)
    questions = [sorted(rng.sample(range(9), 4)) for _ in range(500)]
    schedule = shuffled(3)
    run(schedule, (9, questions))
    again = replay(schedule.text)
    again.begin(9)
    questions[200] = [(rank + 1) % 9 for rank in questions[200]]
    ask(again, questions[:499])
    with pytest.raises(ReplayDiverged, match="the digest of the first 500 answers is "):
        again.next(questions[499], None)


def test_the_number_of_ranks_is_in_the_digest():
    schedule = RecordedSchedule(round_robin())
    run(schedule, (3, [[n % 2] for n in range(200)]))
    with pytest.raises(ReplayDiverged, match="the digest of the first 200 answers is "):
        run(replay(schedule.text), (4, [[n % 2] for n in range(200)]))


# -- the conformance test, and the names of the package


@pytest.mark.parametrize("policy", [*POLICIES, "round_robin@9999#00000000", "pct:1:1"])
def test_each_policy_passes_the_conformance_test(policy):
    check_schedule(lambda: replay(policy), patience=None if policy.startswith("pct") else 200)


def test_unseeded_policies_pass_it_too():
    check_schedule(shuffled)
    check_schedule(pct, patience=None)
    check_schedule(lambda: RecordedSchedule(round_robin()))


def test_schedules_need_no_torch():
    look = "import sys, localtensor.concurrency.schedule, localtensor.testing as t; t.check_schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0

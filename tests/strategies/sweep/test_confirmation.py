import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed.tensor import Replicate, Shard

from localtensor._util import Died
from strategies.model.rule import Call, Leaf, Program
from strategies.model.settings import BadSetting
from strategies.model.verdict import Evidence, Verdict
from strategies.programs.run.rank_run import ProgramRankResult
from strategies.programs.run.real_run import ProgramRealRuns, RunsStopped
from strategies.programs.run.verdict import Confirmation
from strategies.sweep import aggregate, confirmation
from strategies.sweep.confirmation import RealConfirmation, leave_unconfirmed, real_confirmation
from strategies.torch_api.rank_runs import returned_values
from strategies.validation import finding
from strategies.validation.finding import Candidate, RuleOutcome
from tests.strategies.cases import numbers, sample
from tests.strategies.planted_ops import planted
from tests.strategies.validation.test_finding_candidate import instance

WRONG, RIGHT = Confirmation("it is wrong", got="[3]", want="[4]"), Confirmation("", "DTensor's own run is right")


def suspect(ranks=2, columns=6, **more):
    return Candidate(instance(sample("cumprod.default", numbers(4, columns), -1), ranks=ranks, **more))


class Answers:
    """A real_runs that gives these answers, in turn, and notes what it was asked."""

    def __init__(self, *answers):
        self.answers, self.asked, self.expected = list(answers), [], []

    def confirm(self, case, *, expected):
        self.expected.append(expected)
        self.asked.append((case.ranks, case.sample.size))
        return self.answers.pop(0)

    def confirm_program(self, program, *, expected):
        self.expected.append(expected)
        self.asked.append(str(program))
        return self.answers.pop(0)


def settled(todo, *answers, doubted=None):
    real_runs = Answers(*answers)
    found = list(RealConfirmation([real_runs], "gloo", 0, "").settle(todo, set(todo) if doubted is None else doubted))
    assert real_runs.answers == []
    return found, real_runs.asked


def test_what_goes_wrong_for_real_is_unsound_with_what_was_seen():
    ((only,), asked) = settled({"a": [suspect()]}, WRONG)
    found = only.finding
    assert (only.name, only.crash, found.verdict, found.confirmed_on) == ("a", None, Verdict.UNSOUND, "gloo")
    assert found.reason == "it is wrong"
    assert (found.got, found.want, asked) == ("[3]", "[4]", [(2, 24)])
    assert "argument 0, S(1)" in found.picture and "aten.cumprod" in found.script


def test_a_real_run_is_told_what_the_probe_has_found():
    real_runs = Answers(WRONG, WRONG)
    raising = replace(suspect().instance, evidence=Evidence("rank 0 raises ValueError"))
    todo = {"a": [suspect()], "b": [Candidate(raising)]}
    list(RealConfirmation([real_runs], "gloo", 0, "").settle(todo, set(todo)))
    assert real_runs.expected == ["wrong", "rank 0 raises ValueError"]


def test_the_evidence_of_the_probe_stands_in_where_the_real_run_shows_no_values():
    ((only,), _) = settled({"a": [suspect()]}, replace(WRONG, got="", want=""))
    assert (only.finding.got, only.finding.want) == ("[1]", "[2]")


def test_a_case_that_cannot_be_described_is_a_crash_and_the_others_go_on(monkeypatch):
    script = confirmation.case_script

    def broken(case, *more):
        if case.ranks == 2:
            raise ZeroDivisionError("planted")
        return script(case, *more)

    monkeypatch.setattr(confirmation, "case_script", broken)
    (first, second), _ = settled({"a": [suspect()], "b": [suspect(ranks=3)]}, WRONG, WRONG)
    assert first.finding is None and first.crash.error == "ZeroDivisionError: planted" and "broken" in first.crash.trace
    assert second.finding.verdict is Verdict.UNSOUND


def test_cases_are_tried_in_turn_until_one_goes_wrong():
    ((only,), asked) = settled({"a": [suspect(columns=n) for n in (2, 3, 4, 5)]}, RIGHT, WRONG)
    assert (only.finding.elements, asked) == (12, [(2, 8), (2, 12)])


def test_a_suspect_that_no_case_shows_is_suspect_still_and_says_why():
    ((only,), asked) = settled({"a": [suspect(), suspect(3)]}, RIGHT, RIGHT)
    assert (only.finding.verdict, only.finding.confirmed_on, len(asked)) == (Verdict.SUSPECT, None, 2)
    assert only.finding.reason == "wrong (not confirmed: DTensor's own run is right)"


LATER = Confirmation("", "only in processes that have run other calls: it raises", after_others=True)


def test_a_call_that_raises_only_the_second_time_is_a_finding_with_the_call_before():
    ((only,), asked) = settled({"a": [suspect()]}, LATER, Confirmation("", "it raises", refused="ValueError: once"))
    assert asked == [(2, 24), "aten.cumprod.default on (2,): S(1), after a call with (x0, -1)"]
    assert (only.name, only.finding.verdict, only.finding.title) == ("a", Verdict.REFUSED, asked[1])
    assert "ValueError: once" in only.finding.reason and "  # the call before" in only.finding.script


def test_a_call_that_raises_only_after_others_and_not_the_second_time_is_no_finding():
    refused = replace(suspect().instance, verdict=Verdict.REFUSED)
    ((only,), asked) = settled({"a": [Candidate(refused)]}, LATER, RIGHT)
    assert (only, len(asked)) == (RuleOutcome("a", None), 2)


def test_a_result_that_the_ops_own_meta_kernel_makes_otherwise_is_said_without_dtensor():
    ((only,), _) = settled({"a": [Candidate(instance(planted("mislabelled", numbers(4)), "S(0) -> S(0)"))]}, WRONG)
    assert only.finding.reason == (
        "it is wrong; the op's own meta kernel gives torch.float64 of shape (4,) for result 0, which is torch.float64 of"
        " shape (), also without DTensor"
    )
    ((right,), _) = settled({"a": [suspect()]}, WRONG)
    assert right.finding.reason == "it is wrong"
    assert sorted([only.finding, right.finding], key=aggregate._place) == [right.finding, only.finding]


def test_what_the_probe_could_not_judge_is_cleared_by_a_run_that_is_right():
    (found, _) = settled({"a": [suspect(), suspect(3)]}, RIGHT, RIGHT, doubted=set())
    assert found == [RuleOutcome("a", None)]


def test_few_ranks_come_first_over_all_rules_and_a_rule_is_reported_as_soon_as_it_is_known():
    todo = {"a": [suspect(3), suspect(2)], "b": [suspect(2)], "c": [suspect(3), suspect(4)]}
    found, asked = settled(todo, RIGHT, WRONG, WRONG, WRONG)
    assert [ranks for ranks, _ in asked] == [2, 2, 3, 3]
    assert [(s.name, s.finding.ranks) for s in found] == [("b", 2), ("a", 3), ("c", 3)]


def test_the_rest_of_a_run_that_was_stopped_is_settled_in_the_same_order():
    todo = {
        name: [suspect(ranks) for ranks in of] for name, of in {"a": (2, 3), "b": (3,), "c": (2,), "d": (4, 2)}.items()
    }
    whole = [s.name for s in settled(todo, *[RIGHT] * 6)[0]]
    for done in range(4):
        left = {name: cases for name, cases in todo.items() if name not in whole[:done]}
        many = sum(map(len, left.values()))
        assert [s.name for s in settled(left, *[RIGHT] * many)[0]] == whole[done:]


REFUSED = Confirmation("", "DTensor refuses this call on every rank: ValueError: no", refused="ValueError: no")
LOST = replace(REFUSED, rank_results=(ProgramRankResult("full_tensor", ("ValueError: no",) * 2),))
UNCLAIMED = replace(REFUSED, refused="NotImplementedError: aten.x.default has no sharding strategy")


@pytest.mark.parametrize(("outcome", "suspected", "verdict"), [
    (REFUSED, True, Verdict.REFUSED), (REFUSED, False, Verdict.REFUSED), (LOST, True, Verdict.REFUSED),
    (LOST, False, None), (UNCLAIMED, True, Verdict.SUSPECT), (UNCLAIMED, False, None),
])  # fmt: skip
def test_a_legal_call_that_every_rank_refuses_is_a_finding_of_its_own(outcome, suspected, verdict):
    ((only,), _) = settled({"a": [suspect()]}, outcome, doubted=None if suspected else set())
    assert (only.finding and only.finding.verdict) is verdict
    if verdict is Verdict.REFUSED:
        assert only.finding.reason.startswith("every rank raises ValueError: no; the op takes the whole tensors")


def test_a_result_that_does_not_fit_its_own_placement_is_wrong_where_the_probe_found_it_wrong():
    error = "WrongPieceShape: its piece has shape (2,), S(0) of (3,) is (1,)"
    outcome = replace(LOST, refused=error)
    ((only,), _) = settled({"a": [suspect(reason="the shards make 1")]}, outcome)
    assert only.finding.verdict is Verdict.UNSOUND
    assert only.finding.reason == (
        "DTensor's result does not fit its own placement: its piece has shape (2,), S(0) of (3,) is (1,); the shards make 1"
    )
    ((other,), _) = settled({"a": [suspect()]}, outcome, doubted=set())
    assert other.finding is None


def test_a_shape_of_a_piece_is_given_once_as_in_the_call_that_is_shown():
    larger = "every rank raises WrongPieceShape: its piece has shape (5, 2), S(0) of (9,) is (5,); the op takes the whole tensors"
    outcome = replace(LOST, refused="WrongPieceShape: its piece has shape (2,), S(0) of (3,) is (1,)")
    ((only,), _) = settled({"a": [suspect(reason=larger)]}, outcome)
    assert only.finding.reason.endswith("own placement: its piece has shape (2,), S(0) of (3,) is (1,)")


def test_an_average_that_gloo_cannot_make_is_not_made_in_its_place():
    ((only,), _) = settled({"a": [suspect(reason="as P(avg): the parts make 1")]}, LOST)
    assert only.finding.reason.endswith("the op takes the whole tensors; as P(avg): the parts make 1")


def test_a_local_call_that_plain_torch_refuses_is_said_with_its_pieces():
    uneven = Candidate(instance(sample("neg.default", numbers(3, 4)), "S(0) -> S(0)", ranks=4))
    raises = replace(WRONG, wrong="rank 3 raises RuntimeError: no; its peers go on")
    whole = Candidate(instance(sample("fft_fft.default", numbers(3, 4)), "S(0) -> S(0)", ranks=4))
    ((said,), _) = settled({"a": [whole]}, raises)
    assert (
        said.finding.reason
        == f"{raises.wrong}; plain torch refuses the local call of rank 3, fft_fft(f64[0,4]), by itself"
    )
    ((other,), _) = settled({"a": [uneven]}, raises)
    assert other.finding.reason == raises.wrong


def test_the_script_of_a_program_does_the_same_on_the_same_mesh():
    one = sample("cumprod.default", numbers(4, 6), -1)
    program = Program(one, (2, 2), ((Shard(1), Replicate()),), "to (R, S(0))")
    ((only,), _) = settled({"p": [Candidate(instance(one, ranks=4), program)]}, WRONG)
    assert "laid(x, [Replicate(), Shard(0)])" in only.finding.script and "(2, 2)" in only.finding.script
    assert "it is wrong" in only.finding.script and "{name}" in only.finding.script
    assert (only.finding.got, only.finding.want, only.finding.ranks) == ("[3]", "[4]", 4)


def test_a_program_that_cannot_be_written_down_has_a_picture_only(monkeypatch):
    monkeypatch.setattr(confirmation, "is_writable_program", lambda program: False)
    one = sample("cumprod.default", numbers(4, 6), -1)
    program = Program(one, (2,), ((Shard(1),),), "sum")
    ((only,), _) = settled({"p": [Candidate(instance(one), program)]}, WRONG)
    assert only.finding.script == "" != only.finding.picture


@pytest.mark.parametrize("doubted", [True, False])
def test_of_a_program_the_verdicts_are_those_of_a_rule(doubted):
    one = sample("cumprod.default", numbers(4, 6), -1)
    program = Program(one, (2,), ((Shard(1),),), "sum")
    ((only,), _) = settled({"p": [Candidate(instance(one), program)]}, RIGHT, doubted={"p"} if doubted else set())
    assert (only.finding.verdict if only.finding else None) is (Verdict.SUSPECT if doubted else None)


@pytest.mark.parametrize("doubted", [True, False])
def test_a_failure_of_our_own_is_a_crash_and_says_nothing_of_the_rule(doubted):
    failed = Confirmation("", "the trial itself failed", failed="Traceback ...")
    ((only,), _) = settled({"a": [suspect()]}, failed, doubted={"a"} if doubted else set())
    assert (only.crash.op, only.crash.sample) == ("aten.cumprod.default", "aten.cumprod.default(f64[4,6], -1)")
    assert (only.crash.error, only.crash.trace) == ("the trial itself failed", "Traceback ...")
    assert (only.finding.verdict if only.finding else None) is (Verdict.SUSPECT if doubted else None)


def test_a_program_is_run_as_a_program():
    one = sample("cumprod.default", numbers(4, 6), -1)
    program = Program(one, (2, 2), ((Shard(1), Replicate()),), "sum")
    ((only,), asked) = settled({"p": [Candidate(instance(one, ranks=4), program)]}, WRONG)
    assert asked == [str(program)]
    assert (only.finding.title, only.finding.mesh, only.finding.confirmed_on) == (str(program), (2, 2), "gloo")
    assert "argument 0, (S(1), R)\n  rank 0  " in only.finding.picture and "aten.cumprod" in only.finding.script


def test_a_script_is_written_only_where_it_would_show_the_same(monkeypatch):
    monkeypatch.setattr(confirmation, "is_writable_case", lambda case: False)
    ((only,), _) = settled({"a": [suspect()]}, WRONG)
    assert only.finding.script == "" != only.finding.picture


def test_without_confirmation_all_are_suspects():
    found = list(leave_unconfirmed({"b": [suspect(), suspect(3)], "a": [suspect(3)]}))
    assert [(s.name, s.finding.verdict, s.finding.ranks) for s in found] == [
        ("b", Verdict.SUSPECT, 2), ("a", Verdict.SUSPECT, 3),
    ]  # fmt: skip
    assert found[0].finding.reason == "wrong (not confirmed: --confirm none was asked for)"
    assert [finding.read_outcome(finding.outcome_line(s)) for s in found] == found


NO_CALLS = [
    ("aten.nothing.default", (Leaf(0),)),
    ("import_module.__call__.__call__", (Leaf(0),)),
    ("aten.sin.default", ()),
]


def no_case(op, args):
    made = suspect().instance
    one = replace(made.sample, call=Call(op, args, ()))
    return Candidate(replace(made, sample=one, rule=replace(made.rule, op=op)))


@pytest.mark.parametrize(("op", "args"), NO_CALLS)
def test_a_case_of_a_file_that_plain_torch_does_not_take_is_a_crash_and_the_others_go_on(op, args):
    (first, second), asked = settled({"a": [no_case(op, args)], "b": [suspect(ranks=3)]}, WRONG)
    assert (first.finding is None or first.finding.verdict is Verdict.SUSPECT) and first.crash is not None
    assert second.finding.verdict is Verdict.UNSOUND and asked == [(3, 24)]


@pytest.mark.parametrize(("op", "args"), NO_CALLS)
def test_a_case_of_the_command_line_that_is_none_here_is_refused(op, args):
    with pytest.raises(BadSetting, match=r"--case: .*: there is no such case under this torch and these rules"):
        confirmation.check_case(no_case(op, args), 0, "cpu")


# Several rules at one time.


CALLER = ContextVar("CALLER", default="nobody")


class Lane(Answers):
    """Gives each case the same answer, and notes who has the turn while it computes and while ranks are at work."""

    def __init__(self, seen, meet=None):
        super().__init__()
        self.seen, self.meet, self.turn, self.stopped = seen, meet, None, threading.Event()

    def confirm(self, case, *, expected):
        self.seen.append((id(self), CALLER.get(), self.turn.locked()))
        self.turn.release()
        try:
            if self.meet is not None:
                self.meet(self)
        finally:
            self.turn.acquire()
        return WRONG

    def stop(self):
        self.stopped.set()


def names(count):
    return {f"rule {number}": [suspect()] for number in range(count)}


def test_each_lane_has_every_second_rule_in_its_order_and_one_thread_computes_at_a_time():
    seen, told, both = [], [], threading.Barrier(2, timeout=60)
    first, second = lanes = [
        Lane(seen, meet=lambda lane: both.wait()) for _ in range(2)
    ]  # real runs go on beside each other
    session = RealConfirmation(lanes, "gloo", 0, "")
    session.note = told.append
    token = CALLER.set("the caller's")
    found = [outcome.name for outcome in session.settle(names(4), {*names(4)})]
    CALLER.reset(token)
    assert found == [*names(4)] and sorted(told) == [*names(4)]
    assert Counter(seen) == {(id(first), "the caller's", True): 2, (id(second), "the caller's", True): 2}
    assert not session._turn.locked()


@pytest.mark.parametrize(("device", "backend", "lanes"), [("cpu", "gloo", 2), ("cpu", "nccl", 1), ("cuda", "gloo", 1)])
def test_rules_that_share_a_gpu_are_confirmed_one_at_a_time(device, backend, lanes):
    with real_confirmation(SimpleNamespace(device=device, confirm=backend, seed=0), ("", "")) as session:
        assert len(session._lanes) == lanes


def test_what_one_lane_raises_ends_the_real_runs_of_the_other():
    """The second lane waits until it is stopped; the first raises once the second waits."""
    waits = threading.Event()

    def fails(lane):
        assert waits.wait(60)
        raise ZeroDivisionError

    def stays(lane):
        waits.set()
        assert lane.stopped.wait(60)

    lanes = [Lane([], fails), Lane([], stays)]
    with pytest.raises(ZeroDivisionError):
        list(RealConfirmation(lanes, "gloo", 0, "").settle(names(6), {*names(6)}))
    assert lanes[1].stopped.is_set() and len(lanes[1].seen) == 1


def test_a_caller_who_stops_early_ends_the_real_runs():
    waits = threading.Event()
    lanes = [Lane([]), Lane([], lambda lane: (waits.set(), lane.stopped.wait(60)))]
    outcomes = RealConfirmation(lanes, "gloo", 0, "").settle(names(2), {*names(2)})
    assert next(outcomes).name == "rule 0" and waits.wait(60)
    outcomes.close()
    assert lanes[1].stopped.is_set()


def test_processes_that_are_stopped_run_no_more_and_give_the_turn_while_they_work():
    with ProgramRealRuns("gloo") as runs:
        runs.turn = threading.Lock()
        with runs.turn:
            seen = runs.run(echo, ["x", "y"])
            assert returned_values(seen) == ["x", "y"] and runs.turn.locked()
            runs.stop()
            with pytest.raises(RunsStopped):
                runs.run(echo, ["x", "y"])


def echo(sent):
    return sent


def test_ranks_that_are_killed_from_another_thread_have_died():
    with ProgramRealRuns("gloo") as runs:
        runs.run(echo, ["x", "y"])
        with ThreadPoolExecutor(1) as thread:
            stuck = thread.submit(runs.run, stay, ["x", "y"])
            while not stuck.done():
                runs.kill()
        assert all(isinstance(outcome, Died) for outcome in stuck.result())


def stay(sent):
    threading.Event().wait()

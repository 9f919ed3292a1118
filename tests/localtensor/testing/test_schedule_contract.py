import pytest

from localtensor import testing
from localtensor.concurrency.schedule import pct, round_robin, shuffled
from localtensor.testing import check_schedule


class Planted:
    """A right policy, whose methods a test replaces one by one."""

    def __init__(self):
        self.inner = shuffled(1)
        self.asked = 0

    def begin(self, ranks):
        self.asked = 0
        self.inner.begin(ranks)

    def next(self, runnable, current):
        self.asked += 1
        return self.inner.next(runnable, current)

    def number(self, below):
        return self.inner.number(below)

    @property
    def text(self):
        return self.inner.text


def verdict(schedule, **settings):
    with pytest.raises(AssertionError) as failed:
        check_schedule(schedule, **settings)
    return str(failed.value)


class NobodyRuns(Planted):
    def next(self, runnable, current):
        return runnable[-1] + 1


class NotAnInt(Planted):
    def next(self, runnable, current):
        return float(super().next(runnable, current))


class Empties(Planted):
    def next(self, runnable, current):
        return runnable.pop()


class OneTooHigh(Planted):
    def number(self, below):
        return below


class Negative(Planted):
    def number(self, below):
        return -1


class HalfANumber(Planted):
    def number(self, below):
        return super().number(below) / 2


class TwoLines(Planted):
    text = "shuffled:1\n"


class NoText(Planted):
    text = ""


class NotAText(Planted):
    text = None


class Endless(Planted):
    text = "shuffled:1" * 20


class Remembers(Planted):
    def begin(self, ranks):
        if not self.asked:
            self.inner.begin(ranks)


class WrongSeed(Planted):
    @property
    def text(self):
        return "shuffled:2"


class Unreadable(Planted):
    text = "planted"


class Diverges(Planted):
    text = "round_robin=9:0"


class ReadingCounts(Planted):
    @property
    def text(self):
        self.inner.number(2)
        return "shuffled:1"


class Starves(Planted):
    def next(self, runnable, current):
        return min(runnable)

    text = "starves"


@pytest.mark.parametrize(("planted", "want"), [
    (NobodyRuns, "check_schedule: 'shuffled:1': next([0], current=None) answers 1, which is none of those that can run"),
    (NotAnInt, "check_schedule: 'shuffled:1=1:0': next([0], current=None) answers 0.0, which is none of those that can run"),
    (Empties, "check_schedule: 'shuffled:1': next([0], current=None) changed the list to []"),
    (OneTooHigh, "check_schedule: 'shuffled:1': number(below=8) answers 8, which is no int from 0 to 7"),
    (Negative, "check_schedule: 'shuffled:1': number(below=8) answers -1, which is no int from 0 to 7"),
    (HalfANumber, "check_schedule: 'shuffled:1=2:n1': number(below=8) answers 0.5, which is no int from 0 to 7"),
    (TwoLines, "check_schedule: 'shuffled:1\\n': its text 'shuffled:1\\n' is not one printable line"),
    (NoText, "check_schedule: '': its text '' is not one printable line"),
    (NotAText, "check_schedule: 'None': its text None is not one printable line"),
    (Endless, "check_schedule: 'shuffled:1shuffled:1shuffled:1shuffled:1shuffled:1shuffle...': its text has 200 characters, and 160 are the most"),
    (Remembers, "check_schedule: 'shuffled:1=2:n1,1x2,0,n0,1,0,1,0,1,n4,1,n6,0,1,2,n0,1,n7,...': begin does not repeat the run, or reading the text changed it: answer 1 was 1, and is 7 the second time"),
    (WrongSeed, "check_schedule: 'shuffled:2': its text 'shuffled:2' replays another run: answer 1 was 1, and is 7 the second time"),
    (Unreadable, "check_schedule: 'planted': it does not replay: run: schedule: 'planted': there is no policy planted, only round_robin, shuffled, pct. Write round_robin or shuffled:7, or copy the text after 'Replay:' in an error's message whole."),
    (Diverges, "check_schedule: 'round_robin=9:0': it does not replay: run: schedule: a replay: the text is of a run of 9 ranks, and this one has 1. Replay the program, ranks and torch that wrote it, and seed what draws random numbers, reads clocks or walks over sets."),
    (ReadingCounts, "check_schedule: 'shuffled:1': begin does not repeat the run, or reading the text changed it: answer 1 was 6, and is 1 the second time"),
])  # fmt: skip
def test_each_broken_promise_is_named(planted, want):
    assert verdict(planted) == want


def test_a_starved_rank_is_named_unless_the_policy_is_known_to_starve():
    def replay(text):
        return Starves()

    want = "check_schedule: 'starves': rank 4 could run, and was passed over 1000 times in a row"
    assert verdict(Starves, replay=replay) == want
    check_schedule(Starves, patience=None, replay=replay)


def test_pct_starves_and_the_examination_notices():
    assert "passed over 20 times" in verdict(lambda: pct(1, depth=1), patience=20)


def test_patience_is_the_number_of_times_in_a_row():
    want = "check_schedule: 'round_robin': rank 1 could run, and was passed over 1 times in a row"
    assert verdict(round_robin, patience=1) == want


def test_a_right_policy_passes():
    check_schedule(Planted)


def test_the_package_names_what_it_has():
    assert set(testing.__all__) <= set(dir(testing))
    with pytest.raises(AttributeError) as refused:
        testing.check_shedule  # noqa: B018  # the access is the call under test
    assert str(refused.value).startswith("module 'localtensor.testing' has no attribute 'check_shedule'; it has ")

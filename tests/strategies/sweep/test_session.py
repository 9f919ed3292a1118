import json
import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import torch

from localtensor._util.ambient import close_pools
from strategies.base.progress import Progress
from strategies.model.settings import Settings, UnknownOp
from strategies.model.verdict import Verdict
from strategies.sweep.report import text_and_json
from strategies.sweep.session import validate
from strategies.validation.finding import read_case
from tests.strategies import users


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rules")


def run(folder, name, body, progress=None, **given):
    """The report on a module of this body, judged in one process on two ranks and one dtype."""
    users.write(folder, name, body)
    wanted = {"ranks": (2,), "dtypes": ("float64",), "workers": 1, **given}
    with users.undone():
        return validate(Settings(rules=name, folder=str(folder), **wanted), progress)


def lines(report, verdict):
    return [str(f.rule).partition(".")[2] for f in report.findings if f.verdict is verdict]


def family():
    """Processes that descend from this one, but for those that multiprocessing keeps for itself, and zombies."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it is gone by now
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    kept = {os.getpid(), forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    return found - kept


def test_a_file_of_rules_is_judged_its_module_is(folder):
    (inner := folder / "inner").mkdir()
    users.write(inner, "by_file", users.RIGHT_AND_WRONG)
    settings = Settings(
        rules="inner/by_file.py", folder=str(folder), ranks=(2,), dtypes=("float64",), workers=1, confirm="none"
    )
    with users.undone():
        report = validate(settings)
    assert (report.crashed, lines(report, Verdict.SUSPECT)) == ((), ["running.default: S(0) -> S(0)"])


def test_a_name_that_a_module_does_not_register_is_refused_with_those_that_it_has(folder):
    with pytest.raises(
        UnknownOp, match=r"lacks registers no rule of an op of this name\. It registers rules of lacks\.r"
    ):
        run(folder, "lacks", users.RIGHT_AND_WRONG, patterns=("gather",))


def test_of_a_module_only_what_is_named_is_judged(folder):
    report = run(folder, "named_among", users.RIGHT_AND_WRONG, patterns=("twice",))
    assert report.counts.overloads == 1
    assert report.findings == ()
    with pytest.raises(UnknownOp, match=r"named_wrongly\.twice"):
        run(folder, "named_wrongly", users.RIGHT_AND_WRONG, patterns=("named_wrongly.twic",))


@pytest.fixture
def no_process_left():
    close_pools()  # those that other tests of this session have run programs on, and keep
    before = family()
    yield
    assert multiprocessing.active_children() == []
    assert family() <= before


# Verdicts.


@pytest.fixture(scope="module")
def judged(folder):
    return run(folder, "judged", users.RIGHT_AND_WRONG)


def test_a_wrong_rule_is_confirmed_and_right_ones_are_sound(judged):
    assert lines(judged, Verdict.UNSOUND) == ["running.default: S(0) -> S(0)"]
    assert (judged.counts.sound, judged.counts.unsound, judged.counts.crashed) == (5, 1, 0)
    assert (len(judged.findings), judged.counts.overloads, judged.exit_code) == (1, 2, 1)


def test_an_unsound_rule_comes_with_its_evidence(judged):
    (found,) = judged.findings
    assert (found.confirmed_on, found.ranks, found.sample) == ("gloo", 2, ("f32[2]",))
    assert (
        found.reason == "rank 0: result gathered from S(0) differs at [1]: got 2, expected 3 (1 of 2 elements differ)"
    )
    assert (found.got, found.want) == ("[1, 2] of shape (2,)", "[1, 3] of shape (2,)")
    assert "argument 0, S(0)\n  rank 0  [1] " in found.picture and "the op gives [1, 3] " in found.picture
    assert "import localtensor" not in found.script and "torch.ops.judged.running.default" in found.script


def test_the_case_that_is_shown_is_the_case_that_is_replayed(judged):
    (found,) = judged.findings
    _, candidate = read_case(found.command.split()[-1])
    (x,) = candidate.instance.sample.tensors
    assert (x.dtype, x.tolist(), candidate.instance.evidence.variant) == (torch.float32, [1, 2], "")


def test_every_phase_is_timed(judged):
    assert [name for name, _ in judged.seconds] == ["imports", "samples", "trials", "confirmation"]


def test_without_confirmation_nothing_is_called_unsound(folder):
    report = run(folder, "alone", users.RIGHT_AND_WRONG, confirm="none")
    assert lines(report, Verdict.UNSOUND) == []
    assert lines(report, Verdict.SUSPECT) == ["running.default: S(0) -> S(0)"]
    (found,) = report.findings
    assert found.reason.endswith(" (not confirmed: --confirm none was asked for)")
    assert (found.confirmed_on, found.script, report.confirm, report.exit_code) == (None, "", "none", 0)


def test_a_search_finds_the_rule_that_was_left_out(folder):
    report = run(folder, "searched", 'op("twice", lambda x: x * 2, (R, R), (S0, S0))', search=True, confirm="none")
    missing = lines(report, Verdict.MISSING)
    assert "twice.default: S(1) -> S(1)" in missing
    assert "twice.default: P(sum) -> P(sum)" in missing
    assert "twice.default: S(0) -> S(0)" not in missing
    assert (report.counts.missing, report.exit_code) == (len(missing), 0)
    assert report.counts.combinations > 0


def test_claims_alone_find_nothing_missing(judged):
    assert (judged.counts.missing, judged.counts.combinations) == (0, 0)


@pytest.mark.slow
def test_a_search_finds_nothing_missing_that_is_wrong(folder):
    report = run(folder, "strict", 'op("running", lambda x: x.cumsum(0), (R, R))', search=True, confirm="none")
    missing = lines(report, Verdict.MISSING)
    assert "running.default: S(1) -> S(1)" in missing
    assert not any("S(0) -> " in line for line in missing)


# What goes wrong on the way.

DEADLY = """
def deadly(x):
    if tuple(x.shape) == (3, 5):  # half of (6, 5), which is what one rank of two holds
        die()
    return x.cumsum(1) if x.ndim > 1 else x.clone()

op("deadly", deadly, (R, R), (S0, S0), (S1, S1))
op("fine", lambda x: x * 2, (R, R), (S0, S0))
"""


@pytest.fixture(scope="module")
def survived(folder):
    return run(folder, "survived", DEADLY)


def test_an_op_that_kills_the_process_costs_that_sample_only(survived):
    (crash,) = survived.crashed
    assert (crash.op, crash.error) == ("survived.deadly.default", "the process died with SIGSEGV on a rank's piece")
    assert crash.sample == "f64[6,5] from drawn from the schema, shapes #2"
    assert survived.counts.crashed == 1


def test_after_a_crash_the_rest_is_judged_and_the_exit_code_is_right(survived):
    assert lines(survived, Verdict.UNSOUND) == ["deadly.default: S(1) -> S(1)"]
    assert (survived.counts.sound, survived.counts.overloads, survived.exit_code) == (4, 2, 1)


def test_an_error_of_ours_is_a_crash_with_its_traceback(folder):
    body = """
def trips(x):
    if tuple(x.shape) == (3, 5):
        raise ZeroDivisionError("three")
    return x * 2

op("trips", trips, (R, R), (S0, S0))
"""
    report = run(folder, "tripped", body, confirm="none")
    (crash,) = report.crashed
    assert (crash.op, crash.error) == ("tripped.trips.default", "ZeroDivisionError: three")
    assert crash.trace.startswith("Traceback") and "in trips" in crash.trace
    assert (report.counts.sound, report.exit_code) == (2, 0)


def test_an_op_of_which_every_sample_dies_is_not_a_pass(folder):
    body = 'op("a", lambda x: die(), (R, R))\ndef samples(op):\n    yield (torch.ones(4),), {}\n'
    report = run(folder, "all_dead", body)
    assert [(c.sample, c.error) for c in report.crashed] == [
        ("f32[4] from samples() #0", "the process died with SIGSEGV on the whole tensors")
    ]
    assert (report.counts.instances, report.exit_code) == (0, 3)


def test_nothing_tested_is_not_a_pass(folder):
    body = 'def no(x):\n    raise ValueError("never")\n\nop("refuses", no, (R, R))'
    report = run(folder, "nothing", body)
    assert (report.counts.instances, report.findings, report.crashed, report.exit_code) == (0, (), (), 3)


def test_samples_of_the_modules_own_are_what_is_tried(folder):
    body = users.RIGHT_AND_WRONG + "\ndef samples(op):\n    yield (torch.arange(1.0, 7.0),), {}\n"
    report = run(folder, "given", body)
    (found,) = report.findings
    assert (found.origin, found.sample, report.counts.samples) == ("samples() #0", ("f32[2]",), 2)


def test_a_registration_that_torch_ignores_is_reported_and_fails(folder):
    body = 'register_sharding(torch.ops.aten.add.Tensor)(lambda *_, **__: [])\nop("a", lambda x: x * 2, (R, R))'
    report = run(folder, "unheard", body)
    assert ([op for op, _ in report.ignored], report.counts.unsound, report.exit_code) == (["aten.add.Tensor"], 0, 1)


def test_only_ignored_registrations_fail_too(folder):
    report = run(folder, "unheard_all", "register_sharding(torch.ops.aten.add.Tensor)(lambda *_, **__: [])")
    assert ([op for op, _ in report.ignored], report.counts.instances, report.exit_code) == (["aten.add.Tensor"], 0, 1)


def test_a_single_dim_strategy_of_the_modules_own_is_judged(folder):
    body = """
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

op("falling", lambda x: x.flip(0).cumsum(0))

@register_single_dim_strategy(torch.ops.single.falling.default)
def lines(op, args, kwargs):
    return [[Shard(0), Shard(0)]]
"""
    report = run(folder, "single", body)
    assert (lines(report, Verdict.UNSOUND), report.ignored) == (["falling.default: S(0) -> S(0)"], ())


# The same again.

THREE = users.RIGHT_AND_WRONG + 'op("squares", lambda x: x * x, (R, R), (S0, S0))\n'


def plain(report):
    body = json.loads(text_and_json.as_json(report))
    assert body.pop("seconds")
    return json.dumps(body)


def test_the_same_seed_writes_the_same_json_with_any_number_of_workers(folder):
    one, two = (run(folder, "same", THREE, workers=n, dtypes=("float64", "int64"), seed=3) for n in (1, 2))
    assert plain(one) == plain(two)
    assert one.counts.unsound == 1


@pytest.mark.slow
def test_another_seed_draws_other_values(folder):
    one, other = (run(folder, "same", users.RIGHT_AND_WRONG, confirm="none", seed=n) for n in (0, 1))
    assert one.findings[0].want != other.findings[0].want
    assert lines(one, Verdict.SUSPECT) == lines(other, Verdict.SUSPECT)


# Nobody stays behind.


class Ends(Progress):
    """Raises at the first tick of the phase of this name."""

    def __init__(self, phase, error):
        self.wanted, self.error, self.at = phase, error, ""
        self.seen = set()

    def phase(self, name, total):
        self.at = name

    def tick(self, count=1):
        self.seen |= family()
        if self.at == self.wanted:
            raise self.error


@pytest.mark.usefixtures("no_process_left")
def test_a_run_leaves_no_process(folder):
    watch = Ends("", None)
    run(folder, "tidy", users.RIGHT_AND_WRONG, watch)
    assert len(watch.seen - {os.getpid()}) >= 3  # one worker and two real ranks at the least


@pytest.mark.few(2)
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.parametrize("phase", ["trying rules", "confirming on real processes"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_middle_leaves_no_process(phase, error, folder):
    watch, before = Ends(phase, error), family()
    with pytest.raises(error) as caught:
        run(folder, "broken_off", users.RIGHT_AND_WRONG, watch)
    assert watch.at == phase and watch.seen - before
    assert family() <= before, f"{caught.value!r} still holds what it went through, so nobody is gone by chance"


@pytest.mark.usefixtures("no_process_left")
def test_a_refusal_leaves_no_process():
    with pytest.raises(UnknownOp):
        validate(Settings(("no_such_op_at_all",), workers=1))


def test_progress_hears_of_every_phase_and_unit(folder):
    class Counted(Progress):
        def __init__(self):
            self.phases, self.ticks = [], []

        def phase(self, name, total):
            self.phases.append((name, total))
            self.ticks.append(0)

        def tick(self, count=1):
            self.ticks[-1] += count

    told = Counted()
    run(folder, "counted", users.RIGHT_AND_WRONG, told)
    assert told.phases == [
        ("capturing samples", 0), ("deriving samples", 0), ("trying rules", 2), ("making findings small", 1),
        ("confirming on real processes", 1),
    ]  # fmt: skip
    assert told.ticks == [0, 0, 2, 1, 1]

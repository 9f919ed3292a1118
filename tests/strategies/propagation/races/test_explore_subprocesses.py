"""Scripts in a process of their own: what they find, and that none of them can hang us."""

from strategies.propagation.races import explore
from strategies.propagation.races.explore import run_race_script

BEGINS = 'import os, sys, time\nprint(\'races: {"begins": "1"}\', flush=True)\n'
FOUND = 'print(\'races: {"found": "exception", "example": "it raised"}\', flush=True)\n'


def done(text, seconds=20.0):
    return run_race_script("mine", "is it so?", text, seconds)


def test_what_is_found_is_counted_and_keeps_its_script():
    text = BEGINS + FOUND + 'print(\'races: {"counts": {"exception": 3}, "figures": {"calls": 7}}\'); sys.exit(1)'
    part = done(text)
    [finding] = part.findings
    assert (part.tried, part.trouble) == (7, "")
    assert (finding.kind, finding.count, finding.example, finding.script) == ("exception", 3, "it raised", text)
    assert finding.meaning


def test_nothing_found_is_no_trouble():
    part = done(BEGINS + 'print(\'races: {"counts": {}, "figures": {"calls": 2}}\')')
    assert (part.tried, part.findings, part.trouble) == (2, (), "")


def test_a_script_that_does_not_begin_was_not_run():
    part = done("import no_such_module_anywhere")
    assert part.tried == 0 and part.findings == ()
    assert "no_such_module_anywhere" in part.trouble


def test_a_script_that_does_not_begin_in_time_was_not_run_either(monkeypatch):
    monkeypatch.setattr(explore, "GRACE", 0.2)
    part = done("import time; time.sleep(60)", seconds=0.2)
    assert part.tried == 0 and part.findings == () and part.trouble.startswith("it did not begin in ")


def test_an_error_of_the_script_itself_is_no_finding_about_torch():
    part = done(BEGINS + "raise ValueError('mine')")
    assert part.findings == () and part.trouble == "ValueError: mine"


def test_a_hang_ends_as_a_finding_and_what_was_found_before_stays(monkeypatch):
    monkeypatch.setattr(explore, "GRACE", 0.5)
    part = done(BEGINS + FOUND + "time.sleep(60)", seconds=0.5)
    assert [finding.kind for finding in part.findings] == ["exception", "time-out"]


def test_a_script_that_ends_itself_shows_where_its_threads_stood():
    part = done(BEGINS + "import faulthandler\nfaulthandler.dump_traceback_later(0.2, exit=True)\ntime.sleep(60)")
    [finding] = part.findings
    assert finding.kind == "time-out" and "in <module>" in finding.example


def test_a_crash_is_a_finding():
    part = done(BEGINS + "import signal; os.kill(os.getpid(), signal.SIGABRT)")
    [finding] = part.findings
    assert finding.kind == "crash" and finding.example.startswith("signal 6")

"""What a sweep keeps, goes on with and survives: runs of `validate` that are cut off, killed, sharded and starved."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from strategies.base import worker_pool
from strategies.base.journal import BadJournal, DiskFull, lines_of_kind, load_journal
from strategies.base.progress import Progress
from strategies.inputs import gathering
from strategies.model.settings import Settings
from strategies.model.verdict import share
from strategies.sweep import aggregate, session
from strategies.sweep.aggregate import merged_run
from strategies.sweep.report import text_and_json
from strategies.sweep.session import validate
from strategies.validation import finding
from tests.strategies import users
from tests.tools import warm

ROOT = Path(__file__).parents[3]
NAME = "machine"
OPS = (
    users.RIGHT_AND_WRONG
    + 'op("squares", lambda x: x * x, (R, R), (S0, S0))\nop("as_it_is", lambda x: x + 0, (R, R), (S1, S1))\n'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("rules")
    users.write(made, NAME, OPS)
    return made


@pytest.fixture
def go(folder, tmp_path):
    """`go(**settings)`: the report of a run whose journal is `tmp_path / "j"`, unless it names another."""

    def run(name=NAME, progress=None, **given):
        wanted = {"ranks": (2,), "dtypes": ("float64",), "workers": 1, "confirm": "none", "journal": tmp_path / "j"}
        with users.undone():
            return validate(Settings(rules=name, folder=str(folder), **{**wanted, **given}), progress)

    return run


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The journal of an unbroken run with its samples beside it, and its report."""
    path = tmp_path_factory.mktemp("whole") / "j"
    with users.undone():
        given = {"ranks": (2,), "dtypes": ("float64",), "workers": 1, "confirm": "none"}
        return path, validate(Settings(rules=NAME, folder=str(folder), journal=path, **given))


def plain(report):
    return json.dumps({**json.loads(text_and_json.as_json(report)), "seconds": {}})


def lines(path):
    """All lines but for the seconds."""
    rows = map(json.loads, path.read_text().splitlines())
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def copied(whole, path, rows, extra=b""):
    """The first rows of the whole journal, some bytes of the next, and all samples."""
    path.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:rows]) + extra)
    gathering.samples_path(path).write_bytes(gathering.samples_path(whole).read_bytes())


# The same again.


@pytest.mark.slow
def test_one_seed_gives_one_journal_but_for_seconds(go, whole, tmp_path):
    assert plain(go(workers=2)) == plain(whole[1])
    assert lines(tmp_path / "j") == lines(whole[0])


@pytest.mark.slow
def test_without_a_journal_the_report_is_the_same(go, whole, tmp_path):
    assert plain(go(journal=None)) == plain(whole[1])
    assert list(tmp_path.iterdir()) == []


def test_the_report_can_be_had_from_the_journal_alone(whole):
    done = load_journal(whole[0])
    assert plain(aggregate.report(done.begin, done.lines)) == plain(whole[1])
    assert whole[1].unfinished == 0 and len(list(lines_of_kind(done.lines, "unit"))) == 16


# Going on.


def test_a_run_that_was_cut_anywhere_goes_on_to_the_same_end(go, whole, tmp_path):
    path, total = tmp_path / "j", len(lines(whole[0]))
    for rows in (1, 3, total - 2):
        copied(whole[0], path, rows, extra=b'{"kind":"unit","un')
        assert plain(go(resume=True)) == plain(whole[1])
        assert lines(path) == lines(whole[0]), rows


@pytest.mark.few(1)
@pytest.mark.parametrize("spoiled", [None, b"", b"{}\n"], ids=["gone", "empty", "no samples"])
def test_without_the_samples_it_captures_them_again(spoiled, go, whole, tmp_path):
    copied(whole[0], tmp_path / "j", 6)
    kept = gathering.samples_path(tmp_path / "j")
    kept.unlink() if spoiled is None else kept.write_bytes(spoiled)
    assert plain(go(resume=True)) == plain(whole[1])
    assert lines(tmp_path / "j") == lines(whole[0])


def test_with_the_samples_it_captures_nothing(go, whole, tmp_path, monkeypatch):
    copied(whole[0], tmp_path / "j", 6)
    monkeypatch.setattr(gathering, "gather", lambda *_: pytest.fail("captured again"))
    assert plain(go(resume=True)) == plain(whole[1])


def test_a_finished_run_is_reported_again_at_once_and_nothing_is_done(go, whole, tmp_path, monkeypatch):
    copied(whole[0], tmp_path / "j", 99)
    monkeypatch.setattr(gathering, "gather", lambda *_: pytest.fail("captured again"))
    monkeypatch.setattr(worker_pool, "_Worker", lambda *_: pytest.fail("hired somebody"))
    read, read_task = [], finding.read_task
    monkeypatch.setattr(finding, "read_task", lambda line: read.append(line["unit"]) or read_task(line))
    start = time.process_time()
    report = go(resume=True)
    assert time.process_time() - start < 1
    assert plain(report) == plain(whole[1])
    assert len(read) == len(set(read)) == 16, (
        "a line was decoded twice: that is seconds for a journal of the whole sweep"
    )
    assert (tmp_path / "j").read_bytes() == whole[0].read_bytes()


KILLED = """
import os, signal, sys
from strategies.base import journal
from strategies.cli.app import main

left, add = int(sys.argv.pop(1)), journal.Journal.add

def killed(self, line):
    global left
    left -= 1
    if left < 0:
        os.write(self._file.fileno(), b'{"kind":"unit","unit":"mach')
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, line)

journal.Journal.add = killed
main()
"""


def test_the_whole_tool_killed_in_the_middle_loses_nothing_that_was_written(go, whole, folder, tmp_path):
    words = ["validate", "--rules", NAME, "--ranks", "2", "--dtype", "float64", "--workers", "2", "--confirm", "none"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = warm.run(
        [sys.executable, "-c", KILLED, "7", *words, "--journal", str(tmp_path / "j")], cwd=folder, env=environ, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (len(load_journal(tmp_path / "j").lines), load_journal(tmp_path / "j").cut != "") == (7, True)
    assert plain(go(resume=True)) == plain(whole[1])  # at once: whoever outlives it does not hold the journal
    again, before = (sorted(lines(path), key=json.dumps) for path in (tmp_path / "j", whole[0]))
    assert again == before  # which of two workers is done first is a matter of load


def test_a_cut_line_is_reported(go, whole, tmp_path):
    class Told(Progress):
        said = ()

        def phase(self, name, total):
            """Nothing to count."""

        def tick(self, count=1):
            """Nothing to count."""

        def say(self, text):
            self.said += (text,)

    progress = Told()
    copied(whole[0], tmp_path / "j", 6, extra=b"{")
    go(resume=True, progress=progress)
    assert progress.said == (f"{tmp_path / 'j'}: its last line was cut after 1 bytes; that unit is tried again",)


@pytest.mark.parametrize(("given", "said"), [
    ({"seed": 1}, "seed was 0, now 1"), ({"ranks": (3,)}, r"ranks was \[2\], now \[3\]"),
    ({"search": True}, "search was False, now True"),
], ids=str)  # fmt: skip
def test_another_run_is_refused_before_any_work(given, said, go, whole, tmp_path, monkeypatch):
    copied(whole[0], tmp_path / "j", 6)
    monkeypatch.setattr(gathering, "gather", lambda *_: pytest.fail("captured"))
    with pytest.raises(BadJournal, match=f"it is of another run: {said}"):
        go(resume=True, **given)
    assert lines(tmp_path / "j") == lines(whole[0])[:6]


def test_a_disk_without_room_for_the_samples_is_said(go, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session, "write_lines", full)
    with pytest.raises(DiskFull, match=r"j\.samples: .* \(No space left on device\)"):
        go()
    monkeypatch.undo()
    assert go(resume=True).unfinished == 0


# Shards.


def test_shards_together_are_the_whole(go, whole, tmp_path):
    paths = [tmp_path / f"{n}" for n in (1, 2, 3)]
    parts = [go(journal=path, shard=(n, 3)) for n, path in enumerate(paths, 1)]
    begin, found, _ = merged_run(paths)
    assert plain(aggregate.report(begin, found)) == plain(whole[1])
    ops = load_journal(paths[0]).begin["ops"]
    left = [sum(share(op, 3) != n for op in ops) for n in range(3)]
    assert [part.unfinished for part in parts] == [4 * n for n in left]
    assert [part.exit_code == 3 for part in parts] == [n == len(ops) for n in left]


# What goes wrong on the way.


def odd(folder, name, body):
    """An op that does this with what one rank of two holds of six rows."""
    text = f"def odd(x):\n    if tuple(x.shape) == (3, 5):\n        {body}\n    return x * 2\n\n"
    return users.write(folder, name, text + 'op("odd", odd, (R, R), (S0, S0), (S1, S1))')


@pytest.mark.few(2)
@pytest.mark.parametrize(("body", "error"), [
    ("time.sleep(60)", "no answer within 0.5 s on a rank's piece"),
    ("held = torch.ones(512 << 20, dtype=torch.uint8); time.sleep(60)", "it used more than {} MiB on a rank's piece"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "the process died with SIGKILL on a rank's piece"),
    ("raise ZeroDivisionError('three')", "ZeroDivisionError: three"),
], ids=["hangs", "eats memory", "is killed", "raises"])  # fmt: skip
def test_a_step_that_fails_costs_that_step_only(body, error, go, folder, monkeypatch):
    name = odd(folder, "odd_" + "".join(c for c in error.lower()[:20] if c.isalpha()), body)
    if "no answer" in error:
        monkeypatch.setattr(session, "SECONDS", 0.5)
    if "it used" in error:
        monkeypatch.setattr(worker_pool, "MEMORY", worker_pool.private_memory(os.getpid()) + (256 << 20))
    report = go(name)
    (crash,) = report.crashed
    assert (crash.op, crash.error) == (f"{name}.odd.default", error.format(worker_pool.MEMORY >> 20))
    assert "f64[6,5]" in crash.sample
    assert (report.counts.sound, report.unfinished, report.exit_code) == (3, 0, 0)


@pytest.mark.slow
def test_somebodys_executor_gives_the_same_report(go, whole, folder, monkeypatch):
    (folder / "my_engine.py").write_text(
        "from concurrent.futures import ThreadPoolExecutor\n\ndef made():\n    return ThreadPoolExecutor(1)\n"
    )
    assert plain(go(executor="my_engine:made")) == plain(whole[1])

"""What lines of a journal must hold, and a journal that was refused before its first line."""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strategies.base import journal
from strategies.base.journal import (
    FORMAT,
    BadJournal,
    DiskFull,
    lines_of_kind,
    load_journal,
    open_journal,
    run_difference,
)
from strategies.base.worker_pool import TaskDone, WorkerPool
from tests.tools import warm

ROOT = Path(__file__).parents[3]
RUN = {"torch": "2.13.0", "seed": 0, "ranks": [2, 3], "shard": None}
LINES = [{"kind": "unit", "unit": f"aten.grün{n}.default alone real 2", "of": [n]} for n in range(4)]


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "run.jsonl")


def written(path, lines=LINES, run=RUN):
    with open_journal(path, resume=False) as journal:
        journal.begin({**run, "ops": ["aten.a.default"]})
        for line in lines:
            journal.add(line)
    return path


def assert_refused(path, said, *, resume=True, argument="--journal"):
    """With these words; the file is as it was."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(BadJournal) as refused, open_journal(path, resume=resume) as journal:
        journal.begin(RUN)
    assert str(refused.value) == f"localtensor validate: {argument}: {path}: {said}"
    assert (path.read_bytes() if path.is_file() else None) == before


# Lines.


def test_every_line_is_json_of_its_own(file):
    first, *rest = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert first == {"kind": "begin", "format": FORMAT, **RUN, "ops": ["aten.a.default"]}
    assert rest == LINES


def test_what_was_written_is_read(file):
    done = load_journal(file)
    assert (done.begin["seed"], list(done.lines), done.cut, done.whole) == (0, LINES, "", file.stat().st_size)


def test_a_line_is_there_as_soon_as_it_is_added(tmp_path):
    with open_journal(tmp_path / "x", resume=False) as journal:
        journal.begin(RUN)
        for n, line in enumerate(LINES):
            journal.add(line)
            assert list(load_journal(tmp_path / "x").lines) == LINES[: n + 1]


def test_text_of_any_kind_can_be_written(tmp_path):
    line = {
        "kind": "unit",
        "unit": "u",
        "error": "a \ud800 b \x00 \u2028 \n",
    }  # an error may quote bytes that are no text
    assert list(load_journal(written(tmp_path / "x", [line])).lines) == [line]


def test_without_a_path_lines_are_kept_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_journal(None, resume=False) as journal:
        journal.begin(RUN)
        journal.add(LINES[0])
    assert (journal.lines, journal.begun["seed"], list(tmp_path.iterdir())) == ([LINES[0]], 0, [])


def test_lines_of_a_kind_in_order():
    lines = [LINES[0], {"kind": "settled", "rule": "r", "verdict": "cleared"}, LINES[1]]
    assert list(lines_of_kind(lines, "unit")) == LINES[:2]


# Going on.


def test_a_resumed_journal_goes_on_where_it_ended(file):
    with open_journal(file, resume=True) as journal:
        journal.begin(RUN)
        assert journal.lines == LINES
        journal.add({"kind": "unit", "unit": "u", "more": 1})
    assert list(load_journal(file).lines) == [*LINES, {"kind": "unit", "unit": "u", "more": 1}]
    assert file.read_bytes().count(b'"begin"') == 1


def test_to_resume_what_is_not_there_is_to_begin(tmp_path):
    with open_journal(tmp_path / "new", resume=True) as journal:
        assert journal.begun is None
        journal.begin(RUN)
    assert load_journal(tmp_path / "new").begin["seed"] == 0


def test_an_empty_file_is_a_new_journal(tmp_path):
    (tmp_path / "x").touch()
    assert load_journal(written(tmp_path / "x")).lines == tuple(LINES)


def test_a_journal_cut_at_any_byte_keeps_all_whole_lines_and_can_go_on(file):
    data = file.read_bytes()
    first = data.index(b"\n") + 1
    for size in range(first, len(data) + 1):
        file.write_bytes(data[:size])
        whole = data[:size].count(b"\n") - 1
        with open_journal(file, resume=True) as journal:
            journal.begin(RUN)
            assert journal.lines == LINES[:whole]
            assert bool(journal.cut) == (data[size - 1 : size] != b"\n")
            journal.add({"kind": "unit", "unit": "u", "again": size})
        assert list(load_journal(file).lines) == [*LINES[:whole], {"kind": "unit", "unit": "u", "again": size}]


def test_a_cut_line_is_reported(file):
    with file.open("ab") as end:
        end.write(b'{"kind":"un')
    assert load_journal(file).cut == f"{file}: its last line was cut after 11 bytes; that unit is tried again"


@pytest.mark.parametrize("end", [b"\0" * 40, b"\0" * 40 + b"\n", b'{"kind": "unit"\n', b"\xff\xfe\n"], ids=repr)
def test_what_a_crash_of_the_machine_leaves_at_the_end_is_dropped(end, file):
    with file.open("ab") as sink:
        sink.write(end)
    assert list(load_journal(file).lines) == LINES
    assert load_journal(file).cut.startswith(f"{file}: its last line was cut after {len(end)} bytes")


# What is refused.


@pytest.mark.parametrize("row", [b"", b"{", b"[]", b"1", b"{}", b'{"kind": 3}', b"\xff"], ids=repr)
def test_a_bad_line_in_the_middle_is_refused_with_its_number(row, file):
    rows = file.read_bytes().split(b"\n")
    rows[2] = row
    file.write_bytes(b"\n".join(rows))
    assert_refused(file, "line 3 is no line of a journal. It was changed by something else: start anew.")


@pytest.mark.parametrize("data", [b"hello", b'{"kind":"begin","form', b'{"kind":"unit","unit":"u"}\n'], ids=repr)
def test_a_file_of_another_kind_is_refused_and_left_alone(data, tmp_path):
    (tmp_path / "x").write_bytes(data)
    assert_refused(tmp_path / "x", "it does not begin as a journal does. Name a journal, or start anew.")


@pytest.mark.parametrize("enabled", [True, False])
def test_while_a_journal_is_read_nothing_is_collected_and_then_as_before(enabled, file, monkeypatch):
    seen = []
    monkeypatch.setattr(journal, "read_json", lambda row: seen.append(gc.isenabled()) or json.loads(row))
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        load_journal(file)
        assert set(seen) == {False} and gc.isenabled() == enabled
        file.write_bytes(b"[]\n")
        with pytest.raises(BadJournal):
            load_journal(file)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_text_is_no_journal(tmp_path):
    (tmp_path / "x").write_text("a letter\nto somebody\n")
    assert_refused(tmp_path / "x", "line 1 is no line of a journal. It was changed by something else: start anew.")


def test_another_format_is_refused(file):
    file.write_bytes(file.read_bytes().replace(b'"format":1', b'"format":7'))
    assert_refused(file, "it has format 7, not 1. Start anew.")


@pytest.mark.parametrize(("name", "value", "said"), [
    ("torch", "2.12.1", "torch was '2.12.1', now '2.13.0'"), ("seed", 5, "seed was 5, now 0"),
    ("ranks", [2], "ranks was [2], now [2, 3]"), ("shard", [1, 4], "shard was [1, 4], now None"),
])  # fmt: skip
def test_a_journal_of_another_run_is_refused_and_both_are_named(name, value, said, tmp_path):
    path = written(tmp_path / "x", run={**RUN, name: value})
    assert_refused(path, f"it is of another run: {said}. Ask for the same again, or start anew.")


def test_every_difference_is_named():
    assert run_difference({"seed": 1, "torch": "a", "ops": ["x"]}, {"seed": 2, "torch": "b", "ops": []}) == (
        "seed was 1, now 2; torch was 'a', now 'b'"
    )
    assert run_difference({**RUN, "kind": "begin", "more": 1}, RUN) == ""


def test_a_journal_that_is_there_is_not_overwritten(file):
    assert_refused(file, "it is there already. Go on with it by --resume, or name another file.", resume=False)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_is_no_journal(resume, tmp_path):
    with pytest.raises(BadJournal, match="--journal"):
        open_journal(tmp_path, resume=resume)
    with pytest.raises(BadJournal, match=r"JOURNAL: .*: it cannot be read \(Is a directory\)\. Name a journal\."):
        load_journal(tmp_path, "localtensor merge")


def test_too_long_a_name_is_said(tmp_path):
    with pytest.raises(BadJournal, match=r"it cannot be opened \(File name too long\)"):
        open_journal(tmp_path / ("n" * 300), resume=False)


def test_a_folder_that_is_not_there_is_said(tmp_path):
    assert_refused(tmp_path / "none/x", "it cannot be opened (No such file or directory). Name a file of yours.")


def test_what_cannot_be_cut_is_no_journal():
    assert_refused(Path("/dev/null"), "it cannot be written (Invalid argument). Name a file of yours.")


# Two runs at once.

HOLD = """
import sys
from pathlib import Path
from strategies.base.journal import open_journal

journal = open_journal(Path(sys.argv[1]), resume=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_journal_that_another_process_writes_is_refused_until_that_one_is_killed(file):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            assert_refused(file, "another run is writing to it. Wait for that one, or name another file.")
        finally:
            other.kill()
    with open_journal(file, resume=True) as journal:
        assert journal.lines == LINES


def test_a_run_that_was_refused_lets_go(file):
    assert_refused(file, "it is there already. Go on with it by --resume, or name another file.", resume=False)
    file.write_bytes(b"{\n" + file.read_bytes())
    assert_refused(file, "line 1 is no line of a journal. It was changed by something else: start anew.")
    written(file.with_name("other"))
    os.replace(file.with_name("other"), file)
    assert list(load_journal(file).lines) == LINES


def echo(task, note):
    return task


def test_a_worker_that_outlives_its_run_does_not_hold_the_journal(file):
    journal = open_journal(file, resume=True)
    with WorkerPool(1) as crew:
        assert list(crew.run(echo, [1], limit=60)) == [TaskDone(1)]
        journal.close()  # as the system does when the run is killed; the worker is still there
        with open_journal(file, resume=True) as again:
            assert again.lines == LINES


# A full disk.

FULL = """
import resource, sys
from pathlib import Path
from strategies.base.journal import DiskFull, open_journal
from tests.strategies.base.test_journal import RUN

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
with open_journal(Path(sys.argv[1]), resume=False) as journal:
    try:
        journal.begin(RUN)
        for n in range(99):
            journal.add({"kind": "unit", "unit": f"u{n:02}", "n": n, "text": "x" * 50})
    except DiskFull as error:
        print(len(journal.lines), error)
"""


def test_a_disk_that_fills_up_keeps_all_lines_before_and_one_goes_on(tmp_path):
    path = tmp_path / "x"
    done = warm.run([sys.executable, "-c", FULL, str(path)], cwd=ROOT, check=True)
    many, said = done.stdout.strip().split(" ", 1)
    assert said == (
        f"localtensor validate: --journal: {path}: a line could not be written (File too large); the {many} before it "
        "are whole. Make room, then go on with --resume."
    )
    whole = load_journal(path)
    assert (len(whole.lines), whole.cut) == (int(many), "") and int(many) > 5
    with open_journal(path, resume=True) as journal:
        journal.begin(RUN)
        journal.add({"kind": "unit", "unit": "last", "n": int(many)})
    assert [line["n"] for line in load_journal(path).lines] == list(range(int(many) + 1))


class Half:
    """A file that takes half of what it is given, and then nothing."""

    def __init__(self, file):
        self.file, self.full = file, False

    def write(self, data):
        if self.full:
            raise OSError(28, "No space left on device")
        self.full = True
        return self.file.write(data[: len(data) // 2])

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("cuts", [True, False], ids=["the half is cut off", "the half stays"])
def test_a_half_line_is_no_line(cuts, file, monkeypatch):
    with open_journal(file, resume=True) as journal:
        journal._file = Half(journal._file)
        if not cuts:
            monkeypatch.setattr(os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O error")))
        with pytest.raises(DiskFull, match="the 4 before it are whole"):
            journal.add({"kind": "unit", "unit": "u", "text": "x" * 99})
        assert journal.lines == LINES
    assert (list(load_journal(file).lines), bool(load_journal(file).cut)) == (LINES, not cuts)


def test_a_limit_of_the_system_is_an_error_and_no_signal():
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN, "Python ignores it, so that a write raises"
    assert resource.RLIM_INFINITY


BAD = "is no line of a journal. It was changed by something else: start anew."
WHOLE = {
    "unit": {"unit": "aten.neg.default alone real 2"}, "settled": {"rule": "r", "verdict": "cleared"},
    "captured": {"crashed": [], "refused": {}},
}  # fmt: skip


def put(file, number, line):
    """The line in the place of that number, counted from 1."""
    rows = file.read_bytes().split(b"\n")
    rows[number - 1] = json.dumps(line).encode()
    file.write_bytes(b"\n".join(rows))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, held in WHOLE.items() for name in held])
def test_a_line_of_a_known_kind_that_lacks_what_is_read_of_it_is_refused_with_its_number(kind, name, file):
    whole = {"kind": kind, **WHOLE[kind]}
    put(file, 3, whole)
    assert load_journal(file).lines[1] == whole
    put(file, 3, {key: value for key, value in whole.items() if key != name})
    assert_refused(file, f"line 3 {BAD}")


def test_a_kind_that_is_not_known_is_kept(tmp_path):
    line = {"kind": "remark", "said": 1}
    assert list(load_journal(written(tmp_path / "x", [line])).lines) == [line]


def test_a_journal_that_was_never_begun_is_dropped_with_its_file_and_nothing_else(tmp_path):
    (tmp_path / "other").write_text("mine")
    with open_journal(tmp_path / "x", resume=False) as journal:
        assert (tmp_path / "x").exists()
        journal.drop()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_journal_that_was_begun_is_not_dropped(resume, tmp_path):
    path = written(tmp_path / "x") if resume else tmp_path / "x"
    with open_journal(path, resume=resume) as journal:
        journal.begin(RUN)
        before = path.read_bytes()
        journal.drop()
    assert path.read_bytes() == before != b""
    with open_journal(path, resume=True) as again:  # it is let go
        assert again.lines == (LINES if resume else [])


def test_without_a_file_there_is_nothing_to_drop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_journal(None, resume=False) as journal:
        journal.drop()
    assert list(tmp_path.iterdir()) == []

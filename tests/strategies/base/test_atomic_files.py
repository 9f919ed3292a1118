import ast
import errno
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from strategies.base.atomic_files import read_bytes, why_not_writable, write_lines, write_whole
from strategies.base.signals import CLEANUPS


def test_a_file_is_written_into_folders_that_are_made(tmp_path):
    write_whole(tmp_path / "a/b/report.json", "grün\n")
    assert (tmp_path / "a/b/report.json").read_text(encoding="utf-8") == "grün\n"
    assert [p.name for p in (tmp_path / "a/b").iterdir()] == ["report.json"]


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\n\nb\n"])
def test_a_text_ends_with_one_newline_of_its_own(text, tmp_path):
    write_whole(tmp_path / "x", text)
    assert (tmp_path / "x").read_bytes().decode() == text.removesuffix("\n") + "\n"


def test_lines_are_written_one_below_the_other(tmp_path):
    write_lines(tmp_path / "x", iter(["a", "", "b"]))
    assert (tmp_path / "x").read_text() == "a\n\nb\n"
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o644


@pytest.mark.parametrize("fails", ["replace", "chmod"])
def test_a_failure_leaves_the_old_file_whole(fails, tmp_path, monkeypatch):
    file = tmp_path / "report.json"
    file.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_an_interruption_leaves_no_half_file(tmp_path):
    def interrupted():
        yield "first"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_lines(tmp_path / "x", interrupted())
    assert list(tmp_path.iterdir()) == []


def test_half_a_character_is_written_as_json_and_python_spell_it(tmp_path):
    write_whole(tmp_path / "report.json", '"a\ud800é"')
    text = (tmp_path / "report.json").read_text(encoding="utf-8").rstrip("\n")
    assert text == '"a\\ud800é"' and json.loads(text) == ast.literal_eval(text) == "a\ud800é"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "\udfff\n")
    assert os.read(reader, 99) == b"\\udfff\n"
    os.close(reader)


def test_a_pipe_or_a_device_is_written_to_and_stays_what_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "one\ntwo\n")
        assert os.read(reader, 100) == b"one\ntwo\n"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "file").write_text("old\n")
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "new\n")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new\n"


def test_whoever_ends_the_process_at_once_finds_the_half_file(tmp_path):
    seen = []

    def looks():
        seen.extend(CLEANUPS)
        yield "line"

    write_lines(tmp_path / "x", looks())
    (half,) = seen
    assert half.startswith(str(tmp_path / ".x."))
    assert CLEANUPS == {}


@pytest.mark.parametrize(("where", "folder", "said"), [
    ("new", False, ("", "")), ("a/b/new", False, ("", "")), ("file", False, ("", "")), ("new", True, ("", "")),
    ("folder", True, ("", "")), ("/dev/null", False, ("", "")),
    ("folder", False, ("this is a folder", "Name a file.")),
    ("file", True, ("this is a file", "Name a folder; it is made if it is not there.")),
    ("file/new", False, ("{here}/file takes no files", "Name a file in a folder of yours.")),
    ("file/new", True, ("{here}/file takes no files", "Name a folder below one of yours.")),
    ("n" * 300, False, ("it cannot be (File name too long)", "Name another.")),
    ("to_file", False, ("", "")), ("to_new", False, ("", "")),
    ("to_nowhere", False, ("{here}/no takes no files", "Name a file in a folder of yours.")),
])  # fmt: skip
def test_a_place_that_takes_no_file_is_known_before(where, folder, said, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name, leads in (("to_file", "file"), ("to_new", "new"), ("to_nowhere", "no/file")):
        (tmp_path / name).symlink_to(leads)
    problem, remedy = said
    assert why_not_writable(tmp_path / where, folder=folder) == (problem.format(here=tmp_path), remedy)


def test_a_file_that_is_there_is_replaced_so_its_folder_is_what_counts(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    assert why_not_writable(tmp_path / "file") == (f"{tmp_path} takes no files", "Name a file in a folder of yours.")
    assert why_not_writable(Path("/dev/null")) == ("", "")


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="such a link is replaced there")
def test_a_link_to_itself_takes_no_file(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    said = "Too many levels of symbolic links"
    assert why_not_writable(tmp_path / "loop") == (f"it cannot be ({said})", "Name another.")
    with pytest.raises(OSError, match=said):
        write_whole(tmp_path / "loop", "text")


def test_of_a_device_all_is_not_read_it_may_have_no_end():
    with pytest.raises(OSError, match="this is a device"):
        read_bytes(Path("/dev/zero"))
    assert read_bytes(Path("/dev/zero"), 3) == b"\0\0\0"


@pytest.mark.parametrize(("most", "read"), [(-1, b"0123456789"), (4, b"0123"), (99, b"0123456789")])
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_file_and_a_pipe_are_read(kind, most, read, tmp_path):
    path = tmp_path / "x"
    if kind == "file":
        path.write_bytes(b"0123456789")
        assert read_bytes(path, most) == read
        return
    os.mkfifo(path)
    handle = os.open(path, os.O_RDWR)  # so that the writer need not wait for us
    writer = os.open(path, os.O_WRONLY)
    os.write(writer, b"0123456789")
    os.close(writer)
    held = threading.Timer(0.2, os.close, [handle])
    held.start()
    assert read_bytes(path, most) == read
    held.join()


def test_a_pipe_that_somebody_will_write_to_is_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x")
    handle = os.open(tmp_path / "x", os.O_RDWR)

    def write():
        os.write(handle, b"late")
        os.close(handle)

    writer = threading.Timer(0.2, write)
    writer.start()
    assert read_bytes(tmp_path / "x", 4) == b"late"
    writer.join()


def test_a_pipe_that_no_one_writes_to_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x")
    with pytest.raises(OSError, match="no process writes to this pipe"):
        read_bytes(tmp_path / "x")


def test_a_full_disk_names_the_file():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_whole(Path("/dev/full"), "text")


FULL = """
import resource, signal, sys
from pathlib import Path
from strategies.base.atomic_files import write_whole
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    write_whole(Path(sys.argv[1]), "new" * 100_000)
except OSError as error:
    print(error.errno, error.filename)
"""
"""No file may grow beyond 8 kB: the write fails half way, as on a full disk."""


@pytest.mark.parametrize("old", ["old", None])
def test_a_write_that_fails_half_way_leaves_the_old_file_or_none(old, tmp_path):
    file = tmp_path / "report.html"
    if old is not None:
        file.write_text(old)
    done = subprocess.run([sys.executable, "-c", FULL, str(file)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{errno.EFBIG} {file}\n"
    assert [path.read_text() for path in tmp_path.iterdir()] == [old] * (old is not None)


def test_a_name_that_no_file_can_have_is_an_error_of_the_system():
    with pytest.raises(OSError, match="null character"):
        read_bytes(Path("a\0b"))

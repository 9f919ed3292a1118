import os
import stat

import pytest

from strategies.files import write_lines, write_whole


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


def test_text_that_cannot_be_encoded_leaves_no_half_file(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "report.json", "x" * 100_000 + "\ud800")
    assert list(tmp_path.iterdir()) == []


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

"""What foreign text may do to a terminal, a CI server, a file system and a reader of JSON: nothing."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from strategies.base.foreign_text import (
    LONGEST,
    BadJson,
    Either,
    PrintableConsole,
    misfit,
    path_below,
    printable,
    read_json,
    safe_file_name,
    without_commands,
)
from strategies.base.signals import print_error, write_stdout

ATTACKS = [
    "\x1b[2J\x1b]0;title\x07", "\x9b31m", "\r::error::late", "a\n::error file=x::y", "  ::warning::x", "\u2003::notice::x",
    "##[error]x", "x ##vso[task.complete result=Succeeded;]", "##teamcity[buildStatus]", "\u202egnp.exe", "\ud800", "\x00",
    "\x1b\n::add-mask::x",
]  # fmt: skip


def harmless(text):
    """As GitHub's runner, Azure's agent, TeamCity and a terminal read it."""
    lines = text.split("\n")
    return not any(
        line.strip().startswith("::") or "##[" in line or "##vso[" in line or "##teamcity[" in line for line in lines
    ) and all(sign.isprintable() or sign in "\t\n" for sign in text.replace("\u2003", " "))


@pytest.mark.parametrize("text", ATTACKS, ids=ascii)
def test_an_attack_is_printed_as_text(text, capsys):
    assert not harmless(text)
    print_error(text)
    write_stdout(text + "\n")
    assert all(map(harmless, (printable(text), *capsys.readouterr())))
    sink = io.StringIO()
    console = PrintableConsole(file=sink, width=40)
    console.print(Text("x" * 39 + " " + text))  # which wraps before it
    console.print(Text(text), soft_wrap=True)
    table = Table(title=Text(text))
    table.add_column(Text(text))
    table.add_row(Text(text))
    console.print(table)
    assert harmless(sink.getvalue())


@given(st.text())
def test_any_text_is_printed_as_text_once_and_for_all(text):
    shown = printable(text)
    assert printable(shown) == shown
    assert (
        not any(ord(sign) < 32 and sign not in "\t\n" for sign in shown) and shown.isprintable() >= text.isprintable()
    )
    for each in (json.dumps([text]), json.dumps([text], ensure_ascii=False)):
        assert json.loads(printable(each)) == [text]


def test_colours_of_our_own_stay_and_those_of_others_do_not():
    sink = io.StringIO()
    console = PrintableConsole(file=sink, force_terminal=True, color_system="standard")
    console.print(Text("ours", "red"), Text("\x1b[8mtheirs"))
    assert sink.getvalue() == "\x1b[31mours\x1b[0m \\u001b[8mtheirs\n"
    assert without_commands("\x1b[31m::\x1b[0m") == "\x1b[31m::\x1b[0m"


@pytest.mark.parametrize("text", ["a::b", "aten::add", "# head", "### [x]", "é", "a\tb\n", "(S(0), R) -> P(sum)"])
def test_ordinary_text_stays_as_it_is(text):
    assert printable(text) == text


STEMS = st.text() | st.sampled_from(
    ["../../etc/passwd", "/etc/passwd", "..", ".", "", "-rf", "a/b", "a\\b", "a\0b", "é" * 999]
)


@given(STEMS, STEMS)
def test_a_file_name_is_no_path_and_differs_as_its_stem_does(one, other):
    names = [safe_file_name(stem, ".py") for stem in (one, other)]
    assert (names[0] == names[1]) == (one == other)
    for name in names:
        assert path_below(Path("folder"), name).parent == Path("folder") and len(name) < LONGEST + 40
        assert name.isascii() and name[0] not in ".-" and not set("/\\\0:* ") & set(name)


def test_a_path_does_not_leave_its_folder_through_a_link(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "out.py").symlink_to(tmp_path / "elsewhere.py")
    (folder / "in.py").symlink_to(folder / "other.py")
    for name in ("out.py", "../x.py", "a/b.py"):
        with pytest.raises(OSError, match="it leads out of"):
            path_below(folder, name)
    assert path_below(folder, "in.py") == folder / "in.py"


@pytest.mark.parametrize(("data", "problem"), [
    (b"[" * 200_000, "it is nested too deep"), ("9" * 5000, "it has a number of thousands of digits"), (b"\xff", "it is no text in UTF-8"),
    ('{"a": 1, "a": 2}', "an object in it has 'a' twice"), ("{", "line 1 is no JSON (Expecting property name"), ("", "line 1 is no JSON"),
], ids=range(6))  # fmt: skip
def test_what_is_no_json_is_one_error(data, problem):
    with pytest.raises(BadJson) as refused:
        read_json(data)
    assert str(refused.value).startswith(problem)


@pytest.mark.parametrize(("value", "shape", "problem"), [
    (1, int, ""), (True, int, "it is True"), (1, float, ""), ("1", float, "it is '1'"), (1 << 63, int, f"it is {1 << 63}"), (True, bool, ""),
    (None, Either((type(None), str)), ""), (1, Either((type(None), str)), "it is 1"), ("cpu", frozenset({"cpu"}), ""),
    ([], frozenset({"cpu"}), "it is a list"), ([1, "x"], [int], "it[1] is 'x'"), ([1, "x"], (int, str), ""), ([1], (int, str), "it is a list"),
    ({"a": 1}, {str: int}, ""), ({"a": {}}, {str: int}, "it.a is an object"), ({"b": []}, {"a": int}, ""), (3, {"a": int}, "it is 3"),
])  # fmt: skip
def test_data_of_another_form_is_named_by_its_place(value, shape, problem):
    assert misfit(value, shape) == problem

import errno
import json
import os
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from strategies.cli.commands import plan as plan_command
from strategies.cli.commands.plan import run
from strategies.cli.options import PlanOptions

TEXT = "f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)"
PLAIN = PlanOptions(TEXT, dtensor=False)


def wanted(**changes):
    return replace(PLAIN, **changes)


def said(capsys, **changes):
    code = run(wanted(**changes))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_plan_is_printed(capsys):
    code, out, err = said(capsys)
    assert code == 0 and err == ""
    assert out.startswith(TEXT + "\n") and "fewest bytes" in out and "DTensor" not in out and "\x1b" not in out
    assert "fewest bytes" not in said(capsys, alternatives=False)[1]
    assert "DTensor, greedy" in said(capsys, dtensor=True)[1]


@pytest.mark.parametrize("changes", [
    {"text": "f32[64"}, {"by": "x"}, {"memory": "x"}, {"topology": "/no/such/file"}, {"flattened": ("dp,x",)}, {"inner": "3,300"},
    {"picture": "plan.png"}, {"as_json": True, "code": True}, {"as_json": True, "picture": "-"},
    {"text": "f32[8] @ dp=2: P(max) -> P(sum)"}, {"text": "f32[8] @ dp=2: P(max) -> P(sum)", "memory": "1"},
    {"text": "\ud800"}, {"picture": "\ud800.gif"}, {"picture": ""}, {"memory": ""}, {"topology": ""}, {"inner": "", "outer": "5,25"},
    {"code": True, "picture": "-"}, {"code": True, "by": "math:sqrt"}, {"topology": "300,25", "per_node": 8},
], ids=ascii)  # fmt: skip
def test_what_cannot_be_followed_is_one_sentence_and_usage(capsys, changes):
    code, out, err = said(capsys, **changes)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and len(err.split(": ")) >= 4 and err.endswith(".\n")


def test_a_limit_that_no_plan_meets_is_exit_code_1_and_says_what_is_needed(capsys):
    code, out, err = said(capsys, memory="10")
    assert code == 1 and out == "" and err.count("\n") == 1 and err.startswith("localtensor plan: memory: ")


def test_json_is_one_object_and_nothing_else(capsys):
    code, out, err = said(capsys, as_json=True, dtensor=True)
    assert code == 0 and err == "" and json.loads(out)["text"] == TEXT


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", "<svg "), (".html", "<!doctype html>"), (".txt", TEXT)])
def test_a_picture_is_written_beside_what_is_printed(capsys, tmp_path, suffix, begin):
    file = tmp_path / "new" / f"plan{suffix}"
    code, out, err = said(capsys, picture=str(file))
    assert code == 0 and err == "" and "the cheapest" in out
    text = file.read_text(encoding="utf-8")
    assert text.startswith(begin)
    if suffix == ".svg":
        assert TEXT in "".join(ET.fromstring(text).itertext())


def test_a_picture_is_printed_here(capsys):
    code, out, _ = said(capsys, picture="-", alternatives=False)
    assert code == 0 and "dp 0" in out and "a part of one, to be reduced" in out


def test_a_picture_for_which_there_is_no_room_is_code_3_and_the_plan_is_there(capsys, tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plan_command, "write_whole", full)
    code, out, err = said(capsys, picture=str(tmp_path / "plan.svg"))
    assert code == 3 and out.startswith(TEXT) and err.count("\n") == 1 and "the plan above is whole" in err


def test_a_picture_in_what_is_no_folder_is_refused_before_the_work(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = said(capsys, picture=str(tmp_path / "file" / "plan.svg"))
    assert code == 2 and out == "" and err.count("\n") == 1


def test_a_folder_is_no_picture(capsys, tmp_path):
    (tmp_path / "folder.svg").mkdir()
    code, out, err = said(capsys, picture=str(tmp_path / "folder.svg"))
    assert code == 2 and out == "" and "this is a folder" in err


def test_code_is_printed_instead(capsys):
    code, out, _ = said(capsys, code=True, memory="1MB")
    assert code == 0 and out.endswith("print(lt.plan(src, dst, memory=1000000))\n") and out.count("\n") == 4


def test_a_price_that_fails_on_the_way_is_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = (
        "def price(move):\n    if move.kind == 'reduce_scatter':\n        raise ValueError('never')\n    return 1.0\n"
    )
    (tmp_path / "command_price.py").write_text(body)
    monkeypatch.setattr("sys.path", [*os.sys.path])
    code, out, err = said(capsys, by="command_price:price")
    assert code == 2 and out == "" and "it raises ValueError: never" in err and err.count("\n") == 1


@pytest.fixture
def price(tmp_path, monkeypatch):
    """Writes a module with a price, from the folder that is then the working one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])

    def write(name, body):
        (tmp_path / f"{name}.py").write_text(body)
        return f"{name}:price"

    return write


@pytest.mark.parametrize(("name", "body", "problem"), [
    ("command_exits", "raise SystemExit(0)", "it raises SystemExit: 0."),
    ("command_mute", "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})", "it raises command_mute.Mute: <"),
    ("command_dear", "return 10**5000", "it returns more than 1e+30 for all_gather of 64 bytes."),
    ("command_far", "return 1e300", "it returns 1e+300 for all_gather of 64 bytes."),
    ("command_moody", "return next(ANSWERS)", "since a second call returns something else: "),
], ids=lambda words: words[:13])  # fmt: skip
def test_a_price_with_a_fault_is_one_sentence(capsys, price, name, body, problem):
    by = price(name, f"import itertools\nANSWERS = itertools.count()\ndef price(move):\n    {body}\n")
    code, out, err = said(capsys, text="f32[16] @ dp=2: S(0) -> R", by=by)
    assert (code, out) == (2, "") and problem in err and err.count("\n") == 1 and "Odd(" not in err


def test_what_a_price_prints_is_no_part_of_the_plan(capsys, price):
    by = price("command_chatty", "print('loading')\ndef price(move):\n    print('asked')\n    return 1\n")
    code, out, err = said(capsys, by=by, as_json=True)
    assert code == 0 and json.loads(out)["unit"] == "" and err.startswith("loading\nasked\n")


@pytest.mark.parametrize("options", [{}, {"as_json": True}, {"code": True}], ids=str)
def test_no_one_reading_any_longer_is_no_fault_and_a_full_disk_is(capfd, monkeypatch, options):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert run(wanted(**options)) == 0
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as out:
            monkeypatch.setattr("sys.stdout", out)
            assert run(wanted(**options)) == 3
        assert capfd.readouterr().err == "localtensor: cannot write to standard output: No space left on device.\n"


def test_without_any_standard_output_there_is_the_exit_code(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    assert run(wanted()) == 0 and run(wanted(memory="1")) == 1


def test_the_largest_tensor_that_torch_counts_is_planned(capsys):
    code, out, _ = said(capsys, text=f"u8[{2**63 - 1}] @ dp=2: S(0) -> R", dtensor=True, picture="-")
    assert code == 0 and out.count("DTensor") == 2 and " EB" in out


def test_signs_of_a_terminal_without_unicode(capsys, monkeypatch):
    monkeypatch.setattr(plan_command.Console, "encoding", property(lambda self: "ascii"))
    assert said(capsys, picture="-")[1].isascii()

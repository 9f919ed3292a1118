import json
import os
from xml.etree import ElementTree as ET

import pytest

from strategies import plan_command
from strategies.plan_command import Wanted, run

TEXT = "f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)"
PLAIN = Wanted(TEXT, "time", "", "", "", 8, "", (), True, False, "", False, False)


def wanted(**changes):
    return Wanted(**{**{name: getattr(PLAIN, name) for name in Wanted.__slots__}, **changes})


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
    {"text": "\ud800"}, {"picture": "\ud800.gif"},
], ids=ascii)  # fmt: skip
def test_what_cannot_be_followed_is_one_sentence_and_usage(capsys, changes):
    code, out, err = said(capsys, **changes)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and len(err.split(": ")) >= 4 and err.endswith(".\n")


def test_a_limit_that_no_plan_meets_is_exit_code_1_and_says_what_is_needed(capsys):
    code, out, err = said(capsys, memory="10")
    assert code == 1 and out == "" and err.count("\n") == 1 and err.startswith("plan: memory: ")


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


def test_a_picture_that_cannot_be_written_is_code_3_and_the_plan_is_there(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = said(capsys, picture=str(tmp_path / "file" / "plan.svg"))
    assert code == 3 and out.startswith(TEXT) and err.count("\n") == 1 and "the plan above is whole" in err


def test_a_folder_is_no_picture(capsys, tmp_path):
    (tmp_path / "folder.svg").mkdir()
    code, out, err = said(capsys, picture=str(tmp_path / "folder.svg"))
    assert code == 2 and out == "" and "this is a folder" in err


def test_code_is_printed_instead(capsys):
    code, out, _ = said(capsys, code=True, memory="1MB")
    assert code == 0 and out.endswith("print(plan(src, dst, memory=1000000))\n") and out.count("\n") == 5


def test_a_price_that_fails_on_the_way_is_one_sentence(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = (
        "def price(move):\n    if move.kind == 'reduce_scatter':\n        raise ValueError('never')\n    return 1.0\n"
    )
    (tmp_path / "command_price.py").write_text(body)
    monkeypatch.setattr("sys.path", [*os.sys.path])
    code, out, err = said(capsys, by="command_price:price")
    assert code == 2 and out == "" and "it raises ValueError: never" in err and err.count("\n") == 1


def test_signs_of_a_terminal_without_unicode(capsys, monkeypatch):
    monkeypatch.setattr(plan_command.Console, "encoding", property(lambda self: "ascii"))
    assert said(capsys, picture="-")[1].isascii()

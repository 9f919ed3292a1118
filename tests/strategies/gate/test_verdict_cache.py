import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.base.atomic_files import write_whole
from strategies.gate import verdict_cache
from strategies.gate.verdict_cache import VerdictCache, lines_by_overload, tool_digest
from strategies.model.settings import Settings

OP, OTHER = "my.scale.default", "my.shift.default"
USERS = Settings(rules="my_rules", folder="/")
TORCHS = Settings(patterns=("cumprod",))
BEGIN = {"ops": [OP, OTHER]}


def unit(op, *rules, **more):
    told = {"kind": "unit", "unit": f"{op} alone real 2", "samples": 1, "tried": 1, **more}
    return told | ({"suspects": {rule: [] for rule in rules}} if rules else {})


def settled(rule, **more):
    return {"kind": "settled", "rule": rule, "verdict": "cleared", **more}


LINES = [unit(OP, f"{OP}: S(0) -> S(0)"), unit(OTHER), settled(f"{OP}: S(0) -> S(0)")]
BOTH = frozenset({OP, OTHER})


@pytest.fixture
def cache(tmp_path):
    return VerdictCache(tmp_path / ".localtensor-cache", USERS, "content of {}".format, "one")


@pytest.fixture
def full(cache):
    assert cache.keep(BEGIN, LINES, BOTH) == ""
    return cache


def files_of(cache):
    return sorted(cache.folder.glob("*.json"))


# There and back.


def test_what_an_equal_run_wrote_is_there_again(full):
    assert [full.lines(op) for op in (OP, OTHER, "my.third.default")] == [[LINES[0], LINES[2]], [LINES[1]], None]


def test_an_empty_cache_knows_nothing_and_makes_no_folder(cache):
    assert (cache.lines(OP), cache.ops()) == (None, None)
    assert not cache.folder.exists()


def test_a_cache_keeps_itself_out_of_git_and_holds_json_alone(full):
    assert (full.folder / ".gitignore").read_text() == "*\n"
    assert {path.suffix for path in full.folder.iterdir()} == {".json", ""}
    assert all(isinstance(json.loads(path.read_text()), dict) for path in files_of(full))


def test_which_run_wrote_a_line_is_not_kept(cache):
    cache.keep(BEGIN, [{**line, "run": "a name"} for line in LINES], BOTH)
    assert cache.lines(OP) == [LINES[0], LINES[2]]


def test_an_overload_that_was_not_tried_to_the_end_is_not_kept(cache):
    cache.keep(BEGIN, LINES, {OTHER})
    assert (cache.lines(OP), cache.lines(OTHER)) == (None, [LINES[1]])


def test_the_overloads_that_patterns_reach_are_kept_for_torchs_own_rules(cache):
    own = replace(cache, settings=TORCHS)
    own.keep(BEGIN, LINES, BOTH)
    assert own.ops() == [OP, OTHER]
    assert replace(own, settings=Settings(patterns=("cumsum",))).ops() is None


# Whatever an answer depends on.


@pytest.mark.parametrize("change", [
    {"settings": replace(USERS, seed=1)}, {"settings": replace(USERS, ranks=(2,))}, {"tool": "another"},
    {"settings": replace(USERS, dtypes=("float64",))}, {"settings": replace(USERS, meshes=((2, 2),))},
    {"settings": replace(USERS, pairs=True)}, {"settings": replace(USERS, rules="other_rules")},
    {"settings": TORCHS}, {"digest": "edited {}".format},
])  # fmt: skip
def test_another_question_is_not_answered(full, change):
    assert full.lines(OP) is not None
    assert replace(full, **change).lines(OP) is None


@pytest.mark.parametrize("change", [
    {"settings": replace(USERS, workers=7)}, {"settings": replace(USERS, only=(OP,))},
    {"settings": replace(USERS, until=5.0)}, {"beside": ("aten.add.Tensor",)},
])  # fmt: skip
def test_what_an_answer_does_not_depend_on_does_not_matter(full, change):
    assert replace(full, **change).lines(OP) == full.lines(OP) != None  # noqa: E711 - neither may be None


def test_samples_of_torchs_own_overloads_depend_on_those_beside_them(cache):
    aten = replace(cache, beside=("aten.add.Tensor",))
    aten.keep(BEGIN, [unit("aten.add.Tensor")], {"aten.add.Tensor"})
    assert aten.lines("aten.add.Tensor") is not None
    assert replace(aten, beside=("aten.add.Tensor", "aten.sub.Tensor")).lines("aten.add.Tensor") is None


def test_an_overload_whose_content_cannot_be_known_is_neither_kept_nor_found(cache):
    blind = replace(cache, digest=lambda op: None if op == OP else "known")
    blind.keep(BEGIN, LINES, BOTH)
    assert (blind.lines(OP), blind.lines(OTHER)) == (None, [LINES[1]])


def test_a_torch_that_may_change_under_its_version_is_not_remembered(cache, monkeypatch):
    monkeypatch.setattr(verdict_cache.torch, "__file__", str(Path("pytorch") / "torch" / "__init__.py"))
    assert tool_digest() == ""
    unknown = replace(cache, tool="")
    unknown.keep(BEGIN, LINES, BOTH)
    assert files_of(unknown) == [] and unknown.lines(OP) is None


@pytest.mark.parametrize(("where", "name"), [("torch", "__version__"), ("platform", "python_version")])
def test_another_torch_or_python_is_another_judge(where, name, monkeypatch):
    before = tool_digest()
    changed = "9.9" if name == "__version__" else lambda: "9.9"
    monkeypatch.setattr(getattr(verdict_cache, where), name, changed)
    assert before and tool_digest() != before


def test_another_version_of_anything_installed_is_another_judge(monkeypatch):
    class Other:
        def __init__(self, version):
            self.version = version

        def read_text(self, file):
            return f"Name: torchvision\nVersion: {self.version}\n" if file == "PKG-INFO" else None

    installed = list(verdict_cache.distributions())
    names = []
    for version in ("9.8", "9.9", "9.9"):
        monkeypatch.setattr(verdict_cache, "distributions", [*installed, Other(version)].copy)
        names.append(tool_digest())
    assert names[0] != names[1] == names[2]


def test_an_edit_of_this_tool_makes_it_another_judge(tmp_path, monkeypatch):
    (tmp_path / "room.py").write_text("x = 1\n")
    monkeypatch.setattr(verdict_cache, "__file__", str(tmp_path / "gate" / "verdict_cache.py"))
    before = tool_digest()
    (tmp_path / "room.py").write_text("x = 2\n")
    assert tool_digest() != before


def test_the_judge_has_the_same_name_in_the_next_run():
    assert tool_digest() == tool_digest() != ""


# What hangs together is not taken apart.


def test_a_verdict_that_hangs_on_that_of_another_overload_is_not_kept():
    lines = [unit(OP, "first"), unit(OTHER, "second"), settled("first", same_as="second"), settled("second")]
    assert sorted(lines_by_overload(lines, BOTH)) == [OTHER]


def test_a_verdict_that_hangs_on_another_of_the_same_overload_is_kept():
    lines = [unit(OP, "first", "second"), settled("first", same_as="second"), settled("second")]
    assert lines_by_overload(lines, BOTH) == {OP: lines}


def test_a_program_is_known_by_the_unit_that_suspected_it():
    lines = [unit(OP, f"{OP} on (2, 2): (S(0), R)"), unit(OTHER), settled(f"{OP} on (2, 2): (S(0), R)")]
    assert lines_by_overload(lines, BOTH)[OP] == [lines[0], lines[2]]


# Files that something else has touched.

SPOILED = {
    "cut": lambda text: text[: len(text) // 2], "empty": lambda _: "", "a list": lambda _: "[]",
    "no text": lambda _: "\udcff", "deep": lambda _: "[" * 100_000,
    "another format": lambda text: text.replace('"format":1', '"format":2'),
    "another verdict": lambda text: text.replace('"tried":1', '"tried":2'),
    "no value": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "value"}),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_file_is_as_none_and_is_written_anew(full, how):
    for path in files_of(full):
        path.write_bytes(SPOILED[how](path.read_text()).encode(errors="surrogateescape"))
    assert [full.lines(op) for op in (OP, OTHER)] == [None, None]
    full.keep(BEGIN, LINES, BOTH)
    assert None not in [full.lines(op) for op in (OP, OTHER)]


def test_one_overloads_file_does_not_pass_for_anothers(full):
    first, second = files_of(full)
    first.write_text(second.read_text())
    assert [full.lines(op) for op in (OP, OTHER)].count(None) == 1


def test_a_folder_that_cannot_be_written_is_reported_and_stops_nothing(cache):
    cache.folder.write_text("a file")
    said = cache.keep(BEGIN, LINES, BOTH)
    assert said.startswith(f"{cache.folder} cannot be written (") and said.endswith("): verdicts are not kept")
    assert cache.lines(OP) is None


def test_a_cache_does_not_grow_without_end(cache, monkeypatch):
    monkeypatch.setattr(verdict_cache, "MOST", 4)
    for number in range(4):
        write_whole(cache.folder / f"old{number}.json", "{}")
        os.utime(cache.folder / f"old{number}.json", (number, number))
    cache.keep(BEGIN, LINES, BOTH)
    assert len(files_of(cache)) == 2 and None not in [cache.lines(op) for op in (OP, OTHER)]


def test_keys_are_names_of_files(full):
    assert all(len(path.stem) == 40 and path.stem.isalnum() for path in files_of(full))
    assert Path(verdict_cache.__file__).name == "verdict_cache.py"

import datetime as dt
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import strategies
from strategies.base import atomic_files
from strategies.gate import baseline
from strategies.gate.baseline import BadBaseline, Baseline, BaselineEntry, FindingKey, as_text, read, write

SCHEMA = json.loads((Path(strategies.__file__).parent / "schema/baseline.json").read_text())
CUMPROD = FindingKey("aten.cumprod.default", "S(0) -> S(0)", "real", "1 axis")
SORT = FindingKey("aten.sort.default", "crashed", "any", "any")
DAY = dt.date(2027, 1, 31)
TWO = (BaselineEntry(CUMPROD, "torch#1", DAY), BaselineEntry(SORT, "it dies, not ours"))
ENTRY = {"op": "o", "rule": "r", "dtypes": "real", "mesh": "1 axis", "reason": "so it is"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "localtensor-baseline.json"


def write_json(path, *entries, **more):
    path.write_text(json.dumps({"format": 1, "torch": "2.13.0", "entries": list(entries), **more}))


def assert_refused(path, said):
    """One sentence that names the file; the file stays as it is."""
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(BadBaseline) as error:
        read(path)
    assert str(error.value) == f"localtensor gate: --baseline: {path}: {said}"
    assert before is None or path.read_bytes() == before


def check_schema(body):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(body)


# There and back.


def test_what_is_written_is_read_again(path):
    written = write(Baseline(path, entries=TWO), "2.13.0")
    assert read(path) == written == Baseline(path, "2.13.0", TWO, path.read_text())


def test_entries_stand_in_order_whatever_order_they_came_in(path):
    assert as_text(Baseline(path, entries=TWO), "2.13.0") == as_text(Baseline(path, entries=TWO[::-1]), "2.13.0")
    write_json(path, {**ENTRY, "op": "b"}, {**ENTRY, "op": "a"})
    assert [entry.key.op for entry in read(path).entries] == ["a", "b"]


def test_the_text_is_indented_and_ends_with_a_newline(path):
    text = as_text(Baseline(path, entries=TWO[1:]), "2.13.0")
    assert text == (
        '{\n  "format": 1,\n  "torch": "2.13.0",\n  "entries": [\n    {\n      "op": "aten.sort.default",\n'
        '      "rule": "crashed",\n      "dtypes": "any",\n      "mesh": "any",\n      "reason": "it dies, not ours"\n'
        "    }\n  ]\n}\n"
    )


def test_a_file_that_is_not_there_accepts_nothing(path):
    assert read(path) == Baseline(path) and read(path).text is None


@pytest.mark.parametrize("entries", [(), TWO], ids=["none", "two"])
def test_what_is_written_obeys_the_schema(path, entries):
    body = json.loads(as_text(Baseline(path, entries=entries), "2.13.0"))
    check_schema(body)
    assert len(body["entries"]) == len(entries)


def without(name):
    return {k: v for k, v in ENTRY.items() if k != name}


WRONG_ENTRIES = {
    "no reason": (without("reason"), "entry 2 (o: r) has no reason. Say its reason."),
    "an empty reason": ({**ENTRY, "reason": "  "}, "entry 2 (o: r) has no reason. Say its reason."),
    "a reason that is no text": ({**ENTRY, "reason": 7}, "entry 2 (o: r) has no reason. Say its reason."),
    "no op": (without("op"), "entry 2 (?: r) has no op. Say its op."),
    "no rule": (without("rule"), "entry 2 (o: ?) has no rule. Say its rule."),
    "no dtypes": (without("dtypes"), "entry 2 (o: r) has no dtypes. Say its dtypes."),
    "an unknown class": ({**ENTRY, "dtypes": "float64"},
        "entry 2 (o: r) has dtypes 'float64'. Choose of real, complex, integer, bool, any."),
    "an unknown kind of mesh": ({**ENTRY, "mesh": "(2, 2)"},
        "entry 2 (o: r) has mesh '(2, 2)'. Write '1 axis', '2 axes' and so on, or 'any'."),
    "a day that is none": ({**ENTRY, "expires": "2026-02-30"},
        "entry 2 (o: r) expires on '2026-02-30', which is no date. Write YYYY-MM-DD."),
    "a date in another form": ({**ENTRY, "expires": "30.1.2027"},
        "entry 2 (o: r) expires on '30.1.2027', which is no date. Write YYYY-MM-DD."),
    "a date that is no text": ({**ENTRY, "expires": 2027},
        "entry 2 (o: r) expires on 2027, which is no date. Write YYYY-MM-DD."),
    "a misspelled name": ({**ENTRY, "expire": "2027-01-01"},
        "entry 2 (o: r) has 'expire', which means nothing here. Write op, rule, dtypes, mesh, reason or expires."),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_ENTRIES)
def test_a_wrong_entry_is_named_and_the_schema_agrees(path, name):
    entry, said = WRONG_ENTRIES[name]
    write_json(path, {**ENTRY, "op": "first"}, entry)
    assert_refused(path, said)
    if name != "a day that is none":  # JSON schema knows the form of a date, not the calendar
        with pytest.raises(jsonschema.ValidationError):
            check_schema(json.loads(path.read_text()))


def test_an_entry_that_is_no_object_is_named(path):
    write_json(path, "aten.add.Tensor")
    assert_refused(path, "entry 1 is no object. Write op, rule, dtypes, mesh and reason.")


def test_half_a_character_is_refused_before_it_could_not_be_written(path):
    write_json(path, {**ENTRY, "reason": "\ud83d"})
    assert_refused(path, "entry 1 (o: r) has half a character in its reason. Write it anew.")


def test_the_same_key_twice_is_refused(path):
    write_json(path, ENTRY, {**ENTRY, "op": "p"}, {**ENTRY, "reason": "another"})
    assert_refused(path, "entries 1 and 3 are both of o: r (real, 1 axis). Keep one.")


# Files that are none of ours.

NO_BASELINE = "it is no baseline of localtensor. Name another file by --baseline."


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '"x"',
        '{"entries": []}',
        '{"format": 1, "torch": "2"}',
    ],
)
def test_a_foreign_file_is_refused(path, text):
    path.write_text(text)
    assert_refused(path, NO_BASELINE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "it is nested too deep"),
        ('{"format": ' + "1" * 5000 + "}", "it has a number of thousands of digits"),
    ],
)
def test_what_no_reader_can_hold_is_refused(path, text, said):
    path.write_text(text)
    assert_refused(path, f"{said}. Correct it, or name another file by --baseline.")


@pytest.mark.parametrize("number", [0, 2, "1", None, True, 1.0])
def test_a_format_of_another_time_is_refused(path, number):
    write_json(path, format=number)
    assert_refused(path, f"it has format {number!r}, not 1. Use the version of localtensor that wrote it.")


def test_a_name_that_means_nothing_is_refused(path):
    write_json(path, rules=[])
    assert_refused(path, "'rules' means nothing here. Write it by `localtensor gate --accept`.")


def test_a_version_of_torch_that_is_none_is_refused(path):
    write_json(path, torch=None)
    assert_refused(path, "it does not name its torch. Write it by `localtensor gate --accept`.")


def test_a_corrupt_file_is_refused_with_the_line(path):
    path.write_text('{\n  "format": 1,\n  "entries": [\n')
    assert_refused(path, "line 4 is no JSON (Expecting value). Correct it, or name another file by --baseline.")


def test_an_empty_file_is_refused(path):
    path.write_text("")
    assert_refused(path, "line 1 is no JSON (Expecting value). Correct it, or name another file by --baseline.")


def test_marks_of_a_merge_are_refused(path):
    path.write_text("{\n<<<<<<< HEAD\n=======\n>>>>>>> topic\n}")
    assert_refused(path, "a merge has left its marks in it. Resolve them, keeping the entries of both sides.")


def test_a_name_that_an_object_has_twice_is_refused(path):
    path.write_text('{"format": 1, "torch": "2.13.0", "entries": [], "entries": []}')
    assert_refused(path, "an object in it has 'entries' twice. Correct it, or name another file by --baseline.")


def test_bytes_that_are_no_text_are_refused(path):
    path.write_bytes(b"\xff\xfe\x00")
    assert_refused(path, "it is no text in UTF-8. Name a baseline, or remove the file.")


def test_a_folder_is_refused(path):
    path.mkdir()
    assert_refused(path, "it cannot be read (Is a directory). Name a file of yours.")


# Writing.


def test_a_file_that_changed_meanwhile_is_not_overwritten(path):
    write(Baseline(path, entries=TWO), "2.13.0")
    before = read(path)
    write(replace(before, entries=TWO[:1]), "2.13.0")
    there = path.read_bytes()
    with pytest.raises(BadBaseline, match="it changed while the gate ran"):
        write(replace(before, entries=()), "2.13.0")
    assert path.read_bytes() == there


def test_a_disk_that_is_full_leaves_what_was_there(path, monkeypatch):
    write(Baseline(path, entries=TWO), "2.13.0")
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files.os, "replace", full)
    with pytest.raises(BadBaseline, match=r"it cannot be written \(No space left on device\)"):
        write(replace(read(path), entries=()), "2.13.0")
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_behind_a_link_the_file_itself_is_written(path, tmp_path):
    real = tmp_path / "elsewhere.json"
    write(Baseline(real, entries=TWO), "2.13.0")
    path.symlink_to(real)
    write(replace(read(path), entries=TWO[:1]), "2.13.0")
    assert path.is_symlink() and len(read(real).entries) == 1


# As a value.


def test_entries_go_and_come_by_their_keys(path):
    held = Baseline(path, entries=TWO)
    assert held.without({SORT}).entries == TWO[:1]
    renewed = BaselineEntry(SORT, "still")
    assert held.also([renewed]).entries == (TWO[0], renewed)
    assert held.without({SORT}).also([TWO[1]]) == held
    assert held.without({TWO[0].key}).also([TWO[0]]) == held  # in the order of the file, whichever came last


def test_every_name_of_an_entry_is_in_the_schema():
    assert set(SCHEMA["properties"]["entries"]["items"]["properties"]) == {*baseline._NAMES, "expires"}

import json

import pytest

from strategies.base import journal
from strategies.base.journal import BadJournal
from strategies.model.settings import Settings
from strategies.model.verdict import plan_units, share
from strategies.sweep import aggregate
from strategies.sweep.aggregate import IncompleteRun, merged_run, planned_units
from tests.strategies.sweep.test_aggregate import RULE, line, settled, suspicion, unit

OPS = [f"aten.op{n}.default" for n in range(12)]
SHARDS = 3


def begun(shard, ops=OPS, **more):
    asked = Settings(("x",), ranks=(2,), journal="", shard=shard, **more).asked()
    return {"kind": "begin", "format": journal.FORMAT, **asked, "ops": ops, "trials": [["alone", [2]]], "ignored": []}


def lines_of(number, ops=OPS):
    units = plan_units([op for op in ops if share(op, SHARDS) == number - 1], [("alone", (2,))])
    return [line(one, tried=1, sound={one.op}) for one in units]


def written(path, begin, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in (begin, *lines)))
    return path


@pytest.fixture
def shards(tmp_path):
    return [written(tmp_path / f"{n}.jsonl", begun((n, SHARDS)), lines_of(n)) for n in range(1, SHARDS + 1)]


def refused(kind, paths):
    with pytest.raises(BadJournal) as error:
        merged_run(paths)
    assert type(error.value) is kind
    said = str(error.value)
    assert said.startswith("localtensor merge: JOURNAL: ") and "\n" not in said
    return said


def test_all_shards_together_are_the_whole(shards):
    begin, lines, cut = merged_run(shards)
    assert {one["unit"] for one in lines} == set(map(str, planned_units(begin)))
    assert (len(lines), begin["shard"], cut) == (len(planned_units(begin)), None, [])


def test_the_order_of_the_journals_does_not_matter(shards):
    (one, first, _), (other, again, _) = merged_run(shards), merged_run(shards[::-1])
    assert one == other
    assert sorted(map(json.dumps, first)) == sorted(map(json.dumps, again))


def test_what_was_merged_is_a_journal_of_the_whole_run(shards, tmp_path):
    begin, lines, _ = merged_run(shards)
    aggregate.write(tmp_path / "all.jsonl", begin, lines)
    assert merged_run([tmp_path / "all.jsonl"]) == (begin, lines, [])


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_a_shard_that_is_missing_is_named(lacking, shards):
    left = [path for n, path in enumerate(shards, 1) if n != lacking]
    said = refused(IncompleteRun, left)
    many = len(lines_of(lacking))
    assert f"{many} of 48 units are in none of the journals ({lines_of(lacking)[0]['unit']}, say; " in said
    assert f"shard {lacking}/3 is not among them). Run the other shards, or go on with those by --resume." in said


def test_all_shards_that_are_missing_are_named(shards):
    assert "; shard 1/3, 3/3 is not among them)" in refused(IncompleteRun, shards[1:2])


def test_a_unit_that_is_missing_is_named(shards, tmp_path):
    *rest, last = lines_of(2)
    written(shards[1], begun((2, SHARDS)), rest)
    assert f": 1 of 48 units are in none of the journals ({last['unit']}, say). " in refused(IncompleteRun, shards)


def test_a_shard_that_ran_nothing_is_a_gap(shards):
    written(shards[2], begun((3, SHARDS)), [])
    assert f": {len(lines_of(3))} of 48 units are in none of the journals" in refused(IncompleteRun, shards)


def test_a_shard_to_which_nothing_fell_is_no_gap(tmp_path):
    ops = [op for op in OPS if share(op, SHARDS) != 0]
    paths = [written(tmp_path / f"{n}", begun((n, SHARDS), ops), lines_of(n, ops)) for n in (1, 2, 3)]
    assert len(merged_run(paths)[1]) == 4 * len(ops)


def test_the_same_journal_twice_is_refused(shards):
    said = refused(IncompleteRun, [*shards, shards[1]])
    assert f"{shards[1]}: {lines_of(2)[0]['unit']} is in {shards[1]} as well. Name each journal once." in said


def test_a_unit_twice_in_one_journal_is_refused(shards):
    written(shards[0], begun((1, SHARDS)), [*lines_of(1), lines_of(1)[0]])
    assert f"is of '{lines_of(1)[0]['unit']}', as line 2 is" in refused(BadJournal, shards)


@pytest.mark.parametrize(("more", "said"), [
    ({"seed": 4}, "seed was 4, now 0"), ({"dtypes": ("bool",)}, "dtypes was ['bool'], now ["),
    ({"search": True}, "search was True, now False"), ({"rules": "mine"}, "rules was 'mine', now 'dtensor'"),
])  # fmt: skip
def test_a_shard_of_another_run_is_refused(more, said, shards):
    written(shards[1], begun((2, SHARDS), **more), lines_of(2))
    assert f"{shards[1]}: it is of another run than {shards[0]}: {said}" in refused(BadJournal, shards)


def test_a_shard_of_another_torch_is_refused(shards):
    written(shards[1], {**begun((2, SHARDS)), "torch": "2.11.0"}, lines_of(2))
    assert "torch was '2.11.0', now '2." in refused(BadJournal, shards)


def test_a_shard_with_another_plan_is_refused(shards):
    written(shards[1], begun((2, SHARDS), [*OPS, "aten.zzz.default"]), lines_of(2))
    assert "1 overloads are in one plan only (aten.zzz.default, say). Merge one run." in refused(BadJournal, shards)


def test_a_file_that_is_no_journal_is_refused(shards, tmp_path):
    (tmp_path / "text").write_text("hello\n")
    assert "text: line 1 is no line of a journal" in refused(BadJournal, [*shards, tmp_path / "text"])
    assert "none: it cannot be read (No such file or directory)" in refused(BadJournal, [tmp_path / "none"])


def test_a_line_that_was_cut_is_reported_and_its_unit_is_missing(shards):
    shards[0].write_bytes(shards[0].read_bytes()[:-5])
    assert "1 of 48 units are in none of the journals" in refused(IncompleteRun, shards)
    with shards[0].open("ab") as end:
        end.write(b"\n")  # now it is a line that is none, at the end
    assert f"({lines_of(1)[-1]['unit']}, say)" in refused(IncompleteRun, shards)


def test_a_cut_line_that_is_no_unit_is_reported(shards):
    with shards[0].open("ab") as end:
        end.write(b'{"kind":"set')
    assert merged_run(shards)[2] == [f"{shards[0]}: its last line was cut after 12 bytes; that unit is tried again"]


# Confirmation.


@pytest.mark.parametrize("kept", ["suspects", "whole"])
def test_a_suspect_that_no_one_settled_is_a_gap(kept, tmp_path):
    op = unit().op
    units = [line(one, **{kept: suspicion()}) for one in plan_units([op], [("alone", (2,))])]  # each unit suspects it
    path = written(tmp_path / "x", begun(None, [op]), units)
    assert f"1 suspected rules were not confirmed yet ({RULE}, say). Go on with it by --resume." in refused(
        IncompleteRun, [path]
    )
    written(path, begun(None, [op]), [*units, settled()])
    assert len(merged_run([path])[1]) == 5


def test_what_only_a_real_run_can_judge_is_not_settled_where_there_is_none(tmp_path):
    op = unit().op
    units = [
        line(one, **({"whole": suspicion()} if one == unit() else {})) for one in plan_units([op], [("alone", (2,))])
    ]
    path = written(tmp_path / "x", begun(None, [op], confirm="none"), units)
    assert len(merged_run([path])[1]) == 4

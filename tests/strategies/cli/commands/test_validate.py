import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from localtensor.errors import LocalTensorError
from strategies.base.journal import DiskFull
from strategies.base.options import BadOption
from strategies.cli.commands import validate
from strategies.cli.commands.validate import run
from strategies.cli.options import ValidateOptions
from strategies.model.settings import DEFAULT_DTYPES
from strategies.model.verdict import Counts, Report
from strategies.sweep.report import text_and_json
from tests.strategies import users
from tests.strategies.sweep.report.test_text_and_json import FULL, check_schema

BASE = ValidateOptions(ranks=(2,), dtypes=("float64",), confirm="none", workers=1, quiet=True)
CLEAN = Report("2.13.0", 0, (2,), "none", Counts(sound=1, instances=1))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """In a folder of one's own, and everything that a run changes put back."""
    monkeypatch.chdir(tmp_path)
    with users.undone():
        yield


@pytest.fixture
def judge(monkeypatch):
    """`judge(report)` or `judge(error)`: what comes of the work, instead of the work.  It notes who asked."""
    asked = []

    def answer(what):
        def validate(settings, progress):
            asked.append(settings)
            if isinstance(what, BaseException):
                raise what
            return what

        monkeypatch.setattr("strategies.sweep.session.validate", validate)
        return asked

    return answer


def ran(capsys, **given):
    try:
        code = run(replace(BASE, **given))
    except BadOption as error:  # as the command line does
        code = 2
        print(error, file=sys.stderr)
    return code, *capsys.readouterr()


def assert_usage(capsys, said, **given):
    """Exit code 2 and this sentence alone; nothing was written."""
    before = sorted(Path.cwd().rglob("*"))
    assert ran(capsys, **given) == (2, "", f"localtensor validate: {said}\n")
    assert sorted(p for p in Path.cwd().rglob("*") if p.name != "__pycache__" and p.suffix != ".pyc") == before


# The table.


def test_0_nothing_wrong(capsys):
    rules = users.write(Path.cwd(), "code_0", 'op("twice", lambda x: x * 2, (R, R), (S0, S0))')
    code, out, errors = ran(capsys, rules=rules, json=Path("r.json"))
    assert (code, errors) == (0, "")
    assert "2 sound, 0 unsound" in out
    body = json.loads(Path("r.json").read_text())
    check_schema(body)
    assert body["exit_code"] == 0


def test_1_an_unsound_rule(capsys, judge):
    judge(replace(FULL, ignored=()))
    code, out, _ = ran(capsys, ops=("add",))
    assert code == 1
    assert "Unsound: confirmed to give wrong results (1)" in out


def test_1_a_registration_that_torch_ignores(capsys):
    body = "register_sharding(torch.ops.aten.add.Tensor)(lambda *_, **__: [])"
    code, out, _ = ran(capsys, rules=users.write(Path.cwd(), "code_1", body))
    assert code == 1
    assert " ".join(out.split()).startswith(
        "ignored aten.add.Tensor: torch asks this op's single-dim strategy first, so the registration is never used. "
        "Use register_single_dim_strategy."
    )


def test_2_nothing_named(capsys):
    assert_usage(capsys, "OP: nothing named: there is nothing to try. Name an op, or pass --all or --rules.")


def test_2_an_unknown_op(capsys):
    code, out, errors = ran(capsys, ops=("cumprodd",), json=Path("r.json"))
    assert (code, out) == (2, "")
    assert errors.startswith("localtensor validate: OP: 'cumprodd': no op and no overload has this name. Did you mean ")
    assert not Path("r.json").exists()


def test_2_a_dtype_that_the_op_does_not_take(capsys):
    said = "--dtype: complex64: no op that you named takes it on cpu. They take bool, int32, int64, int8, uint8."
    assert_usage(capsys, said, ops=("bitwise_and",), dtypes=("complex64",), json=Path("r.json"))


def test_2_a_rules_module_that_raises(capsys):
    Path("code_2.py").write_text("1 / 0\n")
    said = f"importing it raises ZeroDivisionError: division by zero ({Path.cwd()}/code_2.py, line 1). Fix that first."
    assert_usage(capsys, f"--rules: code_2: {said}", rules="code_2")


def test_2_a_setting_that_cannot_be(capsys):
    said = "--ranks: 1: a rule needs at least 2 ranks to be wrong. Pass --ranks 2 or more."
    assert_usage(capsys, said, ops=("add",), ranks=(2, 1))


def test_3_nothing_tested(capsys):
    body = 'def no(x):\n    raise ValueError("never")\n\nop("no", no, (R, R))'
    code, out, _ = ran(capsys, rules=users.write(Path.cwd(), "code_3", body), json=Path("r.json"))
    assert code == 3
    assert "Nothing was tested: that is not a pass." in out
    assert json.loads(Path("r.json").read_text())["exit_code"] == 3


def test_3_our_own_refusal_in_the_middle_of_the_work(capsys, judge):
    judge(LocalTensorError("Pool.call: [bold]: it did not start. Start it."))
    assert ran(capsys, ops=("add",), json=Path("r.json")) == (
        3, "", "localtensor itself failed: Pool.call: [bold]: it did not start. Start it.\n",
    )  # fmt: skip
    assert not Path("r.json").exists()


def test_3_a_file_that_cannot_be_written_after_all(capsys, judge, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "r.json")

    judge(CLEAN)
    monkeypatch.setattr(os, "replace", full)
    code, out, errors = ran(capsys, ops=("add",), json=Path("r.json"))
    assert (code, errors) == (3, "localtensor: cannot write r.json: No space left on device.\n")
    assert "torch 2." in out  # what was found is shown all the same
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("ours"), OSError(12, "Cannot allocate memory"), KeyboardInterrupt()]
)
def test_what_is_no_refusal_goes_on_to_the_caller_and_nothing_is_written(error, judge):
    judge(error)
    with pytest.raises(type(error)):
        run(replace(BASE, ops=("add",), json=Path("r.json")))
    assert list(Path.cwd().iterdir()) == []


# Before the work.


@pytest.mark.parametrize(("options", "said"), [
    ({"json": Path("folder")}, "--json: folder: this is a folder. Name a file."),
    ({"json": Path("no/r.json")}, "--json: no/r.json: its folder is not there. Make the folder first, or name another."),
    ({"repro": Path("file")}, "--repro: file: this is a file. Name a folder; it is made if it is not there."),
    ({"repro": Path("file/a/b")}, "--repro: file/a/b: {here}/file takes no files. Name a folder below one of yours."),
], ids=["json onto a folder", "json into a missing folder", "repro onto a file", "repro below a file"])  # fmt: skip
def test_a_file_that_cannot_be_made_is_refused_before_the_work(options, said, capsys, judge):
    asked = judge(CLEAN)
    Path("folder").mkdir()
    Path("file").write_text("")
    assert_usage(capsys, said.format(here=Path.cwd()), ops=("add",), **options)
    assert asked == []


@pytest.mark.parametrize(("options", "said"), [
    ({"json": Path("r.json")}, "--json: r.json: {here} takes no files. Name a file in a folder of yours."),
    ({"repro": Path("a/b")}, "--repro: a/b: {here} takes no files. Name a folder below one of yours."),
], ids=["json", "repro"])  # fmt: skip
def test_a_file_where_one_may_not_write_is_refused_before_the_work(options, said, capsys, judge, monkeypatch):
    asked = judge(CLEAN)
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode == os.W_OK and Path(path) == Path.cwd()))
    assert_usage(capsys, said.format(here=Path.cwd()), ops=("add",), **options)
    assert asked == []


# The work.


def test_settings_are_what_was_chosen(judge):
    asked = judge(CLEAN)
    run(replace(BASE, ops=("add",), search=True, ranks=(3, 2, 3), dtypes=(), seed=4, workers=5))
    (settings,) = asked
    assert (settings.patterns, settings.search, settings.ranks, settings.seed) == (("add",), True, (3, 2), 4)
    assert (settings.dtypes, settings.workers) == (DEFAULT_DTYPES, 5)
    assert settings.folder == str(Path.cwd())


def test_scripts_and_json_are_written_and_agree(judge, capsys):
    judge(FULL)
    code, out, _ = ran(capsys, ops=("add",), json=Path("r.json"), repro=Path("a/scripts"))
    (script,) = Path("a/scripts").iterdir()
    assert (code, json.loads(Path("r.json").read_text())["findings"][0]["repro"]) == (1, str(script))
    assert f"run it: torchrun --nproc-per-node 2 {script}" in out


def test_an_old_report_is_replaced_only_at_the_end(judge, capsys):
    Path("r.json").write_text("old")
    judge(LocalTensorError("no"))
    assert ran(capsys, ops=("add",), json=Path("r.json"))[0] == 3
    assert Path("r.json").read_text() == "old"
    judge(CLEAN)
    assert ran(capsys, ops=("add",), json=Path("r.json"))[0] == 0
    assert Path("r.json").read_text() == text_and_json.as_json(CLEAN)


def test_a_word_like_an_emoji_is_shown_as_it_is(judge, capsys):
    judge(LocalTensorError("at x:warning:y [red]"))
    assert ran(capsys, ops=("add",))[2] == "localtensor itself failed: at x:warning:y [red]\n"


# Meshes, shards and journals.


@pytest.mark.parametrize(("ranks", "mesh", "axes", "several"), [
    ((), (), (2, 3, 4), ()), ((), ("2,2",), (2, 3, 4), ((2, 2),)), ((), ("2",), (2,), ()), ((3,), ("2", "3"), (3, 2), ()),
    ((2,), ("2,3", "2,2,2", "2,3"), (2,), ((2, 3), (2, 2, 2))), ((), ("1,4",), (2, 3, 4), ((1, 4),)),
])  # fmt: skip
def test_meshes_are_of_one_axis_or_of_several(ranks, mesh, axes, several, judge):
    asked = judge(CLEAN)
    run(replace(BASE, ops=("add",), ranks=ranks, mesh=mesh))
    assert (asked[0].ranks, asked[0].meshes) == (axes, several)


@pytest.mark.parametrize(("mesh", "said"), [
    ("x", "--mesh: x: this is no mesh. Write the size of each axis: --mesh 2,2."),
    ("2,", "--mesh: 2,: this is no mesh. Write the size of each axis: --mesh 2,2."),
    ("2x2", "--mesh: 2x2: this is no mesh. Write the size of each axis: --mesh 2,2."),
    ("", "--mesh: : this is no mesh. Write the size of each axis: --mesh 2,2."),
    ("2,0", "--mesh: 2,0: this is no mesh of several axes. Write --mesh 2,2 or --mesh 2,2,2."),
    ("2,-2", "--mesh: 2,-2: this is no mesh of several axes. Write --mesh 2,2 or --mesh 2,2,2."),
    ("1,1", "--mesh: 1,1: it has 1 ranks. Take a mesh of 2 to 64 ranks."),
    ("8,9", "--mesh: 8,9: it has 72 ranks. Take a mesh of 2 to 64 ranks."),
    ("1", "--ranks: 1: a rule needs at least 2 ranks to be wrong. Pass --ranks 2 or more."),
])  # fmt: skip
def test_2_a_mesh_that_is_none(mesh, said, capsys):
    assert_usage(capsys, said, ops=("add",), mesh=(mesh,))


@pytest.mark.parametrize(("shard", "said"), [
    ("x", "this is no shard. Write --shard 1/4 for the first of four."),
    ("1", "this is no shard. Write --shard 1/4 for the first of four."),
    ("1/", "this is no shard. Write --shard 1/4 for the first of four."),
    ("-1/4", "this is no shard. Write --shard 1/4 for the first of four."),
    ("²/4", "this is no shard. Write --shard 1/4 for the first of four."),
    ("0/4", "there is no such shard. Write --shard 1/4 to --shard 4/4."),
    ("5/4", "there is no such shard. Write --shard 1/4 to --shard 4/4."),
    ("0/0", "there is no such shard. Write --shard 1/4 to --shard 4/4."),
])  # fmt: skip
def test_2_a_shard_that_is_none(shard, said, capsys):
    assert_usage(capsys, f"--shard: {shard}: {said}", ops=("add",), shard=shard, journal=Path("j"))


def test_2_a_shard_of_5000_digits_is_refused_in_few_words(capsys):
    code, out, err = ran(capsys, ops=("add",), shard="1/" + "9" * 5000, journal=Path("j"))
    assert (code, out) == (2, "") and err.startswith("localtensor validate: --shard: 1/9999")
    assert err.endswith(": this is no shard. Write --shard 1/4 for the first of four.\n") and len(err) < 1200


def test_2_a_shard_without_a_journal(capsys):
    said = "--shard: 1/4: without a journal it cannot be merged with the others. Name a journal: --journal FILE."
    assert_usage(capsys, said, ops=("add",), shard="1/4")


def test_2_nothing_to_go_on_with(capsys):
    said = "--resume: given: there is no journal to go on with. Name it: --journal FILE."
    assert_usage(capsys, said, ops=("add",), resume=True)


def test_2_a_journal_that_is_there(capsys):
    Path("j").write_text("mine\n")
    said = "--journal: j: it is there already. Go on with it by --resume, or name another file."
    assert_usage(capsys, said, ops=("add",), journal=Path("j"))
    said = "--journal: j: line 1 is no line of a journal. It was changed by something else: start anew."
    assert_usage(capsys, said, ops=("add",), journal=Path("j"), resume=True)
    assert Path("j").read_text() == "mine\n"


def test_3_a_disk_without_room(capsys, judge):
    judge(DiskFull(Path("j"), "a line could not be written (full); the 3 before it are whole", "Make room."))
    said = "--journal: j: a line could not be written (full); the 3 before it are whole. Make room."
    code, out, errors = ran(capsys, ops=("add",), journal=Path("j"), json=Path("r.json"))
    assert (code, out, errors) == (3, "", f"localtensor validate: {said}\n")
    assert not Path("r.json").exists()


def test_all_that_was_chosen_of_a_sweep_reaches_the_settings(judge):
    asked = judge(CLEAN)
    run(replace(BASE, everything=True, pairs=True, journal=Path("j"), resume=True, shard="2/4", executor="dask"))
    (settings,) = asked
    assert (settings.pairs, settings.journal, settings.resume) == (True, Path("j"), True)
    assert (settings.shard, settings.executor) == ((2, 4), "dask")


@pytest.mark.parametrize("fails", ["json", "repro"])
def test_what_is_reported_of_a_report_may_fail_to_be_written(fails, capsys):
    Path("file").write_text("")
    code = validate.deliver(FULL, *(Path("file/x") if fails == name else None for name in ("json", "repro")))
    assert code == 3
    assert capsys.readouterr().err.startswith("localtensor: cannot write ")

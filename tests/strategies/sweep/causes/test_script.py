"""The script of a cause: it shows the fault where there is one, and says so where there is none."""

import ast
import logging
import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from localtensor._util import pickling
from strategies.model.cause import FAILED, RIGHT, SHOWS
from strategies.model.rule import Call, Leaf
from strategies.programs.run import follow_ups
from strategies.sweep.causes.cause import Case
from strategies.sweep.causes.reach import severity
from strategies.sweep.causes.script import _SCRIPT, check_on_rank, run, run_first_that_shows, scripts_of
from strategies.torch_api.rank_runs import RankProcesses
from tests.strategies.sweep.causes.programs import CUMPROD, program

FINE = program(Call("aten.mul.Scalar", (Leaf(0), 2.0)), torch.arange(1.0, 5.0), inputs=((Shard(0),),))


def case(given, raises=False):
    return Case(given, "", severity(given, raises))


@pytest.fixture(scope="module")
def processes():
    with RankProcesses("gloo") as made:
        yield made


def test_a_fault_shows_in_a_few_lines(processes):
    found = run_first_that_shows(processes, case(CUMPROD), "cumprod", "about", "cumprod.py")
    if found.verdict == RIGHT:
        pytest.skip("this torch is right")
    assert found.verdict == SHOWS
    assert found.lines.count("\n") <= 4 and "torch.cumprod(d0, -1)" in found.lines
    assert "12." in found.prints and "24." in found.prints


def test_a_piece_of_a_wrong_shape_shows_although_the_whole_is_right(processes):
    kept = Call("aten.amax.default", (Leaf(0), [], True))
    given = program(kept, torch.arange(1.0, 5.0), inputs=((Shard(0),),))
    found = run_first_that_shows(processes, case(given), "amax", "about", "amax.py")
    if not torch.__version__.startswith("2.13"):
        pytest.skip("other versions may place it otherwise")
    assert found.verdict == SHOWS and "holds shape (1,)" in found.prints


def test_the_last_argument_of_an_op_that_returns_nothing_is_compared_too(processes):
    x = torch.arange(1.0, 5.0)
    given = program(Call("aten._foreach_neg_.default", ([Leaf(0), Leaf(1)],)), x, x, inputs=((Shard(0),), (Shard(0),)))
    text = next(scripts_of(case(given), "a", "about", "script.py")).script
    assert run(processes, text, 2, raises=False)[0] == RIGHT
    assert run(processes, text.replace("return any(", "d1.add_(1); return any("), 2, raises=False)[0] == SHOWS


@pytest.mark.parametrize("then", [*follow_ups.RESULT_STEPS, *follow_ups.VIEW_STEPS, *follow_ups.GRADS])
def test_a_script_imports_what_its_functions_name(then):
    given = program(
        Call("aten.neg.default", (Leaf(0),)), torch.arange(1.0, 9.0).view(4, 2), inputs=((Shard(0),),), then=then
    )
    for one in scripts_of(case(given), "neg", "about", "neg.py"):
        scope = {"__name__": "neg"}
        exec(compile(one.script, "neg.py", "exec"), scope)  # a NameError if a name is missing
        assert {"check", "differs", "main"} <= set(scope)


def test_a_script_that_shows_nothing_says_so(processes):
    found = run_first_that_shows(processes, case(FINE), "times two", "about", "fine.py")
    assert found.verdict == RIGHT


def test_a_gradient_that_plain_torch_itself_does_not_take_is_no_evidence(processes):
    given = program(
        Call("aten.polar.default", (Leaf(0), Leaf(1))), torch.ones(2), torch.ones(2), inputs=((Replicate(),), (Replicate(),)),
        then="grad",
    )  # fmt: skip
    lines = [one.lines for one in scripts_of(case(given, raises=True), "polar", "about", "polar.py")]
    assert lines and not any(".sum().backward()" in text for text in lines)


def test_a_call_that_no_public_function_makes_is_spelled_by_its_overload(processes):
    given = program(Call("aten.mul.Scalar", (Leaf(0), 2 - 3j)), torch.ones(4), inputs=((Shard(0),),))
    found = run_first_that_shows(processes, case(given, raises=True), "mul", "about", "mul.py")
    if not torch.__version__.startswith("2.13"):
        pytest.skip("other versions may take it")
    assert found.verdict == SHOWS and "torch.ops.aten.mul.Scalar(d0, (2-3j))" in found.lines
    assert "unhashable type: 'complex'" in found.prints


def test_another_error_than_the_refusal_is_a_fault_of_the_script(processes):
    text = "def check():\n    raise RuntimeError('size 3 is no size')\n"
    refusal = "DTensor refuses this call on every rank: RuntimeError: "
    for reason, verdict in (
        ("size 4 is no size", SHOWS), ("-", SHOWS), ("tuple index out of range", FAILED), ("", FAILED),
    ):  # fmt: skip
        assert run(processes, text, 2, raises=True, reason=refusal + reason)[0] == verdict
    assert run(processes, text, 2, raises=True, reason="rank 1 raises ValueError: other")[0] == SHOWS


def test_the_script_of_a_dtype_that_gloo_does_not_carry_broadcasts_nothing(processes):
    tiny = torch.ones(4).to(torch.float8_e4m3fn)
    given = program(Call("aten.unsqueeze.default", (Leaf(0), 0)), tiny, inputs=((Replicate(),),))
    found = run_first_that_shows(processes, case(given), "tiny", "about", "tiny.py")
    assert "src_data_rank=None" in found.lines and "Invalid scalar type" not in found.prints


@pytest.mark.slow
@pytest.mark.parametrize(("given", "code"), [(CUMPROD, 1), (FINE, 0)])
def test_a_script_starts_its_own_ranks_and_its_exit_code_tells(processes, tmp_path, given, code):
    found = run_first_that_shows(processes, case(given), "a", "about", "script.py")
    path = tmp_path / "script.py"
    path.write_text(found.script)
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == (code if found.verdict == SHOWS else 0), ran.stderr


def test_what_torch_logs_of_a_refusal_is_not_shown_and_later_lines_are(caplog):
    text = "import logging\ndef check():\n    logging.getLogger('torch').error('a traceback')\n    print('got 1')\n    return True\n"
    assert pickling.loads(check_on_rank(pickling.dumps(text))) == (True, "got 1")
    logging.getLogger("torch").error("another one")
    assert [record.message for record in caplog.records] == ["another one"]
    logging.disable()  # as the ranks of a sweep have it
    try:
        check_on_rank(pickling.dumps(text))
        assert not logging.getLogger("torch").isEnabledFor(logging.ERROR)
    finally:
        logging.disable(logging.NOTSET)


def test_no_title_ends_the_docstring_of_a_script():
    quotes = '"' * 3
    title = f"a{quotes}\nimport b\n{quotes}"
    text = next(scripts_of(case(FINE), title, title, "script.py")).script
    assert title in ast.get_docstring(ast.parse(text), clean=False)
    assert "import b" not in map(ast.unparse, ast.parse(text).body)


@pytest.mark.parametrize(
    ("rank", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(0 if 'PYTHONHASHSEED' in os.environ else 2)", 0),
        ("sys.exit(1)", 1),
        ("sys.exit(2)", 2),
        ("sys.exit(int(os.environ['RANK']))", 1),
        ("os.abort()", 1),
        ("signal.pause()", 1),
        ("signal.pause() if os.environ['RANK'] == '1' else sys.exit(0)", 1),
    ],
)
def test_the_exit_code_of_a_script_is_that_of_its_ranks_and_one_that_hangs_shows_it(tmp_path, rank, code):
    filled = {"title": "t", "about": "a", "name": "s.py", "imports": "import signal", "raises": False, "limit": ""}
    text = _SCRIPT.format(**filled, ranks=2, helpers="", body="    return False")
    assert "+ 120\n" in text and 'main() if "RANK"' in text
    (tmp_path / "s.py").write_text(text.replace("+ 120\n", "+ 1\n").replace('main() if "RANK"', f'({rank}) if "RANK"'))
    done = subprocess.run(
        [sys.executable, "s.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, "hangs: ranks still wait" in done.stdout) == (code, "pause" in rank)

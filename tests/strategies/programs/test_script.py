"""Scripts are run in real gloo processes: one under torchrun, which takes seconds, the rest in a pool.  Scripts of
programs, run in real gloo processes of a pool."""

import ast
import math
import os
import sys
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._embedding_ops import _MaskPartial
from torch.distributed.tensor.placement_types import _StridedShard

from localtensor.processes.pool import Pool
from strategies.model.codec import tensor_literal
from strategies.programs.script import case_script, is_writable_case, is_writable_program, program_script
from tests.strategies.cases import numbers, probe, rule, sample
from tests.strategies.programs_of import on
from tests.strategies.script_runner import run_script
from tests.strategies.wrong_here import CUMPROD, if_cumprod_is_wrong
from tests.tools import warm
from tests.torch_here import before_2_14

X = numbers(4, 6)


def written(one, line, ranks=2, draw=0):
    case = probe(one, ranks).case(rule(one, line), draw)
    assert is_writable_case(case)
    return case_script(case, "it is a test", "it.py")


@pytest.fixture(scope="module")
def ran():
    """The exit code and the output of a script on each of two ranks."""
    with Pool(2, timeout=30) as pool:
        yield lambda text: [outcome.value for outcome in pool.call(run_script, [(text,), (text,)])]


@pytest.mark.slow
@if_cumprod_is_wrong
def test_under_torchrun_the_script_of_a_finding_prints_what_is_wrong_and_fails(tmp_path):
    file = tmp_path / "cumprod.py"
    file.write_text(written(CUMPROD, "S(1) -> S(1)"))
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", str(file)]
    ours = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **ours}
    done = warm.run(run, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert "got  [[1.0, 2.0, 3.0, 12.0]]" in done.stdout
    assert "want [[1.0, 2.0, 6.0, 24.0]]" in done.stdout
    assert "WRONG" in done.stdout and "right" not in done.stdout
    assert "(Shard(dim=1),)" in done.stdout


@if_cumprod_is_wrong
def test_every_rank_prints_what_it_got_and_fails(ran):
    for rank, (code, printed) in enumerate(ran(written(CUMPROD, "S(1) -> S(1)"))):
        assert code == 1
        assert printed.splitlines() == [
            f"rank {rank} placements (Shard(dim=1),)",
            f"rank {rank} got  [[1.0, 2.0, 3.0, 12.0]]",
            f"rank {rank} want [[1.0, 2.0, 6.0, 24.0]]",
            f"rank {rank} WRONG",
        ]


out, mean, rstd = torch.ops.aten.native_layer_norm.default(X, [6], None, None, 1e-5)


BATCH_NORM = sample("_native_batch_norm_legit.default", X, numbers(6), None, X[0] * 0, X[0] * 0 + 1, True, 0.1, 1e-5)


@pytest.mark.parametrize(("one", "line"), [
    (CUMPROD, "S(0) -> S(0)"),
    (sample("neg.default", X), "P(max) -> P(min)"),
    (sample("neg.default", numbers(5, 3)), "S(0) -> S(0)"),
    (sample("neg.default", numbers(4, 3).t()), "S(1) -> S(1)"),
    (sample("neg.default", numbers(4, dtype=torch.complex64)), "P(sum) -> P(sum)"),
    (sample("neg.default", numbers(4, dtype=torch.int32)), "P(sum) -> P(sum)"),
    (sample("neg.default", numbers(4)), "P(avg) -> P(avg)"),
    (sample("logical_not.default", numbers(4, dtype=torch.bool)), "S(0) -> S(0)"),
    (sample("mean.dim", X.float(), [0]), "S(0) -> P(avg)"),
    (sample("sum.dim_IntList", X, [0], dtype=torch.float32), "S(0) -> P(sum)"),
    (sample("aminmax.default", X, dim=0), "S(0) -> P(min), P(max)"),
    (sample("mul_.Tensor", X, X), "S(0), S(0) -> S(0)"),
    (sample("cat.default", [X, X], 0), "S(1), S(1) -> S(1)"),
    (sample("split.Tensor", X, 2), "S(1) -> S(1), S(1)"),
    (sample("view.default", X, [4, 2, 3]), "S(0) -> S(0)"),
    (sample("new_zeros.default", X, [4, 6], dtype=torch.int64), "S(0) -> S(0)"),
    (sample("clamp.default", X, -math.inf, 0.5), "S(0) -> S(0)"),
    (sample("neg.default", torch.tensor([math.nan, math.inf, -math.inf, -0.0])), "S(0) -> S(0)"),
    (sample("embedding.default", X, torch.tensor([0, 3])), "R, S(0) -> S(0)"),
    (sample("native_layer_norm_backward.default", out, X, [6], mean, rstd, None, None, [True, False, False]),
     "S(0), S(0), S(0), S(0) -> S(0), -, -"),
    (sample("_foreach_neg_.default", [X, X]), "S(0), S(0) -> S(0)"),
    (sample("equal.default", X, X), "S(0), S(0) -> R"),
    (BATCH_NORM, "S(1), S(0), S(0), S(0) -> S(1), S(0), S(0)"),
], ids=lambda given: given if isinstance(given, str) else given.op)  # fmt: skip
def test_the_script_of_a_right_rule_passes(ran, one, line):
    for rank, (code, printed) in enumerate(ran(written(one, line))):
        assert (code, printed.count("WRONG")) == (0, 0), printed
        assert f"rank {rank} right" in printed


def test_a_piece_of_a_wrong_shape_is_wrong_although_what_the_ranks_gather_is_right(ran):
    """Both ranks have the one row of S(0), whose first copy DTensor takes for the whole."""
    one = sample("sum.dim_IntList", numbers(2, 3), [0], True)
    text = (
        written(one, "R -> R")
        .replace("got = torch", "got = moved(torch", 1)
        .replace("(d0, [0], True)", "(d0, [0], True))")
    )
    moved = "def moved(x):\n    local = x.to_local()\n    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=local.shape, stride=local.stride())\n"
    text = text.replace("\nwant = torch", f"\n{moved}\nwant = torch", 1)
    assert [code for code, _ in ran(written(one, "R -> R"))] == [0, 0]
    for rank, (code, printed) in enumerate(ran(text)):
        assert code == 1 and printed.endswith(f"rank {rank} WRONG\n")
        assert "rank 1 holds shape (1, 3), its piece of (1, 3) has (0, 3)" in printed or rank == 0


def test_partial_inputs_are_the_very_parts_of_the_case(ran):
    one = sample("neg.default", torch.tensor([4, 6]))
    case = probe(one).case(rule(one, "P(sum) -> P(sum)"), 0)
    text = case_script(case, "why", "it.py")
    assert str(case.held[0][0].tolist()) in text
    assert [code for code, _ in ran(text)] == [0, 0]


def test_a_result_of_another_dtype_is_wrong(ran):
    text = written(CUMPROD, "S(0) -> S(0)").replace(
        "aten.cumprod.default(d0, -1)", "aten.cumprod.default(d0, -1).double()"
    )
    assert [code for code, _ in ran(text)] == [1, 1]


def test_a_number_that_comes_out_otherwise_is_wrong(ran):
    text = written(sample("equal.default", X, X), "S(0), S(0) -> R").replace("got = torch.ops", "got = not torch.ops")
    for rank, (code, printed) in enumerate(ran(text)):
        assert code == 1
        assert printed.splitlines() == [f"rank {rank} got  False", f"rank {rank} want True", f"rank {rank} WRONG"]


def test_an_argument_that_is_written_to_and_comes_out_otherwise_is_wrong(ran):
    text = written(sample("_foreach_neg_.default", [X, X]), "S(0), S(0) -> S(0)")
    assert [code for code, _ in ran(text.replace("wants, gots =", "d1.add_(1)\nwants, gots ="))] == [1, 1]


def test_a_difference_within_rounding_is_right(ran):
    text = written(CUMPROD, "S(0) -> S(0)")
    near, far = (text.replace("default(d0, -1)", f"default(d0, -1) * (1 + {by})") for by in ("1e-7", "1e-2"))
    assert near != text
    assert [code for code, _ in ran(near)] == [0, 0]
    assert [code for code, _ in ran(far)] == [1, 1]


# The text.


def imported(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("line", ["S(1) -> S(1)", "P(avg) -> P(avg)"])
def test_a_script_imports_nothing_but_torch_and_python(line):
    assert {name.split(".")[0] for name in imported(written(CUMPROD, line))} == {"sys", "math", "torch"}


def test_the_head_of_a_script_says_what_is_wrong_and_how_to_run_it():
    head = ast.get_docstring(ast.parse(written(CUMPROD, "S(1) -> S(1)", ranks=3))).splitlines()
    version = torch.__version__.split("+")[0]
    assert head[0] == "aten.cumprod.default: S(1) -> S(1)"
    assert head[2] == f"DTensor in torch {version} gets this wrong on 3 ranks: it is a test"
    assert head[4] == "Run:  torchrun --nproc-per-node 3 it.py"


def test_both_calls_are_written_with_all_their_arguments():
    text = written(
        sample("new_zeros.default", X, [4, 6], dtype=torch.int64, device=torch.device("cpu")), "S(0) -> S(0)"
    )
    assert "aten.new_zeros.default(x0, [4, 6], dtype=torch.int64, device=torch.device('cpu'))" in text
    assert "aten.new_zeros.default(d0, [4, 6], dtype=torch.int64, device=torch.device('cpu'))" in text


def test_the_same_case_gives_the_same_text():
    one = sample("neg.default", X)
    assert written(one, "P(sum) -> P(sum)", draw=1) == written(one, "P(sum) -> P(sum)", draw=1)
    assert written(one, "P(sum) -> P(sum)", draw=1) != written(one, "P(sum) -> P(sum)", draw=0)


def same_bits(a, b):
    if a.is_complex():
        return same_bits(a.real, b.real) and same_bits(a.imag, b.imag)
    zeros = (a.signbit() == b.signbit()).all() if a.dtype.is_floating_point else True
    return bool(zeros) and torch.equal(a.nan_to_num(7.25) if a.dtype.is_floating_point else a,
                                       b.nan_to_num(7.25) if b.dtype.is_floating_point else b)  # fmt: skip


@pytest.mark.parametrize("x", [
    numbers(3, 2), numbers(3, 2).float(), numbers(3).half(), numbers(3).bfloat16(),
    numbers(3, dtype=torch.int64), numbers(2, 2, dtype=torch.bool), numbers(3, dtype=torch.complex64),
    torch.tensor(2.5), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64), numbers(3, 4).t(),
    torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
    torch.complex(torch.tensor([-0.0, math.nan]), torch.tensor([1.0, -math.inf])),
    numbers(2, 3, dtype=torch.complex128).t(),
], ids=lambda x: f"{x.dtype}{list(x.shape)}")  # fmt: skip
def test_a_literal_makes_the_same_tensor_to_the_last_bit(x):
    made = eval(tensor_literal(x), {"torch": torch, "inf": math.inf, "nan": math.nan})
    assert (made.dtype, made.shape, made.stride()) == (x.dtype, x.shape, x.stride())
    assert same_bits(made, x)


@pytest.mark.parametrize(("placement", "can"), [
    (Replicate(), True), (Shard(0), True), (Partial("max"), True), (None, False),
    (_StridedShard(0, split_factor=2), False), (_MaskPartial(offset_shape=torch.Size([2]), offset_dim=0), False),
], ids=str)  # fmt: skip
def test_an_input_of_dtensors_own_cannot_be_written_down(placement, can):
    one = sample("neg.default", X)
    case = probe(one).case(rule(one, "R -> R"), 0)
    assert is_writable_case(replace(case, rule=replace(case.rule, inputs=(placement,)))) is can


def test_a_complex_literal_is_short():
    assert tensor_literal(torch.tensor([1 - 2j])) == (
        "torch.complex(torch.tensor([1.0], dtype=torch.float32), torch.tensor([-2.0], dtype=torch.float32))"
    )


MM = sample("mm.default", X, numbers(6, 3))


@pytest.fixture(scope="module")
def ran_program():
    """The exit code and the output of a program's script on each of its ranks."""
    pools = {}

    def run(program):
        pool = pools.setdefault(program.ranks, Pool(program.ranks, timeout=60))
        text = program_script(program, "it is a test", "it.py")
        return [outcome.value for outcome in pool.call(run_script, [(text,)] * program.ranks)]

    yield run
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("program", [
    *(pytest.param(one, marks=if_cumprod_is_wrong)
      for one in (on(CUMPROD, "S(1)"), on(CUMPROD, "S(1)", then="sum"), on(CUMPROD, "R/S(1)", (2, 2)))),
    pytest.param(on(sample("linalg_vector_norm.default", X, 2, [1]), "S(1)", then="sum"), marks=before_2_14),
], ids=str)  # fmt: skip
def test_the_script_of_a_wrong_program_says_so_and_fails(ran_program, program):
    for rank, (code, printed) in enumerate(ran_program(program)):
        assert code == 1, printed
        assert f"rank {rank} WRONG" in printed


@pytest.mark.parametrize("program", [
    on(MM, "S(0), R", then="grad"), on(MM, "S(1), S(0)", then="grad S(0)"), on(MM, "P(sum)/P(avg), R", (2, 2), "R"),
    on(MM, "S(0)/S(0), R", (2, 2), "S(1)", flattened=True), on(MM, "SS(0,2)/S(0), R", (2, 2), "full twice"),
    on(sample("mul_.Scalar", X, 3.0), "S(0)", then="base"), on(sample("max.dim", X, 0), "S(1)", then="only 1"),
    on(sample("max.dim", X, 0), "S(1)", then="grad of 0"), on(sample("_foreach_neg_.default", [X, X]), "S(0), S(0)"),
    on(sample("sum.dim_IntList", X, [1]), "S(0)", then="again(x0, [0], True)"),
    on(sample("mean.dim", X, [0]), "S(0)", then="R"), on(sample("cat.default", [X, X], 0), "S(1), S(1)", then="slice"),
], ids=str)  # fmt: skip
def test_the_script_of_a_right_program_passes(ran_program, program):
    for rank, (code, printed) in enumerate(ran_program(program)):
        assert (code, printed.count("WRONG")) == (0, 0), printed
        assert f"rank {rank} right" in printed


def test_the_last_argument_of_an_op_that_returns_nothing_is_compared_too(ran_program, monkeypatch):
    program = on(sample("_foreach_neg_.default", [X, X]), "S(0), S(0)")
    assert [code for code, _ in ran_program(program)] == [0, 0]
    text = program_script(program, "it is a test", "it.py").replace("wrong = False", "d1.add_(1)\nwrong = False")
    monkeypatch.setitem(globals(), "program_script", lambda *given: text)
    assert [code for code, _ in ran_program(program)] == [1, 1]


def test_a_program_script_imports_nothing_but_torch_and_python():
    found = set()
    for then in ("grad S(0)", "full twice", "base", "S(0)"):
        for node in ast.walk(ast.parse(program_script(on(MM, "S(0), R", then=then), "why", "it.py"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                found.add(node.module.split(".")[0])
    assert found == {"collections", "math", "sys", "torch", "typing"}


def test_the_head_says_what_is_wrong_and_how_to_run_it():
    head = ast.get_docstring(ast.parse(program_script(on(MM, "S(0)/R, R", (2, 3), "sum"), "why not", "it.py")))
    assert head.splitlines()[0] == "aten.mm.default on (2, 3): (S(0), R), R, then sum"
    assert "gets this wrong on 6 ranks: why not" in head
    assert "torchrun --nproc-per-node 6 it.py" in head


def test_a_users_module_is_imported():
    assert "import my_rules" in program_script(on(MM, "S(0), R"), "why", "it.py", rules="my_rules")


def test_a_placement_of_dtensors_own_cannot_be_written_down():
    class Odd(Partial):
        pass

    program = on(MM, "S(0), R")
    object.__setattr__(program, "inputs", ((Odd(),), (Odd(),)))
    assert not is_writable_program(program) and is_writable_program(on(MM, "SS(0,2)/S(0), R", (2, 2)))
    with pytest.raises(ValueError, match="cannot be written down"):
        program_script(program, "why", "it.py")

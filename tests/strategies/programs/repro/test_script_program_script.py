"""Scripts of programs, run in real gloo processes of a pool."""

import ast

import pytest
from torch.distributed.tensor import Partial

from localtensor.processes.pool import Pool
from strategies.programs.repro.script import is_writable_program, program_script
from tests.strategies.cases import numbers, sample
from tests.strategies.programs_of import on
from tests.strategies.script_runner import run_script
from tests.strategies.wrong_here import CUMPROD, if_cumprod_is_wrong
from tests.torch_here import before_2_14

X = numbers(4, 6)
MM = sample("mm.default", X, numbers(6, 3))


@pytest.fixture(scope="module")
def ran():
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
def test_the_script_of_a_wrong_program_says_so_and_fails(ran, program):
    for rank, (code, printed) in enumerate(ran(program)):
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
def test_the_script_of_a_right_program_passes(ran, program):
    for rank, (code, printed) in enumerate(ran(program)):
        assert (code, printed.count("WRONG")) == (0, 0), printed
        assert f"rank {rank} right" in printed


def test_a_script_imports_nothing_but_torch_and_python():
    found = set()
    for then in ("grad S(0)", "full twice", "base", "S(0)"):
        for node in ast.walk(ast.parse(program_script(on(MM, "S(0), R", then=then), "why", "it.py"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                found.add(node.module.split(".")[0])
    assert found == {"collections", "functools", "inspect", "math", "sys", "torch", "typing"}


def test_the_head_says_what_is_wrong_and_how_to_run_it():
    head = ast.get_docstring(ast.parse(program_script(on(MM, "S(0)/R, R", (2, 3), "sum"), "why not", "it.py")))
    assert head.splitlines()[0] == "aten.mm.default on (2, 3): (S(0), R), R, then sum"
    assert "gets this wrong on 6 ranks: why not" in head
    assert "torchrun --nproc-per-node 6 it.py" in head


def test_a_users_module_is_imported():
    assert "import my_rules" in program_script(on(MM, "S(0), R"), "why", "it.py", module="my_rules")


def test_a_placement_of_dtensors_own_cannot_be_written_down():
    class Odd(Partial):
        pass

    program = on(MM, "S(0), R")
    object.__setattr__(program, "inputs", ((Odd(),), (Odd(),)))
    assert not is_writable_program(program) and is_writable_program(on(MM, "SS(0,2)/S(0), R", (2, 2)))
    with pytest.raises(ValueError, match="cannot be written down"):
        program_script(program, "why", "it.py")

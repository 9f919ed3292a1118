"""Scripts of public programs need torch alone, and give in gloo processes what the simulation gives."""

import pytest

from localtensor.processes.pool import Pool
from strategies.programs.public_api.drawing import draw_public_programs
from strategies.programs.public_api.table import STEPS, TWO_AXES, public_step
from strategies.programs.run.real_run import run_simulated_programs
from strategies.programs.script import program_script
from strategies.sweep.causes.cause import Case
from strategies.sweep.causes.reach import severity
from strategies.sweep.causes.script import RIGHT, SHOWS, run, scripts_of
from strategies.torch_api.rank_runs import RankProcesses
from tests.strategies.script_runner import run_script


def one_of_each(seed):
    """A program of each public name, on two ranks."""
    return {public_step(p.then)[0]: p for p in draw_public_programs((2,), seed=seed)}


@pytest.fixture(scope="module")
def ran():
    with Pool(2, timeout=60) as pool:
        yield lambda text: [outcome.value for outcome in pool.call(run_script, [(text,), (text,)])]


RAISE_ON_CPU = {"tensor.rand", "tensor.randn"}  # torch 2.13


@pytest.mark.few(5)
@pytest.mark.parametrize("name", sorted(set(STEPS) - RAISE_ON_CPU - TWO_AXES))
def test_a_script_ends_as_the_simulated_run(ran, name):
    program = one_of_each(0)[name]
    (simulated,) = run_simulated_programs([program])
    if simulated.refused or simulated.wrong.startswith("stops"):
        pytest.skip("its script raises on every rank, or ranks wait for each other")
    text = program_script(program, "it is a test", "it.py")
    assert max(code for code, _ in ran(text)) == int(bool(simulated.wrong))  # a result may be wrong on one rank alone
    assert text.startswith(f'"""{program.public_call} on (2,): ')
    assert "strategies" not in text and "localtensor" not in text


def test_scripts_of_causes_run_and_show_what_is_refused():
    programs = one_of_each(0)
    with RankProcesses("gloo") as processes:
        for name, raises, verdict in (("tensor.rand", True, SHOWS), ("parallel.RowwiseParallel", False, RIGHT)):
            case = Case(programs[name], "it is a test", severity(programs[name], raises))
            first, *_, last = scripts_of(case, "a title", "about", "it.py")
            for script in (first, last):
                assert run(processes, script.script, 2, raises=raises)[0] == verdict
            assert "gots = program([d0])" in last.lines
            call, *rest = first.lines.splitlines()[1:]
            assert (
                call.startswith("    return flat(") and "def op(" not in first.script
            )  # the call stands in the first lines
            assert "wants, gots = program(x0), program(d0)" in rest

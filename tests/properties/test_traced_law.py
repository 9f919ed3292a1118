"""A function traced by make_fx, or compiled by AOTAutograd or torch.compile, gives in lockstep what it gives op by op; or is refused by name.

CI runs the same few programs each time; `--hypothesis-profile=nightly` draws others, and many more.
"""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import aot_function
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from localtensor import LocalTensorMode
from localtensor.errors import NotTraceable
from tests.properties.traced_programs import RANKS, Program, make_groups, programs
from tests.tools.compiled import draws

nightly = settings.get_current_profile_name() == "nightly"
whole_programs = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


def played(run: Any, program: Program, inputs: list[Tensor]) -> list[Any]:
    """Outputs, inputs as they are then and gradients, by rank."""
    torch.manual_seed(dist.get_rank())
    outputs = run(*inputs)
    if program.backward:
        (outputs[0] * outputs[1]).sum().backward()
    held = [*outputs, *inputs, *(x.grad for x in inputs)]
    return [[x.on(rank).tolist() for rank in x.ranks] for x in held if x is not None]


def traced(program: Program) -> Any:
    """The graph of make_fx; it has no gradients of its own."""
    return make_fx(program)(*(x.detach() for x in program.inputs(5)))


def check_traced(program: Program) -> str:
    try:
        graph = traced(program)
    except NotTraceable:
        assert program.differs, program
        return "refused"
    assert not program.differs
    nodes = sum(node.op == "call_function" for node in graph.graph.nodes)
    assert nodes <= 12 * len(program.steps) + 2  # no op of a rank each
    for start in (5, 1):
        assert played(graph, program, program.inputs(start)) == played(program, program, program.inputs(start))
    return "equal"


def check_compiled(program: Program, compiled: Any) -> str:
    try:
        found = played(compiled, program, program.inputs(1))
    except NotTraceable:
        assert program.differs or program.uneven, program
        return "refused"
    assert not program.differs and not program.uneven
    assert found == played(program, program, program.inputs(1))
    return "equal"


def test_a_traced_program_gives_what_the_program_gives():
    counted: Counter[str] = Counter()

    @settings(whole_programs, max_examples=10_000 if nightly else 25)
    @given(program=programs())
    def law(program: Program) -> None:
        with LocalTensorMode(RANKS):
            make_groups()
            counted[check_traced(program)] += 1
            counted[check_compiled(program, aot_function(program, lambda graph, inputs: graph)) + " by AOT"] += 1

    law()
    assert counted["equal"] > 2 * counted["refused"], counted
    assert counted["equal by AOT"] > counted["refused by AOT"], counted
    print(counted)


def test_a_program_under_torch_compile_gives_what_the_program_gives():
    @settings(whole_programs, max_examples=300 if nightly else 4)
    @given(program=programs())
    def law(program: Program) -> None:
        torch.compiler.reset()
        with LocalTensorMode(RANKS):
            make_groups()
            compiled = torch.compile(program.__call__, backend="aot_eager")
            assert played(compiled, program, program.inputs(1)) == played(program, program, program.inputs(1))

    law()


@pytest.mark.slow  # hundreds of programs, each compiled and traced; the tool draws ten thousand
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", list(draws.FAMILIES))
def test_nothing_differs_between_a_compiled_program_and_the_same_as_it_is_written(family):
    found = draws.in_a_process(family, 7, 100 if nightly else 25)
    assert found.differences == {} and sum(count for name, count in found.counts.items() if "equal" in name) > 20


def test_a_native_crash_counts_as_a_difference(monkeypatch):
    monkeypatch.setattr(draws.sys, "executable", "/bin/sh")
    monkeypatch.setattr(draws, "COMMAND", ("-c", "kill -SEGV $$"))
    ((key, text),) = draws.in_a_process("tensors", 1, 1).differences.items()
    assert "native crash, exit code -11" in text and key.startswith("tensors")

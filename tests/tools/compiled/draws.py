"""Programs that Hypothesis draws, each in lockstep as it is written, by make_fx, and by torch.compile with aot_eager: compared rank by rank.

Two families: functions of tensors (`tests/properties/traced_programs.py`) and programs of DTensors
(`tests/properties/dtensor_programs.py`).  What torch cannot compile on a single rank either, in the words in which it says so
there, is no finding; what this package refuses, it refuses by an error of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, seed, settings
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import localtensor as lt
from localtensor import LocalTensorMode
from localtensor.errors import LocalTensorError
from tests.end_to_end.programs.lockstep_ways import assert_bits, of_rank
from tests.properties import dtensor_programs, traced_programs

WORDS = 50
"""Characters of an error's first line that must be the same on one rank and in lockstep."""
COMMAND = ("-X", "faulthandler", "-m", "tests.tools.compiled", "draws", "--here")
SECONDS = 900
"""The most that one process may take; beyond it, its programs count as a hang."""


@dataclass
class Found:
    """Outcomes by name, and for each different difference its shortest program."""

    counts: Counter[str] = field(default_factory=Counter)
    differences: dict[str, str] = field(default_factory=dict)

    def see(self, program: object, how: str, outcome: str | Exception) -> None:
        """Count an outcome; an exception is a difference."""
        if isinstance(outcome, str):
            self.counts[f"{how}: {outcome}"] += 1
            return
        self.counts[f"{how}: DIFFERENT"] += 1
        line = str(outcome).strip().partition("\n")[0]
        key = f"{how}: {type(outcome).__name__}: {re.sub('[0-9][0-9.]*', '#', line)[:120]}"
        text = f"{program!r}: {str(outcome).strip()[:900]}"
        if len(text) < len(self.differences.get(key, text + " ")):
            self.differences[key] = text

    def add(self, other: Found) -> None:
        self.counts.update(other.counts)
        for key, text in other.differences.items():
            self.differences[key] = min(self.differences.get(key, text), text, key=len)


# -- one program


def outcome_of(run: Callable[[], Any]) -> Any:
    """What it returns, or the exception that it raises."""
    try:
        return run()
    except Exception as error:  # why: whatever is raised is compared
        return error


def of_ours(error: BaseException | None) -> bool:
    """Whether an error of this package stands behind it."""
    while error is not None and not isinstance(error, LocalTensorError):
        error = error.__cause__ or error.__context__
    return error is not None


VIEW_GIVEN_BACK = "as_strided not supported with DTensor"
"""What torch says, on gloo too, where a graph gives back a view of a DTensor that it was given (torch 2.13).  Lockstep cuts some steps into
two graphs that are one on a rank: the view may then be in the second."""


def verdict(found: Any, wanted: Any, on_a_rank: Callable[[], Any], *, exact: bool) -> str | Exception:
    """What came of a program that was compiled or traced, beside the program as it is written; an exception is a difference."""
    if isinstance(found, Exception):
        if of_ours(found):
            return "refused by name"
        if isinstance(wanted, Exception) and first_words(wanted) in str(found):
            return "raises as written"
        if VIEW_GIVEN_BACK in str(found):
            return "a view of what a graph was given"
        alone = outcome_of(on_a_rank)
        if not isinstance(alone, Exception) or isinstance(alone, LocalTensorError):
            return found
        return "raises on a rank, too" if first_words(alone) in str(found) else "raises on a rank, in other words"
    if isinstance(wanted, Exception):
        return AssertionError(f"only as written it raises: {wanted!r}")
    for rank, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        try:
            assert_bits(mine, theirs, f"rank {rank}", exact=exact)
        except AssertionError as difference:
            return difference
    return "equal"


def first_words(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:WORDS]


@contextmanager
def one_rank(ranks: int) -> Iterator[None]:
    """A job of so many ranks, of which this process is the first, and whose collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- functions of tensors


def of_tensors(program: traced_programs.Program, found: Found) -> None:
    """Trace and compile a function of tensors."""

    def played(make: Callable[[], Any], *, backward: bool) -> list[Any]:
        traced_programs.make_groups()
        run = make()
        torch.manual_seed(dist.get_rank())
        inputs = program.inputs(1)
        outputs = run(*inputs)
        if backward and program.backward:
            (outputs[0] * outputs[1]).sum().backward()
        return [*outputs, *inputs, *(x.grad for x in inputs)]

    def in_lockstep(make: Callable[[], Any], *, backward: bool) -> Any:
        def run() -> Any:
            with LocalTensorMode(traced_programs.RANKS):
                held = played(make, backward=backward)
            return [of_rank(held, rank) for rank in range(traced_programs.RANKS)]

        return outcome_of(run)

    def alone(make: Callable[[], Any]) -> Any:
        with one_rank(traced_programs.RANKS):
            traced_programs.make_groups()
            return make()(*(program.input_of_rank(place, 0, 1) for place in (0, 1)))

    ways = {
        "make_fx": (lambda: make_fx(program)(*(x.detach() for x in program.inputs(5))), False),
        "aot_eager": (lambda: torch.compile(program.__call__, backend="aot_eager"), True),
    }
    for how, (make, backward) in ways.items():
        wanted = in_lockstep(lambda: program, backward=backward)
        mine = in_lockstep(make, backward=backward)
        said = verdict(mine, wanted, lambda make=make: alone(make), exact=True)
        differs = program.differs or program.uneven
        if how == "make_fx" and said == "refused by name" and not differs:
            said = mine  # every op of it has a place in a graph
        found.see(program, f"tensors, {how}", said)


# -- programs of DTensors


def steps(program: dtensor_programs.Program, x: DTensor) -> Any:
    """The steps alone, on a DTensor that was made before."""
    for step in program.steps:
        x = dtensor_programs.STEPS[step[0]](x, *step[1:])
    return x


def source_of(program: dtensor_programs.Program) -> DTensor:
    """The tensor that a program begins with."""
    torch.manual_seed(5)
    return dtensor_programs.source(program, dtensor_programs.mesh_of(program))


def results(program: dtensor_programs.Program, run: Callable[..., Any]) -> list[Any]:
    """What the steps give by `run`, and the gradient of what they begin with."""
    x = source_of(program)
    if program.backward and x.is_leaf:
        x.requires_grad_()
    last = run(program, x)
    held = [dtensor_programs.seen_of(last)]
    if last.requires_grad and last.dtype.is_floating_point:
        (last * last).sum().backward()
        held.append(None if x.grad is None else [x.grad.to_local(), str(x.grad.placements)])
        held.append(None if x.grad is None else x.grad.full_tensor())
    return held


def compiled_results(program: dtensor_programs.Program) -> list[Any]:
    """The same of the compiled steps, without what autograd keeps: a real process sends them."""
    warnings.simplefilter("ignore")
    return of_rank(results(program, torch.compile(steps, backend="aot_eager")), dist.get_rank())


def compared_further(
    program: dtensor_programs.Program, mine: Any, wanted: Any, difference: Exception
) -> str | Exception:
    """The difference of compiled steps from those that are written, unless it is none, or real processes differ alike.

    A gradient may lie otherwise: AOTAutograd gives it as its graph makes it, and autograd as the op before does.
    """
    if not isinstance(wanted, Exception):
        wholes = [[[one[0], *one[2:]] for one in ranks] for ranks in (mine, wanted)]
        with contextlib.suppress(AssertionError):
            assert_bits(*wholes, exact=program.exact)
            return "equal, the gradient with other placements"
    try:
        theirs = lt.run(compiled_results, program, ranks=program.ranks, on="gloo").values
    except Exception as error:  # why: whatever they raise is no result to compare with
        return AssertionError(f"{difference} (on gloo: {error!r})")
    try:
        assert_bits(of_rank(mine, 0), of_rank(theirs, 0), exact=program.exact)
    except AssertionError as other:
        return AssertionError(f"{difference} (on gloo otherwise: {other})")
    return "differs on real processes alike"


def of_dtensors(program: dtensor_programs.Program, found: Found) -> None:
    """Compile the steps; trace them as a function of what a rank holds."""

    def traced(record: Callable[..., Any]) -> list[Any]:
        x = source_of(program)

        def of_shards(local: Any) -> Any:
            whole = DTensor.from_local(
                local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
            )
            last = steps(program, whole)
            return last.to_local() if isinstance(last, DTensor) else last

        run = record(of_shards, x.to_local().detach())
        torch.manual_seed(7)
        return [run(x.to_local().detach() * 2)]

    def in_lockstep(run: Callable[[], Any]) -> Any:
        with LocalTensorMode(program.ranks):
            held = run()
        return [of_rank(held, rank) for rank in range(program.ranks)]

    def on_a_rank(run: Callable[[], Any]) -> Any:
        with one_rank(program.ranks):
            return run()

    graph: Any = torch.compile(steps, backend="aot_eager")
    ways: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "make_fx": (
            lambda: traced(lambda run, x: make_fx(run)(x)),
            lambda: traced(lambda run, x: run),
        ),
        "aot_eager": (lambda: results(program, graph), lambda: results(program, steps)),
    }
    for how, (run, plain) in ways.items():
        if how == "make_fx" and any(step[0] == "draw" and step[-1] % 4 == 0 for step in program.steps):
            continue  # it seeds the generator, which no graph does
        mine, wanted = outcome_of(lambda run=run: in_lockstep(run)), outcome_of(lambda plain=plain: in_lockstep(plain))
        torch.compiler.reset()
        said = verdict(mine, wanted, lambda run=run: on_a_rank(run), exact=program.exact)
        if isinstance(said, AssertionError) and how == "aot_eager" and not isinstance(mine, Exception):
            said = compared_further(program, mine, wanted, said)
        found.see(program, f"DTensors, {how}", said)


# -- many programs

FAMILIES: dict[str, tuple[Any, Callable[[Any, Found], None]]] = {
    "tensors": (traced_programs.programs(wide=True), of_tensors),
    "DTensors": (dtensor_programs.programs(), of_dtensors),
}


def drawn(family: str, number: int, examples: int) -> Found:
    """The outcomes of so many programs, drawn with this seed."""
    found, (programs, run) = Found(), FAMILIES[family]

    @seed(number)
    @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(program=programs)
    def law(program: Any) -> None:
        torch.compiler.reset()
        found.counts["programs"] += 1
        run(program, found)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        law()
    return found


def in_a_process(family: str, number: int, examples: int) -> Found:
    """As `drawn`, in a process of its own: one that ends by a signal, or that hangs, is a difference."""
    command = [sys.executable, *COMMAND]
    command += ["--family", family, "--seed", str(number), "--count", str(examples)]
    found = Found()
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        found.see(f"seed {number}", family, TimeoutError(f"a process took more than {SECONDS} s"))
        return found
    if done.returncode:
        kind = "native crash" if done.returncode < 0 else "error"
        found.see(f"seed {number}", family, RuntimeError(f"{kind}, exit code {done.returncode}: {done.stderr[-3000:]}"))
        return found
    read = json.loads(done.stdout.splitlines()[-1])
    return Found(Counter(read["counts"]), read["differences"])

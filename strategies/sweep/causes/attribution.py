"""The function of torch that makes a finding, found by replacing one function after another by a right one.

The finding's program runs on rank threads.  A trace gives the ops that DTensor ran and the part that decided the placements
of each.  Then one part at a time is replaced, and the part whose replacement makes the finding vanish is its cause:

| replaced                                                           | where it vanishes, the cause is            |
|---------------------------------------------------------------------|--------------------------------------------|
| redistributions, by a gather and a new cut; only where one was wrong | the method of the placement that ran       |
| an op, by the op on whole tensors, with DTensor's own placements     | within this op; the first such op counts   |
| the decomposition that was traced, by running it op by op            | the decomposition, as DTensor traces it    |
| several handlers, or decompositions, all at once                     | the first that the run is wrong without    |
| the rule, by replicas                                                | the registered function                    |
| neither of these two                                                 | DTensor's dispatcher, or the op's handler  |
| plain tensors beside DTensors, by replicas; of a call that is refused | the dispatcher's check of arguments        |
| an op for which no rule was looked for, by the op on whole tensors   | the dispatch in native code                |
| the base of a view that is written to, by replicas                   | the rule of the view, of which DTensor redistributes the base |
| nothing, in a program of a public call                               | the public function                        |
| nothing, where every rank raises                                     | the function of DTensor that raises        |

An op whose results are as its placements claim is not the cause, even if replicas in its place hide the error of a later op.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from localtensor.errors import LocalTensorError
from strategies.base.signals import quiet
from strategies.model.cause import PUBLIC_CALL
from strategies.model.kernels import REJECTIONS
from strategies.model.rule import PUBLIC, Program, overload
from strategies.programs.public_api.table import public_object, step_name
from strategies.programs.run.follow_ups import GRADS, VIEW_STEPS, steps_of
from strategies.programs.run.program_oracle import dispatched_ops, oracle_of_program
from strategies.programs.run.rank_run import WrongPieceShape
from strategies.programs.run.real_run import case_tasks, mesh_task_of, program_tasks
from strategies.programs.run.verdict import MISFIT, Confirmation, error_text, raises
from strategies.programs.shrink.search import failure_kind, program_of, same_kind
from strategies.torch_api import counterfactuals
from strategies.torch_api.code_places import (
    CodePlace,
    arguments_place,
    dispatcher_place,
    native_dispatcher_place,
    no_return_place,
    place_of,
    raising_place,
    tracer_place,
)
from strategies.torch_api.counterfactuals import DECOMPOSITION, HANDLER, OpStep, Trace
from strategies.torch_api.dtensor import has_own_dispatch
from strategies.torch_api.rank_runs import MeshTask, run_on_threads, with_implicit_replication
from strategies.torch_api.user_modules import import_rules
from strategies.validation.finding import Candidate, case_of

PLAIN_MOVES = "each redistribution replaced by a gather of the whole tensor and a new cut"
PLAIN_HANDLER = "DTensor's handler replaced by the op itself on gathered tensors"
OP_BY_OP = "the decomposition run op by op on DTensors, and not traced once for its placements"
REPLICAS = "the registered function replaced by one that takes and gives replicas"
WHOLE_CUT = "the op run on gathered tensors, its results cut by the placements that DTensor gives them"
WHOLE_REPLICATED = "the op run on gathered tensors, its results as replicas"
BASE_REPLICATED = "the base of the view as replicas, which DTensor does not redistribute"
"""What is replaced, in words that follow "with", for each function of `strategies.torch_api.counterfactuals`."""
IMPLICIT = (
    "plain tensors beside DTensors taken as replicas (`torch.distributed.tensor.experimental.implicit_replication`)"
)
BY_PIECES = "the op's own results on the ranks' pieces show that the rule is wrong, whatever runs it"
NOT_SIMULATED = "no run on rank threads goes wrong: it shows on real processes only"
NO_PART = "more than one part of DTensor is wrong in it, or one that none of the replacements reaches"
STAYS = "the call stays in it, as its stack shows"
OF_COPY = "DTensor redistributes the base first: the view is one of a copy"
FORMULA = "the plain tensor is made by a derivative formula of autograd, which is native code"
RAISES_IN = "it raises the error, and no replacement of one part reaches what is wrong"
CALLED = "the place is that of the public call; the function within it that is wrong is not known"
BEFORE_RULES = "the call is refused before DTensor looks for a rule"
ANOTHER_FOLLOWS = "With {what} the error of one of them is gone, and another follows: {error}"
INSTEAD = f"With {OP_BY_OP}, every rank refuses the call: "
ALIASES = ("aten.alias.default", "aten.detach.default")
"""Ops that give their own tensor: replicas cure any program that begins with one, and new parts of a sum may do so by luck."""
RULE, REDISTRIBUTION, DISPATCHER, UNKNOWN = "rule", "redistribution", "dispatcher", "unknown"
OWN_OPS = "public_calls."
"""The namespace of ops that programs of public calls register: what is wrong of one is wrong of the public call."""
Replacement = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Attribution:
    """The cause of one finding: its kind, the function, the op that it affects, and the replacement that cured it.

    `why` says in words why there is no function, or no replacement that cured it.

    `detail` is the redistribution (`P(sum) -> R`), or the inputs and outputs of the op at fault.  `program` is the program
    that ran; `reason` what was wrong with it.  The kind is "unknown" where no single replacement cures it, and `place` is
    None for a part of torch without a Python function.
    """

    kind: str
    place: CodePlace | None = None
    op: str = ""
    detail: str = ""
    fix: str = ""
    why: str = ""
    reason: str = ""
    program: Program | None = None
    judged: bool = False


@dataclass(frozen=True, slots=True)
class AttributionTask:
    """A finding by its name, and its candidates, the smallest first; `judged` if the probe found the rule itself wrong."""

    name: str
    reason: str
    candidates: tuple[Candidate, ...]
    judged: bool
    seed: int
    home: tuple[str, str] = ("", "")


def attribution(task: AttributionTask, note: Callable[[int], None]) -> Attribution:
    """The cause of the finding, by the first of its candidates that goes wrong; "unknown" where none does."""
    if task.home[0]:
        import_rules(*task.home)
    note(0)
    if place := no_return_place(task.reason):  # a run on rank threads would not return
        first = task.candidates[0]
        return Attribution(RULE, place, first.instance.rule.op, why=STAYS, reason=task.reason, program=first.program)
    unlike: Attribution | None = None
    for candidate in task.candidates:
        try:
            program, work = work_of(candidate, task.seed)
        except (*REJECTIONS, LocalTensorError):  # the candidate is of another version of torch or of this tool
            continue
        judged = task.judged and candidate.program is None
        attributor = Attributor(work, judged=judged, program=program)
        found = attributor.cause(task.reason)
        if found is not None:
            return replace(found, program=program, judged=judged)
        if unlike is None and (found := attributor.cause()) is not None:
            unlike = replace(found, program=program, judged=judged)
    # The finding was confirmed on a smaller case, which may go wrong in another way: as a shape and not a value, say.
    return unlike or Attribution(UNKNOWN, reason=task.reason, why=NOT_SIMULATED)


def work_of(candidate: Candidate, seed: int) -> tuple[Program, MeshTask[Confirmation]]:
    """The program of a candidate, and its run, with the values with which it was confirmed.  Raises as `case_of`."""
    if candidate.program is not None:
        return candidate.program, program_work(candidate.program)
    case = case_of(candidate.instance, seed)
    program = program_of(case, candidate.instance.evidence.draw, seed)
    return program, mesh_task_of(program, case.oracle, case_tasks(case, "cpu"))


def program_work(program: Program) -> MeshTask[Confirmation]:
    """The run of a program.  Raises as `oracle_of_program` and `local_inputs_of`."""
    torch.manual_seed(program.seed)
    return mesh_task_of(program, oracle_of_program(program), program_tasks(program, "cpu"))


def outcome(work: MeshTask[Confirmation]) -> Confirmation:
    """What a run on rank threads comes to."""
    with quiet(), torch.random.fork_rng(devices=[]):
        return run_on_threads([work])[0]


VALUES, SHAPE, RAISES, REFUSED = "values", "shape", "raises", "refused"


def fault_class(reason: str) -> str:
    """The class of a fault by its reason in words: some ranks raise, or all do; shapes, or dtypes, or values are wrong."""
    if raises(reason):  # the advice in a report of ranks that stop speaks of every rank, too
        return REFUSED if re.search(r"^(?!stops).*every rank|refuses this call|^no rank returns", reason) else RAISES
    what = failure_kind(reason).what
    return what if what in (SHAPE, "dtype") else VALUES


def fault_of(found: Confirmation) -> str:
    """What is wrong with a run, or "": a wrong result, an error on some rank, or on every rank."""
    if found.wrong:
        return found.wrong
    if found.refused.startswith(f"{WrongPieceShape.__name__}: "):  # found by us: torch raises nothing
        return f"{MISFIT}: {found.refused.partition(': ')[2]}"
    return found.note if any(result.errors for result in found.rank_results) else ""


class Attributor:
    """The search for the cause of one run that goes wrong."""

    def __init__(self, work: MeshTask[Confirmation], *, judged: bool, program: Program | None = None) -> None:
        self._work, self._judged, self._program = work, judged, program
        self._first: tuple[Trace, str] | None = None
        self._later, self._follows = False, ""

    def cause(self, like: str = "") -> Attribution | None:
        """The cause; None if the run is right, or wrong in another way than by the reason `like`."""
        self._first = self._first or self._traced()
        trace, reason = self._first
        if not reason or (like and fault_class(like) != fault_class(reason)):
            return None
        found = self._replaceable(trace, reason)
        if found is None or found.op.startswith(OWN_OPS):
            found = self._public_call()
        if found is None and fault_class(reason) == REFUSED:
            found = self._first_of_several(trace, reason) or self._raising(reason)
        return replace(found or Attribution(UNKNOWN, why=NO_PART), reason=reason)

    def _replaceable(self, trace: Trace, reason: str) -> Attribution | None:
        """The part of DTensor without which the run is right."""
        refused = fault_class(reason) == REFUSED
        found = self._plain_tensor() if refused else None
        found = (
            found or self._view(trace) or self._redistribution(trace) or self._op(trace.steps) or self._by_probe(trace)
        )
        return found or (self._before_rules(trace, reason) if refused else None)

    def _first_of_several(self, trace: Trace, reason: str) -> Attribution | None:
        """The part that refuses the call first, where another one refuses it without it."""
        self._later = True
        try:
            found = self._replaceable(trace, reason)
        finally:
            self._later = False
        if found is None or not found.fix:
            return None
        return replace(found, fix="", why=ANOTHER_FOLLOWS.format(what=found.fix, error=self._follows))

    def _public_call(self) -> Attribution | None:
        """The public function that the program uses, where none of the ops and redistributions that it runs is wrong."""
        then = self._program.then if self._program else ""
        if not then.startswith(PUBLIC):
            return None
        used = public_object(then)
        where = place_of(vars(used).get("__init__", used) if isinstance(used, type) else used)
        return Attribution(PUBLIC_CALL, where, detail=step_name(then), why=CALLED)

    def _view(self, trace: Trace) -> Attribution | None:
        """The rule of a view of a redistributed copy, in a program that writes to a view or to its base."""
        program, steps = self._program, trace.steps
        if program is not None and program.then.startswith(PUBLIC):  # one that writes after a view was made
            steps = steps[: max((i for i, step in enumerate(steps) if overload(step.op)._schema.is_mutable), default=0)]
        elif program is None or not VIEW_STEPS.keys() & set(steps_of(program.then)):
            return None
        for step in steps:
            if step.of_copy and not step.outer and self.cures(_op_replaced(program.sample.op, keep=False)):
                return Attribution(RULE, step.place, step.op, step.detail, BASE_REPLICATED, OF_COPY)
        return None

    def _traced(self, *around: Replacement, work: MeshTask[Confirmation] | None = None) -> tuple[Trace, str]:
        with ExitStack() as stack:
            for one in around:
                stack.enter_context(one())
            trace = stack.enter_context(counterfactuals.traced())
            return trace, fault_of(outcome(work or self._work))

    def cures(self, *replacements: Replacement, work: MeshTask[Confirmation] | None = None) -> bool:
        """Whether the run, or that of `work`, is right with these parts replaced; or refused later, while that is looked for."""
        if self._later:
            return self._refused_later(*self._traced(*replacements, work=work))
        with ExitStack() as stack:
            for one in replacements:
                stack.enter_context(one())
            return not fault_of(outcome(work or self._work))

    def _refused_later(self, trace: Trace, reason: str) -> bool:
        """Whether this run gets as far as the first one, and is refused by another error, or comes to a wrong result."""
        before, first = self._first or self._traced()
        missing = {step.op for step in before.steps} - {step.op for step in trace.steps}
        if len(missing) > 1 or not reason or fault_class(reason) == RAISES or same_kind(first, reason):
            return False  # one op may be replaced
        self._follows = re.sub(r"^.*?: (?=\w+(Error|Exception): )", "", reason.splitlines()[0])[:160]
        return True

    def _redistribution(self, trace: Trace) -> Attribution | None:
        if not trace.wrong or not self.cures(counterfactuals.redistribution_replaced):
            return None
        wrong = trace.wrong[0]
        place = wrong.methods[-1] if wrong.methods else None
        return Attribution(REDISTRIBUTION, place, "", f"{wrong.source} -> {wrong.target}", PLAIN_MOVES)

    def _op(self, steps: Sequence[OpStep], *around: Replacement) -> Attribution | None:
        outer: dict[str, list[OpStep]] = {}
        for step in steps:
            if not step.outer and (self._judged or step.op not in ALIASES):
                outer.setdefault(step.op, []).append(step)
        # What makes a sum of booleans is wrong, although each op that reads it is right once it runs on whole tensors.
        tries = [(op, False) for op, calls in outer.items() if any(step.sums_bools for step in calls)]
        # As replicas, results of any op before the one at fault would cure it, too.  Of wrong values the last one counts, which no
        # later op would cure; an error may show where a later op reads what an earlier one made.
        late = reversed(outer) if self._first is not None and fault_class(self._first[1]) == VALUES else iter(outer)
        for op, keep in [*tries, *((op, True) for op in outer), ("", False), *((op, False) for op in late)]:
            if not op:
                if together := self._together(outer, around):
                    return together
            elif self.cures(*around, _op_replaced(op, keep=keep)):
                return self._part(max(outer[op], key=_spread), around, keep=keep)
        return None

    def _together(self, outer: dict[str, list[OpStep]], around: Sequence[Replacement]) -> Attribution | None:
        """The first of several handlers, or decompositions, that are wrong: with one of them replaced the others still are."""
        plain, traced = partial(_op_replaced, keep=True), _decomposition_replaced
        for how, whole, fix in (HANDLER, plain, PLAIN_HANDLER), (DECOMPOSITION, traced, OP_BY_OP):
            steps = {op: step for op, calls in outer.items() for step in calls if step.how == how}
            # An error may have ended the run before further ones.
            then = self._traced(*around, *map(whole, steps))[0].steps if steps else []
            steps |= {step.op: step for step in then if step.how == how and not step.outer and step.op not in steps}
            if len(steps) < 2 or not self.cures(*around, *map(whole, steps)):
                continue
            for op in list(steps):  # one that the run is right without
                rest = {other: step for other, step in steps.items() if other != op}
                steps = rest if rest and self.cures(*around, *map(whole, rest)) else steps
            step = next(iter(steps.values()))
            return Attribution(how, step.place if how == HANDLER else tracer_place(), step.op, step.detail, fix)
        return None

    def _by_probe(self, trace: Trace) -> Attribution | None:
        """The rule that the probe found wrong by the ops' own results, where no replacement makes DTensor's run right."""
        outer = [step for step in trace.steps if not step.outer]
        if not self._judged or not outer:
            return None
        step = outer[0]
        kind = step.how if step.how in (DECOMPOSITION, HANDLER) else RULE
        return Attribution(kind, step.place, step.op, step.detail, why=BY_PIECES)

    def _plain_tensor(self) -> Attribution | None:
        """The part that refuses a plain tensor beside DTensors, if nothing else is wrong with the run."""
        if self._program is None or not self.cures(work=with_implicit_replication(self._work)):
            return None
        why = FORMULA if self._program.then in GRADS or self._program.then.startswith("grad") else ""
        return Attribution(DISPATCHER, arguments_place(), "", "a plain tensor beside DTensors", IMPLICIT, why)

    def _before_rules(self, trace: Trace, reason: str) -> Attribution | None:
        """The dispatch in native code, where it refuses an op of the program for which no rule was looked for."""
        seen = {step.op for step in trace.steps}
        for op in dispatched_ops(self._program) if self._program is not None else ():
            if op not in seen and self.cures(_op_replaced(op, keep=False)):
                said, place = error_text(reason), native_dispatcher_place()
                return Attribution(DISPATCHER, place, "", said, WHOLE_REPLICATED, BEFORE_RULES)
        return None

    def _raising(self, reason: str) -> Attribution | None:
        """The function of DTensor that raises on the first rank that does, where no replacement makes the run right."""
        traces = (result.trace for result in outcome(self._work).rank_results)
        place = next(filter(None, map(raising_place, traces)), None)
        return Attribution(DISPATCHER, place, "", error_text(reason), why=RAISES_IN) if place else None

    def _part(self, step: OpStep, around: Sequence[Replacement], *, keep: bool) -> Attribution:
        """The part of DTensor that is wrong for this op: on whole tensors the op gives the right result."""
        if step.how == HANDLER:
            return Attribution(HANDLER, step.place, step.op, step.detail, PLAIN_HANDLER)
        if step.how == DECOMPOSITION and not around:
            whole = _decomposition_replaced(step.op)
            if self.cures(whole):
                return Attribution(DECOMPOSITION, tracer_place(), step.op, step.detail, OP_BY_OP)
            trace, follows = self._traced(whole)
            first = self._first or self._traced()
            if fault_class(follows) == REFUSED != fault_class(first[1]):
                return Attribution(
                    DECOMPOSITION, tracer_place(), step.op, step.detail, why=INSTEAD + error_text(follows)
                )
            inner = self._op(trace.steps, whole)
            if inner is not None:
                return replace(inner, fix=f"{OP_BY_OP}, and in it {inner.fix}")
        if step.place is not None and (self.cures(*around, _rule_replaced(step.place, step.op))):
            kind = RULE if step.how != DECOMPOSITION else DECOMPOSITION
            return Attribution(kind, step.place, step.op, step.detail, REPLICAS)
        fix = WHOLE_CUT if keep else WHOLE_REPLICATED
        # Placements that are not those of the pieces are no rule's: a rule says nothing of a shape.
        misfit = overload(step.op)._schema.is_mutable and self._first is not None and MISFIT in self._first[1]
        if not misfit and (self._judged or not has_own_dispatch(overload(step.op))):
            return Attribution(
                RULE if step.how != DECOMPOSITION else DECOMPOSITION, step.place, step.op, step.detail, fix
            )
        return Attribution(DISPATCHER, dispatcher_place(), step.op, step.detail, fix)


def _spread(step: OpStep) -> int:
    """How many results of a call are not replicas: of several calls of an op, one of shards is the one at fault."""
    return sum(placements.replace("R", "").strip(", ") != "" for placements in step.outputs)


def _op_replaced(op: str, *, keep: bool) -> Replacement:
    return lambda: counterfactuals.op_replaced(overload(op), keep=keep)


def _decomposition_replaced(op: str) -> Replacement:
    return lambda: counterfactuals.decomposition_replaced(overload(op))


def _rule_replaced(place: CodePlace, op: str) -> Replacement:
    return lambda: counterfactuals.rules_replaced(place, frozenset([op]))

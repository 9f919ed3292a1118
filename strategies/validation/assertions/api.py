"""Property-based tests of a sharding rule, in two lines.

    import localtensor.testing as testing

    def test_the_rule_of_scale():
        testing.assert_rule(torch.ops.mylib.scale.default, "S(0), R -> S(0)")

A rule holds if the ranks can run the op on their pieces, sharded by its inputs, and the results, assembled by its
outputs, equal the op's result on whole tensors.  Hypothesis searches for the smallest case in which it does not.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure, Unsatisfiable
from torch.distributed.tensor import Partial

from localtensor.testing.hypothesis_strategies.search import Draw, one_of
from strategies.validation.assertions.calls import Call, Calls, given_calls, known_calls, one_of_calls, schema_calls
from strategies.validation.assertions.case import CaseRun, CaseSkipped, RuleCase, RuleMisfit
from strategies.validation.assertions.ops import FunctionOp, Op, OpLike, materialized
from strategies.validation.assertions.rule import AssertedRule, Layouts, NotARule, NothingTested, RuleLike, read_layouts
from strategies.validation.assertions.script import caller, imports_of, wrong_rule
from strategies.validation.assertions.shardings import ShardingCase, ShardingClaim, run_sharding_case, wrong_sharding

Inputs: TypeAlias = "st.SearchStrategy[Any] | Iterable[tuple[torch.Tensor, ...]]"
C = TypeVar("C")
R = TypeVar("R")
MOST_WITHOUT_VERDICT = 200
"""Cases without a verdict after which a search without any verdict is given up."""


class _Found(Exception):
    """Ends an example that is wrong."""


class _Hopeless(Exception):
    """Ends a search without verdicts."""


@dataclass
class ExampleSearch(Generic[C, R]):
    """The result of a search: the smallest wrong case and its run, the number of cases with a verdict, and the reasons
    why others have none."""

    wrong: tuple[C, R] | None = None
    judged: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    misfits: Counter[str] = field(default_factory=Counter)

    @property
    def excuse(self) -> str:
        """The most common reason why cases have no verdict."""
        for found in (self.misfits, self.skipped):
            if found:
                return found.most_common(1)[0][0]
        return "no call could be drawn"


def search_examples(
    cases: st.SearchStrategy[C], judge: Callable[[C], tuple[R, bool]], *, max_examples: int, seed: int
) -> ExampleSearch[C, R]:
    """Search the cases for a wrong one; the same in every run with the same seed.

    `run_sharding_case` returns the run of a case and whether it is right, or raises `CaseSkipped` or `RuleMisfit`.
    """
    found: ExampleSearch[C, R] = ExampleSearch()

    @hypothesis.seed(seed)
    @settings(
        database=None, phases=(Phase.generate, Phase.shrink), max_examples=max_examples, deadline=None,
        derandomize=False, suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )  # fmt: skip
    @hypothesis.given(cases)
    def example(case: C) -> None:
        try:
            ran, right = judge(case)
        except (CaseSkipped, RuleMisfit) as why:
            kind = found.misfits if isinstance(why, RuleMisfit) else found.skipped
            kind[str(why)] += 1
            if not found.judged and found.skipped.total() + found.misfits.total() >= MOST_WITHOUT_VERDICT:
                raise _Hopeless from None
            hypothesis.reject()
        found.judged += 1
        if not right:
            found.wrong = case, ran
            raise _Found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=hypothesis.errors.HypothesisWarning)
        try:
            example()
        except (_Found, _Hopeless, Unsatisfiable):
            pass  # `found` holds the result; without any verdict its counts hold the reasons
        except FlakyFailure:
            pass  # wrong once, and right when it ran again: the wrong case is kept
    return found


RANKS, EXAMPLES, SPLITS = (2, 3, 4), 100, range(100)
MOST_TORCH_SAMPLES = 40
"""The most calls that are torch's own samples."""
DTYPES = (torch.float64, torch.int64, torch.bool, torch.float32)
"""Default dtypes of tensors: the first of these that the op takes."""


def assert_rule(
    op: OpLike,
    rule: RuleLike,
    *,
    calls: Calls | None = None,
    where: Callable[..., bool] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    ranks: Sequence[int] = RANKS,
    uneven: bool = True,
    splits: Sequence[int] = SPLITS,
    max_examples: int = EXAMPLES,
    seed: int = 0,
) -> None:
    """Assert that the rule holds on every call that is tried; `WrongRule`, an `AssertionError`, shows the smallest one.

    op            `torch.ops.mylib.scale.default`, "mylib::scale", or what `torch.library.custom_op` returned.
    rule          "S(0), R -> S(0)": a placement for each tensor of the call (lists count one by one), then for each
                  result, "-" for one that is no tensor; or (inputs, outputs).  Arguments that the op mutates
                  without returning them are tested, too, under their own placements.
    calls         a list of (args, kwargs), or a Hypothesis strategy of them.  By default they are drawn from the op's
                  schema, and for torch's own ops from torch's samples, too.
    where         a filter: only calls for which `where(*args, **kwargs)` is true.
    dtypes        of drawn tensors; by default float64, or if the op takes none of those int64, bool, float32.
    ranks         numbers of ranks, the simplest first.
    uneven        whether ranks may hold shards of different sizes, and empty ones.
    splits        seeds for the decomposition of partial values, whose parts cancel and change signs.
    max_examples  calls to test; the same `seed` tests the same ones.

    Raises `NotARule` for a rule that cannot be parsed or does not fit the op, `BadPlacement` for an invalid placement,
    and `NothingTested` if no call could be tested: that is no pass.

    >>> assert_rule("aten.neg.default", "S(0) -> S(0)", max_examples=20)
    >>> assert_rule("aten.abs.default", "P(sum) -> P(sum)")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    strategies.validation.assertions.rule.WrongRule: assert_rule: rule: aten.abs.default: P(sum) -> P(sum): on 2 ranks...
    """
    found = _searched("assert_rule", op, rule, calls, where, dtypes, ranks, uneven, splits, max_examples, seed)
    if found.wrong is not None:
        case, ran = found.wrong
        raise wrong_rule(case, ran, imports_of(Op.of(op), caller(1)), found.judged)


def assert_sharding(
    fn: Callable[..., Any],
    in_placements: Layouts,
    out_placements: Layouts,
    *,
    inputs: Inputs | None = None,
    meshes: Sequence[tuple[int, ...]] | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES[:1],
    empty: bool = False,
    splits: Sequence[int] = SPLITS,
    max_examples: int = 20,
    seed: int = 0,
) -> None:
    """Assert that `fn` on DTensors with `in_placements` gives DTensors with `out_placements`, and the same values as on
    plain tensors; `WrongRule` shows the smallest case.  Each example runs on rank threads, with torch's own DTensor.

    fn              a function of tensors that returns a tensor or several.
    in_placements   for each tensor: "S(0)", or a tuple with a placement for each axis of the mesh.
    out_placements  the same for each result.  Both may be one text, "S(0), R", for tensors on one axis.
    inputs          tensors: a list of tuples, or a Hypothesis strategy of them; by default they are drawn, of
                    shapes that `fn` takes, uneven shards among them.
    meshes          sizes of the axes, the simplest first; by default up to four ranks.
    empty           whether a dim may be smaller than the axes that shard it: DTensor then prefers other placements.

    The other arguments, and what is raised, are as in `assert_rule`.

    >>> assert_sharding(torch.mm, ["S(0)", "R"], ["S(0)"], max_examples=3)
    >>> assert_sharding(torch.mm, [("S(0)", "R"), ("R", "S(1)")], [("S(0)", "S(1)")], max_examples=3)
    """
    call = "assert_sharding"
    placed = read_layouts(in_placements, call, "in_placements")
    claim = ShardingClaim(fn, placed, read_layouts(out_placements, call, "out_placements"))
    sizes = _meshes(claim, meshes)
    _check(call, (2,), splits, max_examples)
    if not callable(fn):
        raise NotARule(call, "fn", repr(fn), "it is no function", "Pass a function of tensors.")
    drawn, why = _tensors(claim, inputs, dtypes)
    found: ExampleSearch[ShardingCase, Any] = ExampleSearch()
    if drawn is not None:
        partial = any(isinstance(p, Partial) for layout in claim.inputs for p in layout)
        split = one_of(tuple(splits)) if partial else st.just(0)
        cases = st.builds(
            ShardingCase, mesh=one_of(sizes), tensors=drawn.map(tuple), split=split, empty=st.just(empty)
        )  # drawn in this order
        found = search_examples(
            cases, lambda case: run_sharding_case(claim, case), max_examples=max_examples, seed=seed
        )
        why = found.excuse
    if found.misfits and not found.judged:
        raise NotARule(call, "placements", str(claim), why, "Write placements for each tensor and each result.")
    if not found.judged:
        raise NothingTested(call, str(claim), why, "Give inputs= that the function takes.")
    if found.wrong is not None:
        case, (oracle, held, wrong) = found.wrong
        raise wrong_sharding(claim, case, oracle, held, wrong, found.judged)


def _tensors(
    claim: ShardingClaim, inputs: Inputs | None, dtypes: Sequence[torch.dtype]
) -> tuple[st.SearchStrategy[Any] | None, str]:
    if isinstance(inputs, st.SearchStrategy):
        return inputs, ""
    if inputs is not None:
        listed = list(inputs)
        return (one_of_calls(listed) if listed else None), "inputs= is empty"
    first = AssertedRule(tuple(layout[0] for layout in claim.inputs), ())
    found: list[st.SearchStrategy[Call]] = []
    why = ""
    for dtype in dtypes:
        drawn, no = schema_calls(FunctionOp(claim.fn, len(claim.inputs)), first, dtype)
        found, why = [*found, *([drawn] if drawn is not None else [])], why or no
    return (st.one_of(found).map(lambda call: call[0]), "") if found else (None, why)


def _meshes(claim: ShardingClaim, meshes: Sequence[tuple[int, ...]] | None) -> tuple[tuple[int, ...], ...]:
    axes = claim.axes
    usual = {1: ((2,), (3,), (4,)), 2: ((2, 2), (1, 3), (3, 1))}.get(axes, ((2,) * axes,))
    found = usual if meshes is None else tuple(map(tuple, meshes))
    wanted = {len(layout) for layout in (*claim.inputs, *claim.outputs)} | {len(mesh) for mesh in found}
    if not found or wanted != {axes} or any(size < 1 for mesh in found for size in mesh):
        problem = f"the inputs are placed on {axes} axes"
        raise NotARule("assert_sharding", "meshes", repr(found), problem, "Give sizes and out_placements for as many.")
    return found


def check_case(case: RuleCase) -> None:
    """Assert that the rule holds in this one case.  Raises `WrongRule`, and `NothingTested` for a case without verdict."""
    try:
        ran = case.judged()
    except CaseSkipped as why:
        raise NothingTested("check_case", repr(case), str(why), "Take another case.") from None
    if ran.wrong is not None:
        raise wrong_rule(case, ran, imports_of(Op.of(case.op), caller(1)))


def rule_cases(
    op: OpLike,
    rule: RuleLike,
    *,
    calls: Calls | None = None,
    where: Callable[..., bool] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    ranks: Sequence[int] = RANKS,
    uneven: bool = True,
    splits: Sequence[int] = SPLITS,
) -> st.SearchStrategy[RuleCase]:
    """The cases of `assert_rule` as a Hypothesis strategy for a test of your own, which may have an `@example`.

    >>> from hypothesis import given
    >>> @given(case=rule_cases("aten.neg.default", "S(0) -> S(0)"))
    ... def test_neg(case):
    ...     check_case(case)
    """
    overload, read = Op.of(op, "rule_cases"), AssertedRule.read(rule, "rule_cases")
    _check("rule_cases", ranks, splits, 1)
    sources = list(_sources(overload, read, calls, tuple(dtypes or DTYPES[:1])))
    found = next((strategy for strategy, _ in sources if strategy is not None), None)
    if found is None:
        raise NothingTested("rule_cases", f"{overload.name}: {read}", sources[0][1], "Give calls= or dtypes=.")
    wanted = found if where is None else found.filter(lambda call: _is_wanted(where, call))
    return _cases(overload, read, wanted, tuple(ranks), uneven, tuple(splits))


def _searched(
    call: str, op: OpLike, rule: RuleLike, calls: Calls | None, where: Callable[..., bool] | None,
    dtypes: Sequence[torch.dtype] | None, ranks: Sequence[int], uneven: bool, splits: Sequence[int],
    max_examples: int, seed: int,
) -> ExampleSearch[RuleCase, CaseRun]:  # fmt: skip
    overload, read = Op.of(op, call), AssertedRule.read(rule, call)
    _check(call, ranks, splits, max_examples)
    if overload.random:
        why = "it draws random numbers, so that no two calls give the same"
        raise NothingTested(call, overload.name, why, "Compare its distribution in a test of your own.")
    judged, excuse = 0, ""
    for some in ((),) if calls is not None else (tuple(dtypes),) if dtypes else [(dtype,) for dtype in DTYPES]:
        for turn, (drawn, why) in enumerate(_sources(overload, read, calls, some)):
            excuse = excuse or why
            if drawn is None:
                continue

            def found_on(
                counts: Sequence[int], drawn: st.SearchStrategy[Call] = drawn, turn: int = turn
            ) -> ExampleSearch[RuleCase, CaseRun]:
                cases = _cases(overload, read, drawn, tuple(counts), uneven, tuple(splits))
                most = min(max_examples, MOST_TORCH_SAMPLES) if turn else max_examples
                return search_examples(cases, lambda case: _judge(case, where), max_examples=most, seed=seed)

            found = found_on(ranks)
            if found.misfits and (not found.judged or isinstance(calls, list | tuple)):
                remedy = "Write a placement for each tensor and each result, '-' for what is none."
                raise NotARule(call, "rule", f"{overload.name}: {read}", found.misfits.most_common(1)[0][0], remedy)
            excuse = found.excuse if not found.judged else ""
            judged = found.judged = judged + found.judged
            if found.wrong:
                fewer = [count for count in ranks if count < found.wrong[0].ranks]
                smaller = found_on(fewer).wrong if fewer else None  # simpler values may be wrong on more ranks only
                found.wrong = smaller or found.wrong
                return found
        if judged:
            return found
    remedy = "Give calls= that the op takes and the rule fits."
    raise NothingTested(call, f"{overload.name}: {read}", excuse, remedy)


def _judge(case: RuleCase, where: Callable[..., bool] | None) -> tuple[CaseRun, bool]:
    if where is not None and not _is_wanted(where, (case.args, dict(case.kwargs))):
        raise CaseSkipped("where= asks for no such call")
    ran = case.judged()
    return ran, ran.wrong is None


def _sources(
    op: Op, rule: AssertedRule, calls: Calls | None, dtypes: Sequence[torch.dtype]
) -> Iterator[tuple[st.SearchStrategy[Call] | None, str]]:
    """The sources of calls, each with a reason if it is None: drawn calls come first, since torch's samples do not
    shrink."""
    if calls is not None:
        yield given_calls(calls), ""
        return
    drawn = [schema_calls(op, rule, dtype) for dtype in dtypes]
    found = [strategy for strategy, _ in drawn if strategy is not None]
    yield (st.one_of(found) if found else None), next((why for _, why in drawn if why), "")
    known = [call for dtype in dtypes for call in known_calls(op, rule, dtype)]
    if known:
        yield one_of_calls(known), ""


def _cases(
    op: Op, rule: AssertedRule, calls: st.SearchStrategy[Call], ranks: tuple[int, ...], uneven: bool,
    splits: tuple[int, ...],
) -> st.SearchStrategy[RuleCase]:  # fmt: skip
    partial = any(isinstance(p, Partial) for p in rule.inputs)
    name, text = op.name, str(rule)

    @st.composite
    def cases(draw: Draw) -> RuleCase:
        count = draw(one_of(ranks))
        args, kwargs = draw(calls)
        return RuleCase(name, text, args, kwargs, count, draw(one_of(splits)) if partial else 0, uneven)

    return cases()


def _is_wanted(where: Callable[..., bool], call: Call) -> bool:
    """Whether the filter `where` is true for the call, with real tensors."""
    args, kwargs = materialized(call[0]), materialized(call[1])
    return bool(where(*args, **kwargs))


def _check(call: str, ranks: object, splits: object, max_examples: object) -> None:
    counts = tuple(ranks) if isinstance(ranks, Sequence) else ()
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 2 for n in counts):
        problem, remedy = "these are no counts of 2 ranks or more", "Give some, as ranks=(2, 3, 4)."
        raise NotARule(call, "ranks", repr(ranks), problem, remedy)
    if not isinstance(splits, Sequence) or not splits:
        raise NotARule(call, "splits", repr(splits), "there is no seed in it", "Give some, as splits=range(100).")
    if isinstance(max_examples, bool) or not isinstance(max_examples, int) or max_examples < 1:
        raise NotARule(call, "max_examples", repr(max_examples), "that is no number of examples", "Give 1 or more.")

"""An op with its schema and all its results, mutated arguments included; and the shapes of calls that it accepts.

The shapes are found by trying: each dim has a letter, and one letter is one size.

    mm  takes  ab, bn        add  takes  ab, ab   ab, b   ab, 1b ...

A rule is tested only on calls in which all the dims that it shards are one dim: to shard the rows of one operand and
the columns of another proves nothing where these are unrelated.

| torch part                                           | why                                         | read on     | run on |
|------------------------------------------------------|---------------------------------------------|-------------|--------|
| OpOverload._schema                                   | arguments                                   | 2.11 - 2.15 | 2.13   |
| torch._library.custom_ops.OPDEFS, CustomOpDef._opoverload, ._init_fn | from torch.library.custom_op to the op and its file | 2.11 - 2.15 | 2.13 |

`tests/strategies/validation/assertions/test_ops.py` names each part.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import torch

from localtensor.testing.hypothesis_strategies.values import Drawn
from strategies.model.kernels import REJECTIONS, run_call
from strategies.model.rule import call_of, flat_results
from strategies.validation.assertions.rule import AssertedRule, NotARule, shard_dim

REFUSALS = (*REJECTIONS, ArithmeticError)
"""Errors of a user's op for arguments that it does not accept; any other error is a crash."""
OpLike: TypeAlias = "Op | torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch.library.CustomOpDef | str"
_NAME = re.compile(r"(\w+)(?:::|\.)(\w+)(?:\.(\w+))?")
_REMEDY = "Pass torch.ops.mylib.scale.default, its name 'mylib::scale', or what torch.library.custom_op returned."


@dataclass(frozen=True, slots=True)
class Op:
    """One overload; `name` is `mylib.scale.default`."""

    overload: Any

    @classmethod
    def of(cls, op: OpLike, call: str = "assert_rule") -> Op:
        """From an overload, a packet that has one overload, a name, or a custom op.  Raises `NotARule`."""
        if isinstance(op, Op):
            return op
        if isinstance(op, str):
            op = _named(op, call)
        op = getattr(op, "_opoverload", op)
        if isinstance(op, torch._ops.OpOverloadPacket):
            names = op.overloads()
            if len(names) != 1:
                problem = f"it has {len(names)} overloads: {', '.join(names)}"
                raise NotARule(call, "op", str(op), problem, f"Pass one of them, as {op}.{names[0]}.")
            op = getattr(op, names[0])
        if not isinstance(op, torch._ops.OpOverload):
            raise NotARule(call, "op", repr(op), "it is no registered op", _REMEDY)
        return cls(op)

    @property
    def name(self) -> str:
        return str(self.overload)

    @property
    def arguments(self) -> Sequence[Any]:
        return tuple(self.overload._schema.arguments)

    @property
    def random(self) -> bool:
        """Whether torch marks it as random."""
        return torch.Tag.nondeterministic_seeded in self.overload.tags

    @property
    def pointwise(self) -> bool:
        """Whether torch marks it as pointwise."""
        return torch.Tag.pointwise in self.overload.tags

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Its flat results: what it returns, then the tensors that it mutates and does not return.

        It mutates the given tensors themselves.
        """
        call, tensors = call_of(self.overload, args, dict(kwargs))
        return run_call(call, tensors, mutates=False)[1]

    def home(self) -> tuple[str, str] | None:
        """The module and the file whose import registers it, where torch knows."""
        schema = self.overload._schema.name
        made = torch._library.custom_ops.OPDEFS.get(schema)
        function: Callable[..., Any] | None = getattr(made, "_init_fn", None)
        return (function.__module__, function.__code__.co_filename) if function is not None else None


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor argument of a function that has no schema."""

    name: str
    type: str = "Tensor"
    kwarg_only: bool = False
    is_out: bool = False

    def has_default_value(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class FunctionOp(Op):
    """A plain function of `count` tensors, as an op."""

    count: int = 1

    @property
    def arguments(self) -> Sequence[Any]:
        return tuple(TensorArgument(f"x{i}") for i in range(self.count))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return flat_results(self.overload(*args, **kwargs))


def _named(name: str, call: str) -> Any:
    found = _NAME.fullmatch(name.strip())
    if found is None:
        raise NotARule(call, "op", repr(name), "this is no name of an op", _REMEDY)
    namespace, packet, overload = found.groups()
    try:
        op = getattr(getattr(torch.ops, namespace), packet)
        return getattr(op, overload) if overload else op
    except AttributeError:
        problem = "no such op is registered"
        raise NotARule(call, "op", repr(name), problem, f"Import the module that registers it. {_REMEDY}") from None


def map_leaves(value: Any, give: Callable[[Any], object]) -> Any:
    """The same structure with `give(x)` in the place of each leaf x, which is no list, tuple or dict."""
    if isinstance(value, Mapping):
        return {name: map_leaves(one, give) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(one, give) for one in value)
    return give(value)


def materialized(value: object) -> Any:
    """The arguments with real tensors in the place of each `Drawn`."""
    return map_leaves(value, lambda one: one.tensor() if isinstance(one, Drawn) else one)


Shape = tuple[str, ...]
"""A letter for each dim; "1" is a dim of one element that is broadcast."""
BASE_LETTERS, MOST_DIMS = "abcde", 4
MOST_TRIED, TRIES_PER_PLAN = 600, 2
"""Calls that are tried for each number of dims, and values of the other arguments for each combination of shapes."""


@dataclass(frozen=True, slots=True)
class ShapePlan:
    """The shapes of one kind of call: for each tensor argument its shape, or for a list its shapes; None if left out."""

    first: Shape
    shapes: tuple[tuple[str, Shape | tuple[Shape, ...] | None], ...]

    @property
    def flat(self) -> list[Shape]:
        """The shapes of all tensors, in the order in which a rule counts them."""
        found: list[Shape] = []
        for _, shape in self.shapes:
            if shape is not None:
                found += [one for one in shape if isinstance(one, tuple)] if is_list(shape) else [shape]  # type: ignore[list-item]
        return found

    @property
    def letters(self) -> tuple[str, ...]:
        """Every letter, the first tensor's first."""
        return tuple(dict.fromkeys(letter for shape in (self.first, *self.flat) for letter in shape if letter != "1"))


def is_list(shape: Sequence[object]) -> bool:
    """Whether it is the shapes of a list of tensors."""
    return bool(shape) and isinstance(shape[0], tuple)


def takes_tensor(argument: torch._C.Argument) -> str:
    """The tensors that an argument takes: "one", "many" for a list, or "" for none."""
    kind = str(argument.type)
    return "" if "Tensor" not in kind else "many" if "List" in kind or "[]" in kind else "one"


def shape_plans(op: Op, rule: AssertedRule) -> Iterator[ShapePlan]:
    """Every combination of shapes, the simplest first, for a call with as many tensors as the rule has inputs."""
    arguments = [a for a in op.arguments if takes_tensor(a) and not a.is_out]
    fixed = [a for a in arguments if takes_tensor(a) == "one" and not _may_lack(a)]
    lists = [a for a in arguments if takes_tensor(a) == "many"]
    spare = [a for a in arguments if takes_tensor(a) == "one" and _may_lack(a)]
    left = len(rule.inputs) - len(fixed)
    for given in range(min(left, len(spare)), -1, -1) if left >= 0 else ():
        in_lists = left - given
        if bool(in_lists) != bool(lists) or in_lists % max(len(lists), 1):
            continue
        for chosen in itertools.combinations(spare, given):
            present = [a for a in arguments if a in fixed or a in lists or a in chosen]
            yield from _plans_of(arguments, present, in_lists // max(len(lists), 1))


def _may_lack(argument: torch._C.Argument) -> bool:
    return "Optional" in str(argument.type) or bool(argument.has_default_value())


def _plans_of(arguments: Sequence[Any], present: Sequence[Any], many: int) -> Iterator[ShapePlan]:
    for dims in (*range(1, MOST_DIMS + 1), 0):
        base = tuple(BASE_LETTERS[:dims])
        options: list[Sequence[Any]] = []
        for number, argument in enumerate(present):
            if takes_tensor(argument) == "many":
                along = [tuple((*base[:j], f"n{i}", *base[j + 1 :]) for i in range(many)) for j in range(dims)]
                options.append([(base,) * many, *along])
            else:
                options.append([base] if number == 0 else _others(base))
        every: Iterator[tuple[Any, ...]] = itertools.product(*options)
        if options and not any(takes_tensor(argument) == "many" for argument in present):  # first all others alike
            pairs = itertools.product(options[0], options[-1])
            every = itertools.chain(((first, *[other] * (len(options) - 1)) for first, other in pairs), every)
        for shapes in itertools.islice(
            dict.fromkeys(itertools.islice(every, 4 * MOST_TRIED)), MOST_TRIED // TRIES_PER_PLAN
        ):
            given = dict(zip((a.name for a in present), shapes, strict=True))
            yield ShapePlan(base, tuple((a.name, given.get(a.name)) for a in arguments))


def _others(base: Shape) -> list[Shape]:
    """The shapes of a second tensor beside a first one of shape `base`."""
    k = len(base)
    found = [base, base[1:], base[-1:], base[:1], (), base[1:2]]
    found += [(*base[:j], "1", *base[j + 1 :]) for j in range(k)]
    if k:
        found += [(base[-1], "n"), ("n", base[-1]), ("n",), (*base[:-2], base[-1], "n"), base[::-1], ("m", "n")]
        found += [(*base[:j], "n", *base[j + 1 :]) for j in range(k)]
    return list(dict.fromkeys(found))


def has_sharded_dims(plan: ShapePlan, rule: AssertedRule) -> bool:
    """Whether the plan has every dim that the rule shards."""
    pairs = zip(rule.inputs, plan.flat, strict=True)
    return all((d := shard_dim(p)) is None or d < len(s) for p, s in pairs)


def shards_one_dim(plan: ShapePlan, rule: AssertedRule) -> bool:
    """Whether all the dims that the rule shards are one dim, and not a broadcast one."""
    cut = {s[d] for p, s in zip(rule.inputs, plan.flat, strict=True) if (d := shard_dim(p)) is not None}
    return len(cut) <= 1 and "1" not in cut


def is_case_of(special: ShapePlan, general: ShapePlan) -> bool:
    """Whether the first is the second with some dims equal: square matrices are matrices."""
    pairs = [(g, s) for one, two in zip(general.flat, special.flat) for g, s in zip(one, two)]
    same_dims = [*map(len, general.flat)] == [*map(len, special.flat)]
    given = [(name, shape is None) for name, shape in general.shapes]
    if not same_dims or given != [(name, shape is None) for name, shape in special.shapes]:
        return False
    becomes = dict(pairs)
    alike = all(becomes[g] == s and (g == "1") == (s == "1") for g, s in pairs)
    return alike and len(set(becomes.values())) < len(becomes)


def accepted_plans(
    op: Op, rule: AssertedRule, make: Callable[[ShapePlan, Random], tuple[Any, Any]]
) -> tuple[list[ShapePlan], str]:
    """The plans that the op accepts and the rule fits; or none, and the reason.

    `make` makes a call of a plan.  Plans in which the rule shards several dims are used where there are no others.
    """
    found: list[ShapePlan] = []
    refused, beyond, tried = "", False, 0
    for plan in shape_plans(op, rule):
        if not has_sharded_dims(plan, rule):
            beyond = True
            continue
        rng = Random(tried)
        for _ in range(TRIES_PER_PLAN):
            tried += 1
            args, kwargs = make(plan, rng)
            try:
                op.run(args, kwargs)
            except REFUSALS as error:
                refused = refused or (str(error).strip() or type(error).__name__).splitlines()[0]
                continue
            found.append(plan)
            break
    found = [plan for plan in found if not any(is_case_of(plan, other) for other in found)]
    one = [plan for plan in found if shards_one_dim(plan, rule)]
    if found:
        return one or found, ""
    if refused:
        return [], f"the op refused all {tried} calls that were drawn, the first with: {refused}"
    why = "no tensor has the dims that the rule cuts" if beyond else "its schema has no such number of tensors"
    return [], why

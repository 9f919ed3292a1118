"""An op as one thing to call on tensors: by object or by name, with all that it gives, arguments it wrote to included.

| torch part                                           | why                                         | read on     | run on |
|------------------------------------------------------|---------------------------------------------|-------------|--------|
| OpOverload._schema                                   | arguments, what is written, what aliases    | 2.11 - 2.15 | 2.13   |
| torch._library.custom_ops.OPDEFS, CustomOpDef._opoverload, ._init_fn | from torch.library.custom_op to the op and its file | 2.11 - 2.15 | 2.13 |
| torch.utils._pytree.tree_leaves                      | the results of an op, flat                  | 2.11 - 2.15 | 2.13   |

`tests/localtensor/test_testing_rule_ops.py` names each part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from localtensor.testing.rules.errors import NotARule

REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AssertionError, KeyError,
            ArithmeticError)  # fmt: skip
"""What an op raises for arguments that it cannot take; anything else is a crash."""
_NAME = re.compile(r"(\w+)(?:::|\.)(\w+)(?:\.(\w+))?")
_REMEDY = "Pass torch.ops.mylib.scale.default, its name 'mylib::scale', or what torch.library.custom_op returned."


@dataclass(frozen=True, slots=True)
class Op:
    """One overload; `name` is `mylib.scale.default`."""

    overload: Any

    @classmethod
    def of(cls, op: Any, call: str = "assert_rule") -> Op:
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
        """The schema's arguments."""
        return tuple(self.overload._schema.arguments)

    @property
    def random(self) -> bool:
        """Whether torch says that it draws numbers."""
        return torch.Tag.nondeterministic_seeded in self.overload.tags

    @property
    def pointwise(self) -> bool:
        """Whether torch says that it works element by element."""
        return torch.Tag.pointwise in self.overload.tags

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """All that it gives, flat: its results, then the tensors that it wrote to and did not return.

        It writes to what it is given.
        """
        raw = self.overload(*args, **kwargs)
        results = [] if raw is None else pytree.tree_leaves(raw)
        return [*results, *(x for x in tensors_in(self._written(args, kwargs)))]

    def _written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        given = dict(zip((a.name for a in self.arguments), args, strict=False)) | dict(kwargs)
        return [given.get(name) for name in self.writes]

    @property
    def writes(self) -> tuple[str, ...]:
        """The arguments that it writes to and does not return."""
        schema = self.overload._schema
        returned = {name for r in schema.returns if r.alias_info for name in r.alias_info.before_set}
        infos = [(a.name, a.alias_info) for a in schema.arguments]
        return tuple(n for n, info in infos if info and info.is_write and not set(info.before_set) & returned)

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
        """Which tensors of the call those are, by their place among its tensors."""
        if not self.writes:
            return []
        found = tensors_in(self._written(args, kwargs))
        every = tensors_in((args, kwargs))
        return [next(i for i, x in enumerate(every) if x is one) for one in found]

    def home(self) -> tuple[str, str] | None:
        """The module and the file whose import registers it, where torch knows."""
        schema = self.overload._schema.name
        made = torch._library.custom_ops.OPDEFS.get(schema)
        function: Callable[..., Any] | None = getattr(made, "_init_fn", None)
        return (function.__module__, function.__code__.co_filename) if function is not None else None


@dataclass(frozen=True, slots=True)
class Argument:
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
        return tuple(Argument(f"x{i}") for i in range(self.count))

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return list(pytree.tree_leaves(self.overload(*args, **kwargs)))


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


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a call in the order in which DTensor counts them: arguments by place, then by name; lists inside."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [x for one in value.values() for x in tensors_in(one)]
    return [x for one in value for x in tensors_in(one)] if isinstance(value, list | tuple) else []


def replaced(value: Any, give: Callable[[Any], Any]) -> Any:
    """The same with `give(x)` in the place of each x that is no list, tuple or dict."""
    if isinstance(value, Mapping):
        return {name: replaced(one, give) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(one, give) for one in value)
    return give(value)


def with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """The arguments with these tensors in the place of theirs, in the order of `tensors_in`."""
    left = iter(tensors)
    return replaced(value, lambda one: next(left) if isinstance(one, Tensor) else one)

"""The `spmd_typecheck` hooks of autograd Functions as a source: what a hook types the results of its kernel.

A string among the arguments that names the mesh axis stands for its process group.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import localtensor as lt
from localtensor.errors import error_in_one_line
from strategies.model.settings import BadRules
from strategies.torch_api.rank_runs import values_by_rank
from strategies.validation.sources import functions
from strategies.validation.sources.functions import FunctionCall
from strategies.validation.sources.module_samples import MOST, home_of, samples_of_module, tensor_shapes
from strategies.validation.sources.protocol import (
    Answer,
    FunctionSource,
    MeaninglessClaim,
    NamedLayout,
    RefusedLayouts,
    SourceRaises,
)
from strategies.validation.sources.script import Wording
from strategies.validation.sources.spmd_types import typed
from strategies.validation.sources.spmd_types.rank_group import lockstep_group, run_on_ranks

GROUP_NAMES = ("group", "pg", "axis", "process_group", "mesh_axis", "tp_group", "tp")
"""Names of parameters that take a process group."""


@dataclass(frozen=True)
class Kernel:
    """An autograd Function as a function of whole tensors; `axis` among its arguments stands for the process group."""

    cls: type[torch.autograd.Function]
    axis: str

    def __call__(self, *args: Any) -> Any:
        """The results with a group of one rank."""
        if not self.has_group(args):
            return self.cls.apply(*args)
        with lockstep_group(self.axis) as group:
            out = self._with_group(group)(
                *pytree.tree_map_only(Tensor, lambda x: lt.rank_map(lambda _: x.clone()), args)
            )
            return pytree.tree_map_only(Tensor, lambda x: values_by_rank(x, 1)[0], out)

    def has_group(self, args: Sequence[Any]) -> bool:
        """Whether the process group is among the arguments."""
        return any(isinstance(one, str) and one == self.axis for one in args)

    def communicates(self, text: str) -> bool:
        """Whether the call of this text has the group among its arguments."""
        return self.has_group(functions.arguments(text, [None] * functions.tensor_count(text))[0])

    def result_traits(self, tensors: Sequence[Tensor], text: str, wrt: Sequence[int]) -> list[functions.ResultTraits]:
        """The traits of each result, with a group of one rank."""
        with lockstep_group(self.axis) as group:
            given = [lt.rank_map(lambda _, x=x: x.clone()) for x in tensors]  # type: ignore[misc]
            return functions.result_traits(self._with_group(group), given, text, wrt)

    def on_ranks(
        self, held: Sequence[Sequence[Tensor]], ranks: int, text: str, wrt: Sequence[int]
    ) -> list[tuple[Any, ...]]:
        """The flat results of each rank, or the gradients of the tensors `wrt`; `held[i][rank]` are the pieces.

        Raises as `run_on_ranks`.
        """

        def run(tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
            kernel = self._with_group(group)
            if wrt:
                return functions.gradients(kernel, tensors, text, wrt)
            args, kwargs = functions.arguments(text, tensors)
            with torch.no_grad():
                return functions.tensor_results(kernel(*args, **kwargs))

        return run_on_ranks(run, held, ranks, self.axis)

    def _with_group(self, group: Any) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            own = [group if isinstance(one, str) and one == self.axis else one for one in args]
            return self.cls.apply(*own)

        return kernel


class HookSource(FunctionSource):
    """The hooks of some autograd Functions, each with calls of it.

    axis   the string that stands for the process group among the arguments.
    given  pairs of a Function and the arguments of a call, whole tensors in them.
    folder where their module is, for scripts.
    module its full name; without it, that of each Function.
    """

    package, concatenated = "spmd-types", True

    def __init__(
        self,
        name: str,
        given: Sequence[tuple[type, tuple[Any, ...]]],
        axis: str = "",
        folder: str = "",
        module: str = "",
    ) -> None:
        typed.package()
        self.name, self._given, self._axis, self._folder, self._module = name, given, axis, folder, module

    @property
    def title(self) -> str:
        return "the hook"

    def calls(self, names: Sequence[str], seed: int) -> Iterable[FunctionCall]:
        for cls, args in self._given:
            if not names or cls.__name__ in names:
                yield hook_call(cls, args, self._axis)

    def layouts(self, x: Tensor, ranks: int) -> Sequence[NamedLayout]:
        inexact = x.is_floating_point() or x.is_complex()
        return [one for one in typed.layouts(x, ranks) if inexact or one is not typed.P]

    def code(self, call: FunctionCall, text: str) -> str:
        args = text.replace(repr(self._axis), "dist.group.WORLD") if self._axis else text
        return f"{call.function.cls.__name__}.apply({args})"  # type: ignore[attr-defined]

    def wording(
        self, call: FunctionCall, inputs: Sequence[NamedLayout], outputs: Sequence[NamedLayout | None]
    ) -> Wording:
        cls = call.function.cls  # type: ignore[attr-defined]
        module, name = home_of(cls, self._module) or (cls.__module__, cls.__name__)
        # A class that a function of the user has made may have another name than its module gives it.
        own = name if name == cls.__name__ else f"{name} as {cls.__name__}"
        home = f"\nsys.path.insert(0, {self._folder!r})\nfrom {module} import {own}\n"
        return Wording(super().wording(call, inputs, outputs).head, home)

    def outputs(self, call: FunctionCall, inputs: Sequence[NamedLayout], ranks: int) -> Answer:
        found = self._asked(call, inputs, ranks)
        if any(one is typed.V for one in found):
            words = ", ".join(map(str, inputs))
            raise MeaninglessClaim(f"the hook types {words} as V, which names no dim: the ranks' values make no whole")
        kernel: Kernel = call.function  # type: ignore[assignment]
        text = functions.call_text(call.args, call.kwargs)
        if not kernel.has_group(call.args):
            return Answer(found)

        def run(held: Sequence[Sequence[Tensor]], count: int) -> list[tuple[Any, ...]]:
            return kernel.on_ranks(held, count, text, call.wrt)

        return Answer(found, run=run)

    def _asked(self, call: FunctionCall, inputs: Sequence[NamedLayout], ranks: int) -> tuple[NamedLayout, ...]:
        """The layouts that the hook derives, from the pieces of rank 0."""
        spmd, axis, kernel = typed.package(), typed.mesh_axis(ranks), call.function
        cls, name = kernel.cls, kernel.axis  # type: ignore[attr-defined]
        whole = call.whole
        with typed.quiet_checker(), spmd.set_current_mesh({name or typed.AXIS: axis}):
            given = [
                typed.typed(typed.piece(x, one, ranks, 0), one, axis, grad=i in call.wrt)
                for i, (x, one) in enumerate(zip(call.tensors, inputs, strict=True))
            ]
            args = [axis if isinstance(one, str) and one == name else one for one in call.on(given).args]
            outs = pytree.tree_map_only(Tensor, torch.empty_like, whole)
            try:
                with importlib.import_module(f"{typed.PACKAGE}.checker").typecheck(local=False):
                    made = spmd.rules.run_typecheck(cls, lambda *_: outs, tuple(args))
            except spmd.SpmdTypeError as error:
                raise RefusedLayouts(error_in_one_line(error)) from None
            except Exception as error:  # why: the hook is the user's own code, and may raise anything
                raise SourceRaises(f"{type(error).__name__}: {error}, in {cls.__name__}.spmd_typecheck") from None
            return tuple(typed.layout_of(x, axis) for x in functions.tensor_results(made))


def hook_call(cls: type, args: Sequence[Any], axis: str) -> FunctionCall:
    """The call of a Function with whole tensors."""
    return FunctionCall(cls.__name__, Kernel(cls, axis), tuple(args), origin="samples()")


def axis_among(args: Sequence[Any]) -> str:
    """The only string among the arguments, which stands for the process group; empty if there is none or several."""
    found = {one for one in args if isinstance(one, str)}
    return found.pop() if len(found) == 1 else ""


def has_hook(value: object) -> bool:
    """Whether it is an autograd Function with a hook of its own."""
    return (
        isinstance(value, type)
        and issubclass(value, torch.autograd.Function)
        and callable(getattr(value, "spmd_typecheck", None))
    )


def hooks_of_module(module: ModuleType) -> HookSource:
    """The hooks of a user's module: of `samples()`, which yields pairs of a Function and its arguments, and of every other
    Function in it whose arguments can be drawn.  Raises `BadRules`."""
    name = module.__name__.rpartition(".")[2]
    listed = [(cls, tuple(args)) for cls, args in samples_of_module(module, has_hook, "a Function with a hook")]
    own = [value for value in vars(module).values() if has_hook(value) and value.__module__ == module.__name__]
    if not own and not listed:
        remedy = "Give an autograd Function in it a static method spmd_typecheck."
        raise BadRules(name, "no autograd Function in it has a typecheck hook", remedy)
    left = [cls for cls in dict.fromkeys(own) if all(cls is not one for one, _ in listed)]
    given = [*listed, *((cls, args) for cls in left for args in drawn_arguments(cls))]
    if not given:
        problem = f"the arguments of {own[0].__name__} cannot be drawn, and it has no samples()"
        raise BadRules(name, problem, "Write samples(), which yields pairs of a Function and its arguments.")
    axes = {axis_among(args) for _, args in given} - {""}
    folder = str(Path(getattr(module, "__file__", None) or "").parent)
    return HookSource(name, given, axes.pop() if len(axes) == 1 else typed.AXIS, folder, module.__name__)


def drawn_arguments(cls: type) -> list[tuple[Any, ...]]:
    """Arguments of a Function that it takes, drawn by its signature: tensors of 2, 3 and 1 dims, the group, and defaults."""
    parameters = list(inspect.signature(cls.forward).parameters.values())  # type: ignore[attr-defined]
    if cls.setup_context is torch.autograd.Function.setup_context:  # type: ignore[attr-defined]
        parameters = parameters[1:]
    axis = next((p.name for p in parameters if p.name in GROUP_NAMES), "")
    found = []
    for shapes in tensor_shapes(sum(p.name not in GROUP_NAMES and p.default is p.empty for p in parameters)):
        rest = iter(shapes)
        rng = torch.Generator().manual_seed(len(shapes))
        args = [
            typed.AXIS
            if p.name == axis
            else p.default
            if p.default is not p.empty
            else torch.randn(next(rest), generator=rng)
            for p in parameters
        ]
        with contextlib.suppress(Exception):  # why: a kernel raises anything for tensors that it does not take
            Kernel(cls, typed.AXIS)(*args)
            found.append(tuple(args))
        if len(found) == MOST:
            break
    return found

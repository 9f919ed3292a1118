"""`local_map` of torch as a source: the placements that a user declares for a function, judged against what it computes.

    @functools.partial(local_map, out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
    def scaled(x, weight):
        return x * weight

The declaration is a claim: the function on the ranks' pieces gives pieces of what it gives on whole tensors.  So are the
gradients: without `in_grad_placements` that of an input has the input's placement, that of parts is the same on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from localtensor.layout import short
from strategies.model.settings import BadRules
from strategies.torch_api.specs import LocalMapDeclaration, local_map_declaration
from strategies.validation.sources.functions import FunctionCall
from strategies.validation.sources.module_samples import drawn_calls, samples_of_module
from strategies.validation.sources.protocol import Answer, FunctionSource, NamedLayout, RefusedLayouts
from strategies.validation.sources.script import Wording


class LocalMaps(FunctionSource):
    """The functions of a module that `local_map` wraps, each with its declaration and calls of it.

    given  for each: its name, the declaration, and the arguments of calls.
    """

    name = "local_map"

    def __init__(
        self,
        given: Sequence[tuple[str, LocalMapDeclaration, Sequence[tuple[Any, ...]]]] = (),
        module: str = "",
        folder: str = "",
    ) -> None:
        self._given, self._module, self._folder = given, module, folder
        self._declared = {name: declaration for name, declaration, _ in given}

    def of_module(self, module: ModuleType) -> LocalMaps:
        """The wrapped functions of a user's module.  Raises `BadRules`."""
        name = module.__name__.rpartition(".")[2]
        found = {key: made for key, value in vars(module).items() if (made := local_map_declaration(value)) is not None}
        if not found:
            raise BadRules(name, "nothing in it is wrapped by local_map", "Give a function in it declared placements.")
        own = {id(getattr(module, key)): key for key in found}
        listed = samples_of_module(module, lambda one: id(one) in own, "a function that local_map wraps")
        calls: dict[str, list[tuple[Any, ...]]] = {key: [] for key in found}
        for function, args in listed:
            calls[own[id(function)]].append(tuple(args))
        given = []
        for key, declaration in found.items():
            args = calls[key] or drawn_calls(declaration.function, len(declaration.inputs))
            if not args:
                problem = f"the arguments of {key} cannot be drawn, and samples() has none"
                raise BadRules(name, problem, "Write samples(), which yields pairs of a function and its arguments.")
            given.append((key, declaration, args))
        return LocalMaps(given, module.__name__, str(Path(getattr(module, "__file__", None) or "").parent))

    def functions(self) -> Mapping[str, Callable[..., Any]]:
        if not self._given:
            raise BadRules(
                "dtensor", "--source local_map speaks about a module of yours", "Name it: --rules my_module."
            )
        return {name: declaration.function for name, declaration, _ in self._given}

    def calls(self, names: Sequence[str], seed: int) -> Iterable[FunctionCall]:
        for name, declaration, every in self._given:
            for args in every if not names or name in names else ():
                yield FunctionCall(name, declaration.function, args, {}, "samples()")

    def layouts(self, x: Tensor, ranks: int) -> Sequence[NamedLayout]:
        return [_layout(Replicate(), None)]

    def tuples(self, call: FunctionCall, ranks: int) -> list[tuple[NamedLayout, ...]]:
        declared = self._declared[call.label]
        inputs = [one for one in declared.inputs if one is not None]
        if len(inputs) != len(call.tensors):
            return []
        grads = declared.gradients or (None,) * len(declared.inputs)
        kept = [grad for grad, one in zip(grads, declared.inputs, strict=True) if one is not None]
        return [tuple(_layout(one, grad) for one, grad in zip(inputs, kept, strict=True))]

    def outputs(self, call: FunctionCall, inputs: Sequence[NamedLayout], ranks: int) -> Answer:
        declared = self._declared[call.label]
        if declared.axes != 1:
            raise RefusedLayouts(f"its placements are of {declared.axes} mesh axes")
        return Answer(tuple(None if one is None else _layout(one, None) for one in declared.outputs))

    def code(self, call: FunctionCall, text: str) -> str:
        return f"{self._module}.{call.label}.args[0]({text})"

    def wording(
        self, call: FunctionCall, inputs: Sequence[NamedLayout], outputs: Sequence[NamedLayout | None]
    ) -> Wording:
        head = super().wording(call, inputs, outputs).head
        return Wording(head, f"\nsys.path.insert(0, {self._folder!r})\nimport {self._module}\n")


def _layout(placement: Placement, gradient: Placement | None) -> NamedLayout:
    """The layout of a placement; its gradient's is the given one, else as DTensor has it."""
    usual = Replicate() if isinstance(placement, Partial) else placement
    return NamedLayout(short(placement), placement, gradient or usual)

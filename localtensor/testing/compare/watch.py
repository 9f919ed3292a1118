"""What a run computes, by qualified name: values at the borders of modules, gradients, parameters, loss.

Hooks are put on the modules, and removed afterwards; the program is not changed.  Wrappers (DDP, activation checkpointing,
compile) are left out of names, so that a name is the same in both programs.

Private parts of torch, which tests/localtensor/testing/compare/test_watch.py guards:

| part                                                          | torch       | tried on |
|---------------------------------------------------------------|-------------|----------|
| FSDPModule._get_fsdp_state()._mp_policy: mixed precision      | 2.13        | 2.13     |
| .algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper  | 2.13        | 2.13     |
| names of wrappers: module, _checkpoint_wrapped_module, ...    | 2.13        | 2.13     |
| nn.modules.dropout._DropoutNd (programs.py)                   | 2.13        | 2.13     |
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from localtensor._util.call_sites import place_of_frame
from localtensor._util.events import Place

_WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?=\.|$)")


class Key(NamedTuple):
    """What an observation is of: `kind` of the `call`-th call of module `name` in `step`, leaf number `leaf`."""

    step: int
    kind: str
    name: str
    call: int = 0
    leaf: int = 0

    def __str__(self) -> str:
        name = self.name or "the whole model"
        tail = "" if self.leaf == 0 else f" number {self.leaf}"
        again = "" if self.call == 0 else f", call {self.call + 1}"
        words = {"loss": "the loss", "result": f"result{tail}"}
        return f"{words.get(self.kind, f'{self.kind}{tail} of {name}')}{again}, step {self.step}"


@dataclass(frozen=True, slots=True)
class Observation:
    """The tensor that one rank holds: local part, placements of a DTensor (None of others), and the user's line."""

    value: Tensor
    placements: tuple[Any, ...] | None = None
    place: Place | None = None


@dataclass(slots=True)
class Watch:
    """What one run, or one rank, was seen to compute, in order; `step` is the number of the current step."""

    seen: dict[Key, Observation] = field(default_factory=dict)
    step: int = 0
    deep: str | None = None  # the module whose single calls of torch are seen as well
    declared: torch.dtype | None = None  # in which a model of mixed precision says that it computes
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)
    _forward: bool = False

    def add(
        self, kind: str, name: str, value: object, call: int = 0, leaf: int = 0, place: Place | None = None
    ) -> None:
        """Keeps a copy of a tensor; of anything else, nothing."""
        if not isinstance(value, Tensor):
            return
        placements = tuple(value.placements) if isinstance(value, DTensor) else None
        local = value.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        local = local.wait() if hasattr(local, "wait") else local
        if local.layout == torch.strided:
            self.seen[Key(self.step, kind, name, call, leaf)] = Observation(local.clone(), placements, place)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The forward pass: what modules compute again in the backward pass is not another call."""
        self._forward = True
        try:
            yield
        finally:
            self._forward = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The backward pass of a script, which is one forward pass to us."""
        before, self._forward = self._forward, False
        try:
            yield
        finally:
            self._forward = before

    @contextmanager
    def model(self, model: nn.Module) -> Iterator[None]:
        """Sees the modules of this model while it is entered."""
        hooks: list[Any] = []
        self.see(model, "", hooks)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def see(self, model: nn.Module, prefix: str = "", hooks: list[Any] | None = None) -> Any:
        """Sees the modules of this model from now on, under names with this prefix; adds the hooks to `hooks`.

        Returns the function that sees the start of the model's own calls; None if the model stands for another one.
        """
        found = []
        for name, module in model.named_modules():
            before, more = self._hooks(_joined(prefix, plain_name(name)), module)
            found.append(before)
            if hooks is not None:
                hooks += more
        return found[0]

    def _hooks(self, name: str, module: nn.Module) -> tuple[Any, list[Any]]:
        if type(module) in _transparent():
            return None, []
        modes: list[_Calls] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._forward:
                return
            call = self.calls[self.step, name]
            place = place_of_frame(sys._getframe(1))
            for leaf, x in enumerate(tree_leaves((args, kwargs))):
                self._add_with_gradient("input", name, x, call, leaf, place)
            if self.deep == name:
                modes.append(_Calls(self, name, call))
                modes[-1].__enter__()

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if not self._forward:
                return
            while modes:
                modes.pop().__exit__(None, None, None)
            call = self.calls[self.step, name]
            self.calls[self.step, name] += 1
            place = place_of_frame(sys._getframe(1))
            for leaf, x in enumerate(tree_leaves(output)):
                self._add_with_gradient("output", name, x, call, leaf, place)

        hooks = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
        return before, hooks

    def _add_with_gradient(self, kind: str, name: str, x: object, call: int, leaf: int, place: Place | None) -> None:
        self.add(kind, name, x, call, leaf, place)
        if isinstance(x, Tensor) and x.requires_grad and kind == "output":
            x.register_hook(lambda grad: self.add("gradient of the output", name, grad, call, leaf, place))

    def parameters(self, model: nn.Module, kind: str, prefix: str = "") -> None:
        """Keeps all parameters, or their gradients, under `kind`; buffers with the first parameters."""
        for name, parameter in model.named_parameters():
            self.add(kind, _joined(prefix, plain_name(name)), parameter.grad if kind == "gradient" else parameter)
        if kind == "parameter":
            for name, buffer in model.named_buffers():
                self.add("buffer", _joined(prefix, plain_name(name)), buffer)


class _Calls(TorchFunctionMode):
    """Every call of torch inside one module, with the user's line."""

    def __init__(self, watch: Watch, name: str, call: int) -> None:
        self.watch, self.name, self.call, self.numbers = watch, name, call, Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        if not name.startswith("__"):
            place = place_of_frame(sys._getframe(1))
            for x in itertools.islice(tree_leaves(done), 4):
                if isinstance(x, Tensor) and x.is_floating_point():
                    self.watch.add(f"call of {name}", self.name, x, self.call, self.numbers[name], place)
            self.numbers[name] += 1
        return done


def plain_name(name: str) -> str:
    """A qualified name without the names of wrappers.

    >>> plain_name("module.layers.0._checkpoint_wrapped_module.up.weight")
    'layers.0.up.weight'
    """
    return _WRAPPERS.sub("", name).removeprefix(".")


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def declared_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype of less precision in which FSDP2 computes, by the policy that a module was given; None without one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
            if policy is not None and policy.param_dtype is not None and policy.param_dtype.itemsize < 4:
                return policy.param_dtype  # type: ignore[no-any-return]
    return None


def _transparent() -> tuple[type[nn.Module], ...]:
    """The modules that stand for another one, under whose name that is seen."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    return (nn.parallel.DistributedDataParallel, CheckpointWrapper)

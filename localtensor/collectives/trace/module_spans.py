"""Spans of modules by qualified name, forward and backward, and of optimizers: torch's global hooks, in one rank.

The backward span of a module begins where the gradient of its output is known, and ends where those of its inputs are, or
where a module begins that is not inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from localtensor._util.module_names import ModelNames, joined_name, plain_name
from localtensor.collectives.trace.events import BACKWARD, FORWARD, STEP, Event
from localtensor.collectives.trace.lane import Lane
from localtensor.collectives.trace.memory import GRADIENTS, OTHER, PARAMETERS, STATE

Label = Callable[[Tensor, str], None]
"""A function of a tensor and the kind of memory that it is."""


class ModuleSpans:
    """Opens and closes the spans of the modules that one rank calls; `label` gets its parameters, gradients and states."""

    def __init__(self, lane: Lane, label: Label) -> None:
        self._lane, self._label = lane, label
        self._models = ModelNames()
        self._names: dict[int, str] = {}  # by id: the models keep their modules alive
        self._wrapped: dict[str, int] = {}  # models in a wrapper as DDP, which have its name: how deep they lie in it
        self._open: list[Event] = []
        self._going_back: list[Event] = []
        self._steps: list[Event] = []

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Sees the modules that this thread calls inside the block."""
        hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin_backward(self) -> list[Event]:
        """A backward pass begins, perhaps within another one, as of a reentrant checkpoint; `end_backward` takes the result."""
        outer, self._going_back = self._going_back, []
        return outer

    def end_backward(self, outer: list[Event]) -> None:
        """The backward pass has ended: what is open of it is closed."""
        while self._going_back:
            self._lane.end(self._going_back.pop())
        for module in self._models.models.values():
            self._label_gradients(module.parameters())
        self._going_back = outer

    def _name_of(self, module: nn.Module) -> str:
        if id(module) not in self._names:
            if self._open:  # made while the model ran: no part of it
                return joined_name(self._open[-1].name, type(module).__name__)
            prefix = self._models.add(module)
            for name, inner in module.named_modules():
                plain = plain_name(joined_name(prefix, name))
                if not plain and inner is not module:
                    plain = type(inner).__name__
                    self._wrapped.setdefault(plain, len(self._wrapped))
                self._names.setdefault(id(inner), plain)
            self._names[id(module)] = prefix or type(module).__name__
        return self._names[id(module)]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        name = self._name_of(module)
        if not self._open:
            for parameter in module.parameters():
                self._label(parameter, PARAMETERS)
            for x in _tensors(args):
                self._label(x, OTHER)
        event = self._lane.begin(FORWARD, name)
        if torch._C._current_autograd_node() is not None:
            event.note("again", "computed again for the backward pass")
        self._open.append(event)
        for x in _tensors(args):
            if x.requires_grad and not x.is_leaf:
                x.register_hook(partial(self._leave_backward, name))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open:  # entered before the hooks were there
            return
        event = self._open.pop()
        self._lane.end(event)
        for x in _tensors(output):
            if x.requires_grad and not x.is_leaf:
                x.register_hook(partial(self._enter_backward, event.name))

    def _is_inside(self, name: str, outer: str) -> bool:
        if outer in self._wrapped:
            return name not in self._roots() and self._wrapped.get(name, len(self._wrapped)) > self._wrapped[outer]
        return name.startswith(f"{outer}.") or (outer not in self._models.models and outer in self._roots())

    def _roots(self) -> set[str]:
        return {type(module).__name__ for name, module in self._models.models.items() if not name}

    def _enter_backward(self, name: str, gradient: Tensor) -> None:
        if any(event.name == name for event in self._going_back):
            return  # a second output of the same call
        back = self._going_back
        while back and not self._is_inside(name, back[-1].name) and not self._is_inside(back[-1].name, name):
            self._lane.end(back.pop())
        at = len(back)
        while at and self._is_inside(back[at - 1].name, name):  # its last module, whose output this is, came first
            at -= 1
        below = self._lane.stack.index(back[at]) if at < len(back) else None
        back.insert(at, self._lane.begin(BACKWARD, name, below=below))

    def _leave_backward(self, name: str, gradient: Tensor) -> None:
        back = self._going_back
        while any(event.name == name for event in back):
            self._lane.end(back.pop())

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            self._label_gradients(group["params"])
        self._steps.append(self._lane.begin(STEP, type(optimizer).__name__))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for state in optimizer.state.values():
            for x in state.values() if isinstance(state, dict) else ():
                if isinstance(x, Tensor):
                    self._label(x, STATE)
        if self._steps:
            self._lane.end(self._steps.pop())

    def _label_gradients(self, parameters: Any) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._label(parameter.grad, GRADIENTS)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a module's arguments or result: mostly one, or a tuple of some, which need no walk through a tree."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is tuple and all(isinstance(x, Tensor) for x in value):
        return list(value)
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]

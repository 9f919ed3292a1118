"""What a run computes, by qualified name: values at the borders of modules, gradients, parameters, loss.

Hooks are put on the modules, and removed afterwards; the program is not changed.  Wrappers (DDP, activation checkpointing,
compile) are left out of names, so that a name is the same in both programs.

Private parts of torch, which tests/localtensor/testing/compare/test_watch.py guards:

| part                                                          | torch       | tried on |
|---------------------------------------------------------------|-------------|----------|
| FSDPModule._get_fsdp_state()._mp_policy: mixed precision      | 2.13        | 2.13     |
| .algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper  | 2.13        | 2.13     |
| names of wrappers: module, _checkpoint_wrapped_module, ...    | 2.13        | 2.13     |
| nn.modules.dropout._DropoutNd                                 | 2.13        | 2.13     |
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from localtensor._util.call_sites import place_of_frame
from localtensor._util.events import Place
from localtensor._util.module_names import joined_name, plain_name
from localtensor.testing.compare_dropout import Drawn, drawn_again

if TYPE_CHECKING:
    from localtensor.testing.compare.op_stream import OpRecorder, OpStream

FORWARD, BACKWARD, UPDATE, AT_THE_START = "forward", "backward", "update", "start"
"""The phases of a step: `UPDATE` is the optimizer's."""
GRADIENT_OF_OUTPUT = "gradient of the output"
DROPOUT = "dropout"
OF_MODULES = ("input", "output", GRADIENT_OF_OUTPUT, DROPOUT)
"""What is of a module's call."""
ARGUMENTS = "arguments after the call"
"""The name of the module that takes the arguments of a function after its call."""
AFTER = "parameter after the step"
IN_STEP = "gradient in the step"
"""The gradient as the optimizer applies it: what a program does to it before, as clipping, is done."""


class Key(NamedTuple):
    """What an observation is of: `kind` of the `call`-th call of module `name` in `step`, leaf number `leaf`."""

    step: int
    kind: str
    name: str
    call: int = 0
    leaf: int = 0

    @property
    def is_inside(self) -> bool:
        """Whether it lies between modules: a program that computes the same may have another value there."""
        return self.kind in ("input", "output", GRADIENT_OF_OUTPUT) and self.name not in ("", ARGUMENTS)

    def __str__(self) -> str:
        name = self.name or "the whole model"
        tail = "" if self.leaf == 0 else f" number {self.leaf}"
        again = "" if self.call == 0 else f", call {self.call + 1}"
        words = {"loss": "the loss", "result": f"result{tail}"}
        return f"{words.get(self.kind, f'{self.kind}{tail} of {name}')}{again}, step {self.step}"


@dataclass(frozen=True, slots=True)
class Observation:
    """The tensor that one rank holds: local part, placements of a DTensor (None of others), and the user's line.

    `drawn` is what a dropout draws for it; `sizes` are those of the axes of a DTensor's mesh.
    """

    value: Tensor
    placements: tuple[Any, ...] | None = None
    place: Place | None = None
    drawn: Drawn | None = None
    sizes: tuple[int, ...] = ()


class Region(NamedTuple):
    """The part of a run whose ops are recorded: one phase of a step; of its forward phase, the calls of one module."""

    step: int
    phase: str
    module: str = ""


def region_of(key: Key, calls: Mapping[tuple[int, str], int]) -> Region:
    """The region in which an observation's value is computed; `calls` are those of modules, by step and name."""
    if key.kind == "buffer" and key.step:
        return Region(key.step - 1, FORWARD, key.name.rpartition(".")[0])
    if key.kind in ("parameter", "buffer") or (key.kind, key.name) == ("input", ""):
        return Region(key.step, AT_THE_START)
    if key.kind in ("output", "loss", DROPOUT):
        return Region(key.step, FORWARD, key.name)
    if key.kind == "input":
        name = key.name.rpartition(".")[0]
        while name and not calls.get((key.step, name)):  # a list of modules is not called
            name = name.rpartition(".")[0]
        return Region(key.step, FORWARD, name)
    return Region(key.step, BACKWARD if key.kind in ("gradient", GRADIENT_OF_OUTPUT) else UPDATE)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same on the same device; torch.equal raises for two devices."""
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(one, other)


@dataclass(slots=True)
class Watch:
    """What one run, or one rank, was seen to compute, in order; `step` is the number of the current step.

    `tied` has, by the name of a parameter, that of the same one which comes first.  `causal` puts the gradients of
    parameters in the order in which the backward pass makes them.  `edges` says of a stage's module whether its input and its
    output are those of the whole model; a pipeline calls it for each of its `microbatches`.
    """

    seen: dict[Key, Observation] = field(default_factory=dict)
    step: int = 0
    region: Region | None = None  # whose ops are recorded
    causal: bool = False
    declared: torch.dtype | None = None  # in which a model of mixed precision says that it computes
    coarsest: float = 0.0  # one unit in the last place of the coarsest dtype, if noise was made in it
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)
    tied: dict[str, str] = field(default_factory=dict)
    setup: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by name, the lines that made the model parallel
    ops: OpStream | None = None
    recorder: OpRecorder | None = None
    microbatches: int = 1
    draws: bool = False  # whether the program takes numbers from torch's generator, but for dropout
    seeds: bool = False  # whether the program has seeded torch's generator by itself
    again: list[tuple[int, Drawn]] = field(default_factory=list)  # by step, the dropouts that are computed again
    edges: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    sink: Callable[[Key, Tensor], None] | None = None  # takes each value in the place of `seen`
    pool: dict[Key, list[Tensor]] = field(default_factory=dict)  # the copies of all ranks, if they share it
    kept: Callable[[Watch, Key], None] | None = None  # gets each key whose value was kept
    _last: dict[tuple[Any, ...], Key] = field(default_factory=dict)  # of the last copy of a place in memory
    _phase: str = ""
    _inside: int = 0
    _path: list[tuple[str, bool]] = field(
        default_factory=list
    )  # the modules that are entered, and whether they only drop
    _drops: Counter[tuple[int, str, int]] = field(default_factory=Counter)
    _order: dict[str, int] = field(default_factory=dict)

    def active(self) -> bool:
        """Whether the run is in the region whose ops are recorded."""
        region = self.region
        if region is None or region[:2] != (self.step, self.now()):
            return False
        return not region.module or self._inside > 0

    def add(
        self, kind: str, name: str, value: object, call: int = 0, leaf: int = 0, place: Place | None = None
    ) -> None:
        """Keeps a copy of a tensor; of anything else, nothing."""
        if not isinstance(value, Tensor):
            return
        key = Key(self.step, kind, name, call, leaf)
        with torch._C.DisableTorchFunction():  # the program's own modes, as a type checker, are not for copies
            if self.recorder is None:
                self._keep(key, value, place)
                return
            self.recorder.mark(key, value)
            with _disable_current_modes():
                self._keep(key, value, place)

    def _keep(self, key: Key, value: Tensor, place: Place | None) -> None:
        made = Observation(value, None, place)
        if isinstance(value, DTensor):
            made = Observation(value, tuple(value.placements), place, sizes=tuple(value.device_mesh.shape))
        local = value.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        local = local.wait() if hasattr(local, "wait") else local
        if local.layout == torch.strided:
            self._keep_local(key, local, made)

    def _keep_local(self, key: Key, local: Tensor, made: Observation) -> None:
        if self.sink is not None:
            self.sink(key, local)
            return
        same = self.seen.get(key._replace(kind="gradient")) if key.kind == IN_STEP else None
        if same is not None and _is_equal(same.value, local):
            self.seen[key] = same
        else:
            self.seen[key] = replace(made, value=self._copy(key, local))
        if self.kept is not None:
            self.kept(self, key)

    def _copy(self, key: Key, local: Tensor) -> Tensor:
        """A copy; or an equal one that is there already: another rank's, or of the same memory under another name."""
        where = (local.data_ptr(), tuple(local.shape), local.dtype)
        others = self.pool.setdefault(key, [])
        last = self._last.get(where)
        for one in [*others, *([] if last is None else [self.seen[last].value])]:
            if _is_equal(one, local):
                return one
        copy = local.clone()
        others.append(copy)
        self._last[where] = key
        return copy

    def finished(self) -> Watch:
        """The watch of a run that has ended, without what only the run needs."""
        self.pool, self.kept, self._last, self.edges = {}, None, {}, {}
        return self

    def writes_to(self, key: Key) -> bool:
        """Whether a function writes to this argument: equal values of one place are kept once."""
        before = self.seen.get(key._replace(name=""))
        return before is None or before.value is not self.seen[key].value

    def place_of_parameter(self, name: str) -> Place | None:
        """The line that calls the module that a parameter belongs to."""
        module = name.rpartition(".")[0]
        places = (one.place for key, one in self.seen.items() if key.kind == "output" and key.name == module)
        return next((place for place in places if place is not None), None)

    def drop(self, x: Tensor, drawn: Drawn) -> bool:
        """Keeps the input of a dropout with what was drawn for it; of one that is computed again, only that."""
        if self.now() != FORWARD:
            self.again.append((self.step, drawn))
            return False
        name, only_drops = self._path[-1] if self._path else ("", False)
        call = self.calls[self.step, name]
        leaf = self._drops[self.step, name, call]
        self._drops[self.step, name, call] += 1
        self.add(DROPOUT, name, x, call, leaf, drawn.place)
        self._attach(Key(self.step, DROPOUT, name, call, leaf), replace(drawn, function="") if only_drops else drawn)
        return True

    def drawn_otherwise_again(self) -> tuple[Key, Place | None] | None:
        """The first dropout that is computed again with other numbers, and its line; None if there is none."""
        for step in dict.fromkeys(step for step, _ in self.again):
            forward = {k: x.drawn for k, x in self.seen.items() if k[:2] == (step, DROPOUT) and x.drawn is not None}
            found = drawn_again([*forward.values()], [one for at, one in self.again if at == step])
            key = next((k for k, one in forward.items() if found is not None and one.place == found.place), None)
            if key is not None:
                return key, self.seen[key].place
        return None

    def _attach(self, key: Key, drawn: Drawn) -> None:
        if (one := self.seen.get(key)) is not None:
            self.seen[key] = replace(one, drawn=drawn)

    def now(self) -> str:
        """The phase; a pipeline goes backward with one micro-batch while another is still to come."""
        going_back = self._phase == FORWARD and torch._C._current_autograd_node() is not None
        return BACKWARD if going_back else self._phase

    def enter(self, phase: str) -> None:
        """From now on the run is in this phase."""
        self._phase = phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase of a step; what modules compute again in the backward pass is no call of them."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def model(self, model: nn.Module) -> Iterator[None]:
        """Sees the modules of this model while it is entered."""
        hooks: list[Any] = []
        self.see(model, "", hooks)
        hooks += self.in_causal_order(model)
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
            before, more = self._hooks(joined_name(prefix, plain_name(name)), module)
            found.append(before)
            if hooks is not None:
                hooks += more
        return found[0]

    def _hooks(self, name: str, module: nn.Module) -> tuple[Any, list[Any]]:
        stands_in = bool(name) and type(module) is nn.Identity  # which stages have for what others have
        if isinstance(module, _transparent()) or stands_in:  # FSDP makes a subclass of what it shards
            return None, []
        takes, gives = self.edges.get(id(module), (True, True))
        if not takes and not gives:
            return None, []
        counted = name if gives else f"input of {name}"  # a rank may have the first stage and the last

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.now() != FORWARD:
                return
            call = self.calls[self.step, counted]
            place = place_of_frame(sys._getframe(1))
            for leaf, x in enumerate(tree_leaves((args, kwargs)) if takes else ()):
                self._add_with_gradient("input", name, x, call, leaf, place)
            self._path.append((name, isinstance(module, nn.modules.dropout._DropoutNd)))
            self._inside += self.region is not None and self.region.module == name

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self.now() != FORWARD:
                return
            call = self.calls[self.step, counted]
            self.calls[self.step, counted] += 1
            place = place_of_frame(sys._getframe(1))
            for leaf, x in enumerate(tree_leaves(output) if gives else ()):
                self._add_with_gradient("output", name, x, call, leaf, place)
            while self._path and self._path.pop()[0] != name:  # one that has raised is left, too
                pass
            self._inside -= self.region is not None and self.region.module == name

        hooks = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
        return before, hooks

    def _add_with_gradient(self, kind: str, name: str, x: object, call: int, leaf: int, place: Place | None) -> None:
        self.add(kind, name, x, call, leaf, place)
        with torch._C.DisableTorchFunction():
            if isinstance(x, Tensor) and x.requires_grad and kind == "output":
                x.register_hook(lambda grad: self.add(GRADIENT_OF_OUTPUT, name, grad, call, leaf, place))

    def in_causal_order(self, model: nn.Module, prefix: str = "") -> list[Any]:
        """Hooks that note in which order the gradients of parameters come, if that order is asked for."""

        def noted(name: str) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                self._order.setdefault(name, len(self._order))

            return hook

        named = model.named_parameters() if self.causal else ()
        return [x.register_hook(noted(joined_name(prefix, plain_name(name)))) for name, x in named if x.requires_grad]

    def parameters(self, model: nn.Module, kind: str, prefix: str = "") -> None:
        """Keeps all parameters, or their gradients, under `kind`; buffers with the first parameters."""
        named = [(joined_name(prefix, plain_name(name)), parameter) for name, parameter in model.named_parameters()]
        if kind == "parameter":
            self._tie(model, prefix, {id(parameter): name for name, parameter in named})
        gradients = kind in ("gradient", IN_STEP)
        if gradients:
            named.sort(key=lambda item: self._order.get(item[0], len(self._order)))
        for name, parameter in named:
            self.add(kind, name, parameter.grad if gradients else parameter)
        if kind == "parameter":
            self.buffers(model, prefix)

    def buffers(self, model: nn.Module, prefix: str = "") -> None:
        """Keeps all buffers, as they are before a step."""
        for name, buffer in model.named_buffers():
            self.add("buffer", joined_name(prefix, plain_name(name)), buffer)

    def _tie(self, model: nn.Module, prefix: str, first: dict[int, str]) -> None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            full = joined_name(prefix, plain_name(name))
            if id(parameter) in first and first[id(parameter)] != full:
                self.tied[full] = first[id(parameter)]

    def optimizer_state(self, optimizer: torch.optim.Optimizer, model: nn.Module, prefix: str = "") -> None:
        """Keeps the tensors of an optimizer's state, by the parameter that they belong to."""
        for name, parameter in model.named_parameters():
            for what, value in optimizer.state.get(parameter, {}).items():
                self.add(f"optimizer's {what}", joined_name(prefix, plain_name(name)), value)


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

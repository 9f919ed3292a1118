"""What a script computes, seen without a change of it: torch's global hooks of modules and optimizers, in one rank.

The first module that is called from outside any other is the model, whose name is empty; others that are called so are
named by their class.  A step ends where an optimizer's step ends.
"""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from localtensor._util.events import Call
from localtensor._util.module_names import ModelNames, joined_name, plain_name
from localtensor.collectives.calls_seen import calls_seen
from localtensor.runner.torchrun import TorchrunOptions
from localtensor.runner.torchrun_processes import execute, read, search_path
from localtensor.testing.compare.op_stream import recorded
from localtensor.testing.compare.setup_lines import SetupLines
from localtensor.testing.compare.watch import BACKWARD, FORWARD, IN_STEP, UPDATE, Region, Watch, declared_dtype
from localtensor.testing.compare_dropout import drawing, dropout_off
from localtensor.testing.compare_tolerance import Noise
from localtensor.threads.rank_world import groups_of_rank

PASSES = "backward passes"
"""The name under which `Watch.calls` counts the backward passes of a step."""


Vary = Callable[[], Callable[[Tensor], Tensor]]
"""Makes the function that is applied to the parameters and arguments of one rank."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank of a script was seen to do: its values, its groups by their ranks, and its calls of collectives."""

    watch: Watch
    groups: dict[tuple[int, ...], str]
    calls: tuple[Call, ...] = ()


class LeftWithError(Exception):
    """The script has left with an exit code that is not 0, or with a message."""


@dataclass(slots=True)
class ScriptWatch:
    """One rank of a script: its `watch`, the `names` of its models, and the `groups` of ranks that it has, by the ranks.

    `vary` is applied to the parameters of each model before its first call, and to the arguments of all its calls.
    """

    watch: Watch
    vary: Callable[[Tensor], Tensor] | None = None
    names: ModelNames = field(default_factory=ModelNames)
    groups: dict[tuple[int, ...], str] = field(default_factory=dict)
    _depth: int = 0
    _stepping: int = 0
    _gone_back: set[int] = field(default_factory=set)  # steps of which a backward pass was seen
    _set_up: ExitStack | None = None
    _setup_lines: SetupLines = field(default_factory=SetupLines)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Sees the script that this thread runs inside the block."""
        hooks = [
            register_module_forward_pre_hook(self._before_module),
            register_module_forward_hook(self._after_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            with (
                self.watch.phase(FORWARD), _Backward(self), recorded(self.watch), drawing(self.watch.drop), self._setup(),
                self.vary if isinstance(self.vary, Noise) else nullcontext(),
            ):  # fmt: skip
                yield
        finally:
            for hook in hooks:
                hook.remove()
            if isinstance(self.vary, Noise):
                self.watch.coarsest = self.vary.coarsest

    @contextmanager
    def _setup(self) -> Iterator[None]:
        """Notes what the script does before its first model is called, if the ops of a region are recorded."""
        if self.watch.region is None:
            yield
            return
        self._setup_lines = SetupLines()
        with ExitStack() as stack:
            stack.enter_context(self._setup_lines.watched())
            self._set_up = stack
            yield

    def _before_module(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        self._depth += 1
        if self._depth > 1:
            return None
        before = None if self.names.knows(module) else self._add(module)
        varied = args if self.vary is None else tree_map(self._varied, args)
        if before is not None:  # torch has listed this call's hooks already, and ours was not among them
            before(module, varied, {})
        return None if self.vary is None else varied

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def _varied(self, x: Any) -> Any:
        return self.vary(x) if self.vary is not None and isinstance(x, Tensor) else x

    def _vary_in_place(self, x: Tensor) -> None:
        if self.vary is None:
            return
        if isinstance(x, DTensor):  # FSDP2 keeps the memory that it was given, and with it the dtype
            x.to_local().copy_(self.vary(x.to_local()))
        else:
            x.data = self.vary(x.data)

    def _add(self, module: nn.Module) -> Any:
        """Makes a module one of the models; returns its own hook for the start of a call, if it has one."""
        name = self.names.add(module)
        self._see_groups()
        if self.vary is not None:
            with torch.no_grad():
                for x in [*module.parameters(), *module.buffers()]:
                    self._vary_in_place(x)
        if self._set_up is not None:
            self._set_up.close()
            self.watch.setup.update(self._setup_lines.by_name(module, lambda x: plain_name(joined_name(name, x))))
        if self.watch.declared is None:
            self.watch.declared = declared_dtype(module)
        self.watch.parameters(module, "parameter", name)
        self.watch.in_causal_order(module, name)
        return self.watch.see(module, name)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping += 1
        if self._stepping == 1:  # an optimizer may call another's step
            self._see_groups()
            self.watch.enter(UPDATE)
        self._parameters_of(optimizer, IN_STEP)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping -= 1
        if not self._stepping:
            for name, model in self.names.models.items():
                self.watch.optimizer_state(optimizer, model, name)
            self._parameters_of(optimizer, "parameter after the step")
            self.watch.enter(FORWARD)
            self.watch.step += 1
            for name, model in self.names.models.items():
                self.watch.buffers(model, name)

    def after_backward(self) -> None:
        """Keeps the gradients as they are after a backward pass; after the last of a step they are those of all."""
        self._gone_back.add(self.watch.step)
        for name, model in self.names.models.items():
            self.watch.parameters(model, "gradient", name)

    def _parameters_of(self, optimizer: torch.optim.Optimizer, kind: str) -> None:
        its = {id(x) for group in optimizer.param_groups for x in group["params"]}
        for name, model in self.names.models.items():
            if any(id(x) in its for x in model.parameters()):
                self.watch.parameters(model, kind, name)

    def _see_groups(self) -> None:
        for ranks, described in groups_of_rank().items():
            self.groups.setdefault(ranks, described)


class _Backward(TorchFunctionMode):
    """Sees the loss where its `backward` is called, and the gradients after it; modules that it calls again are not seen."""

    def __init__(self, script: ScriptWatch) -> None:
        self.script = script

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.backward:
            return func(*args, **(kwargs or {}))
        watch = self.script.watch
        call = watch.calls[watch.step, PASSES]
        watch.calls[watch.step, PASSES] += 1
        watch.add("loss", "", args[0], call)
        with watch.phase(BACKWARD):
            done = func(*args, **(kwargs or {}))
            self.script.after_backward()
        return done


def run_as_process(
    options: TorchrunOptions, region: Region | None, vary: Vary | None, causal: bool
) -> RankRecord:  # fmt: skip
    """Runs a script in this process, which is one rank of it, and returns what was seen; what it prints is dropped.

    Raises what the script raises, and `LeftWithError` if it leaves with an exit code that is not 0.
    """
    dist.destroy_process_group()  # a script makes its own, as under torchrun
    sys.path.insert(0, search_path(options.name, module=options.module))
    script = read(options.name, module=options.module)
    if script is None:  # the parent found it before
        raise LeftWithError(f"{options.name} has gone")
    sys.argv = [script.file if options.module else options.name, *options.arguments]
    seen = ScriptWatch(Watch(region=region, causal=causal), None if vary is None else vary())
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), dropout_off(), calls_seen() as calls, seen.hooks():
        try:
            execute(script)
        except SystemExit as leaving:
            if leaving.code:
                what = f"exit code {leaving.code}" if isinstance(leaving.code, int) else str(leaving.code)
                raise LeftWithError(f"it left with {what}") from None
    return RankRecord(seen.watch.finished(), seen.groups, tuple(calls))


def mesh_of_groups(groups: dict[tuple[int, ...], str], ranks: int) -> dict[str, int] | None:
    """The mesh whose axes are the finest that the groups of the ranks cut; None if no mesh has them all.

    A group's description by DeviceMesh, `mesh_tp`, names its axis.

    >>> mesh_of_groups({(0, 1): "mesh_tp", (2, 3): "mesh_tp", (0, 2): "mesh_dp", (0, 1, 2, 3): ""}, 4)
    {'dp': 2, 'tp': 2}
    >>> mesh_of_groups({(0, 1, 2, 3): "default_pg"}, 4)
    {'ranks': 4}
    >>> mesh_of_groups({(0, 1, 2): ""}, 4) is None
    True
    """
    cuts, names = {1, ranks}, {}
    for group, described in groups.items():
        if len(group) < 2:
            continue
        stride = group[1] - group[0]
        if any(b - a != stride for a, b in itertools.pairwise(group)):
            continue  # a group of several axes, which have groups of their own
        cuts |= {stride, stride * len(group)}
        if described.startswith("mesh_"):
            names[stride, stride * len(group)] = described.removeprefix("mesh_")
    ordered = sorted(cuts)
    pairs = list(itertools.pairwise(ordered))
    if any(b % a for a, b in pairs):
        return None
    if len(pairs) == 1:
        return {names.get(pairs[0], "ranks"): ranks}
    if not pairs:
        return {"ranks": 1}
    return {names.get(pair, f"axis {i}"): pair[1] // pair[0] for i, pair in enumerate(reversed(pairs))}

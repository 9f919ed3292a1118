"""Slots that take more than a name or a flag: environment, warnings, context_parallel's rules; and what is not swapped.

Such a slot has a `name`, a reason `why`, and the methods `ready()`, whether its subject has been imported; `save()`,
the running rank's value; `load(want, held)`, which puts another rank's value in its place; and `initial(who)`, a rank's
first value.  Optional are `bind()`, called once, when it is ready; `late(who)` and `outside()`, the values of a rank
and of the caller from before it was ready (default: `initial(who)`, and what the run leaves); and `over()`, called when
the run has ended.
"""

import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from localtensor.threads.state.generators import AlwaysReady, RankIdentity
from localtensor.threads.state.patched_attributes import PATCHES
from localtensor.threads.state.shared_propagation import ShardingRules

_TORCHRUN_VARIABLES = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0"}  # nothing listens there


def torchrun_environment(rank: int, ranks: int) -> dict[str, str]:
    """What torchrun sets for a rank, all ranks on one host."""
    mine = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    all_of_us = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks))
    return mine | all_of_us | {"GROUP_WORLD_SIZE": "1"} | _TORCHRUN_VARIABLES


def launcher_environment(start: int = 0) -> dict[str, str]:
    """What torchrun's agent sets beside, by which programs see that it launched them; `start` counts restarts."""
    return {
        "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(start), "TORCHELASTIC_MAX_RESTARTS": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip


class RankEnvironment(dict[Any, Any]):
    """The dict inside a rank's os.environ.  `changed` are the keys that any rank of the run has set."""

    __slots__ = ("changed",)

    def __init__(self, base: dict[Any, Any], changed: set[Any]) -> None:
        super().__init__(base)
        self.changed = changed

    def __setitem__(self, key: str, value: object) -> None:
        self.changed.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: object) -> None:
        self.changed.add(key)
        super().__delitem__(key)

    def clear(self) -> None:  # os.reload_environ (3.14) uses these two
        self.changed.update(self)
        super().clear()

    def update(self, *args: object, **kwargs: object) -> None:
        new = dict(*args, **kwargs)
        self.changed.update(new)
        super().update(new)


class EnvironmentSlot(AlwaysReady):
    """os.environ and os.environb are two views of one dict of encoded strings; C code sees the values given to putenv.

    A hand-over swaps that dict, and calls putenv for the keys in which two ranks may differ.
    """

    name = "environment"
    why = "RANK and its like differ, and what a rank sets in os.environ is its own"

    def __init__(self) -> None:
        self.views = [vars(view) for view in (os.environ, getattr(os, "environb", None)) if view is not None]
        self.front = self.views[0]
        self.base: Any = None
        self.changed: set[Any] = set()

    def save(self) -> dict[Any, Any]:
        held: dict[Any, Any] = self.front["_data"]
        return held

    def load(self, want: dict[Any, Any], held: dict[Any, Any]) -> None:
        if want is held:
            return
        for view in self.views:
            view["_data"] = want
        mine, others = getattr(want, "changed", None), getattr(held, "changed", None)
        keys = mine if mine is others and mine is not None else {*want, *held}
        for key in keys:
            value = want.get(key)
            if value != held.get(key):
                if value is None:
                    os.unsetenv(key)
                else:
                    os.putenv(key, value)

    def initial(self, who: RankIdentity) -> dict[Any, Any]:
        held = self.save()
        if held is not self.base:  # the first rank of a run: its peers share the set of changed keys
            self.base, self.changed = held, set()
        encode = os.environ.encodekey
        own = {encode(key): encode(value) for key, value in torchrun_environment(who.rank, who.ranks).items()}
        self.changed.update(encode(key) for key in ("RANK", "LOCAL_RANK", "ROLE_RANK"))
        return RankEnvironment({**held, **own}, self.changed)


class WarningsSlot(AlwaysReady):
    """Filters, and the functions that show a warning.

    When filters differ, Python is notified; it then forgets which warnings it has shown, so they may appear again.
    """

    name = "warnings"
    why = "filters and ways to show a warning are process-wide: assertWarns on one rank must not catch another's"
    wanted = ("filters", "onceregistry", "showwarning", "_showwarnmsg_impl", "formatwarning", "defaultaction")

    def __init__(self) -> None:
        self.space = vars(warnings)
        self.names = tuple(name for name in self.wanted if name in self.space)

    def save(self) -> list[Any]:
        space = self.space
        return [space[name] for name in self.names]

    def load(self, want: list[Any], held: list[Any]) -> None:
        self.space.update(zip(self.names, want))
        if want[0] != held[0]:
            with warnings.catch_warnings():  # entering and leaving a block is the public way to notify Python
                pass

    def initial(self, who: RankIdentity) -> list[Any]:
        return [value.copy() if isinstance(value, list | dict) else value for value in self.save()]


class ClassTables:
    """Dicts, lists and sets that a class of torch holds for the process, and changes in place.

    A rank has those of the process until it changes one: then it gets copies, and those of the process are as before.
    So a hand-over sets nothing on the class, which is slow, unless a rank has changed something.
    """

    module: str
    kind: str
    tables: tuple[str, ...]
    in_run = False

    def ready(self) -> bool:
        return hasattr(sys.modules.get(self.module), self.kind)

    def bind(self) -> None:
        self.owner = getattr(sys.modules[self.module], self.kind)
        self._begin()

    def _begin(self) -> None:
        self.in_run = True
        self.shared = self._current()
        self.fresh = [table.copy() for table in self.shared]

    def _current(self) -> list[Any]:
        return [getattr(self.owner, table) for table in self.tables]

    def save(self) -> list[Any]:
        if not self.in_run or getattr(self.owner, self.tables[0]) is not self.shared[0]:
            return self._current()
        if self.shared == self.fresh:
            return self.shared
        for name, table, before in zip(self.tables, self.shared, self.fresh, strict=True):
            setattr(self.owner, name, table.copy())
            table.clear()
            table.extend(before) if isinstance(table, list) else table.update(before)
        return self._current()

    def load(self, want: list[Any], held: list[Any]) -> None:
        if want[0] is not held[0]:
            for table, value in zip(self.tables, want, strict=True):
                setattr(self.owner, table, value)

    def initial(self, who: RankIdentity) -> list[Any]:
        self._begin()
        return self.shared

    def late(self, who: RankIdentity) -> list[Any]:
        return self.shared

    def outside(self) -> list[Any]:
        return self.shared

    def over(self) -> None:
        self.in_run = False


class ProfilerOfFSDP(ClassTables):
    name = "profiler_of_fsdp"
    why = "one rank's parts that are being profiled are refused to another, and FSDP profiles its state dicts"
    module, kind = "torch.distributed.fsdp._debug_utils", "SimpleProfiler"
    tables = ("results", "profiling")


class RegisteredBackends(ClassTables):
    """What `Backend.register_backend` writes: tables on the class, and the name of each backend as an attribute of it."""

    name = "registered_backends"
    why = "a backend that one rank registers is no backend of another rank, nor of the next run"
    module, kind = "torch.distributed.distributed_c10d", "Backend"
    tables = ("_plugins", "backend_list", "default_device_backend_map", "backend_capability", "backend_type_map")

    def bind(self) -> None:
        super().bind()
        self.kept = {*vars(self.owner)}  # among them those of torch, which it registers by the same tables since 2.15

    def load(self, want: list[Any], held: list[Any]) -> None:
        if want[0] is held[0]:
            return
        super().load(want, held)
        for name in (held[0].keys() ^ want[0].keys()) - self.kept:
            if name in want[0]:
                setattr(self.owner, name, name.lower())
            elif name in vars(self.owner):
                delattr(self.owner, name)


class ContextParallelRules:
    """While a rank is in context_parallel, torch's table of sharding rules holds other rules for attention.

    The table itself is shared: rules that a module registers when it is imported are for all ranks.  This slot comes
    before that of the table, which has the last word; so it is ready as early, though its own module may never come.
    """

    name = "context_parallel_rules"
    why = "the first rank to leave context_parallel would take the rules from those still in it"
    module = "torch.distributed.tensor.experimental._context_parallel._sharding_rules"

    def ready(self) -> bool:
        return "torch.distributed.tensor" in sys.modules

    def save(self) -> bool:
        return bool(getattr(sys.modules.get(self.module), "_cp_strategy_contexts", None))

    def load(self, want: bool, held: bool) -> None:
        if want != held:
            rules = sys.modules[self.module]
            rules.register_cp_sharding_rules() if want else rules.unregister_cp_sharding_rules()

    def initial(self, who: RankIdentity) -> bool:
        return False


# ShardingRules comes last: it has the last word.
SPECIALS = (
    *PATCHES,
    EnvironmentSlot,
    WarningsSlot,
    ProfilerOfFSDP,
    RegisteredBackends,
    ContextParallelRules,
    ShardingRules,
)


@dataclass(frozen=True)
class Unswapped:
    """State that a hand-over does not swap: torch keeps it per thread, or ranks may share it.

    tests/localtensor/threads/state/test_swap.py proves each entry of `PER_THREAD`.
    """

    name: str
    why: str


# Each rank's thread has these for itself, and begins with torch's initial values, not with the caller's.
PER_THREAD = (
    Unswapped("default_device", "torch.set_default_device puts a mode on the thread's stack"),
    Unswapped("grad_mode", "no_grad, enable_grad and inference_mode are in the thread"),
    Unswapped("autocast", "whether, in which dtype, and its cache"),
    Unswapped("dispatch_modes", "the stack of TorchDispatchMode"),
    Unswapped("function_modes", "the stack of TorchFunctionMode"),
    Unswapped("explicit_redistribution", "ExplicitRedistributionContext keeps itself in a threading.local"),
    Unswapped("implicit_replication", "a thread-local switch in C++; older torch keeps a name: see dtensor_handlers"),
    Unswapped("autograd_multithreading", "set_multithreading_enabled is in the thread"),
    Unswapped("flush_denormal", "a register of the thread; it begins as a copy of that of the thread that started it"),
    Unswapped("num_threads", "a thread that has computed keeps its number; new threads begin with the last one set"),
    Unswapped("mesh_stack", "with mesh: device_mesh._mesh_resources is a threading.local"),
    Unswapped("numpy_errstate", "numpy.errstate is a context variable, which a thread has for itself"),
)

LEFT_ALONE = (
    Unswapped("process_group_world", "c10d's _world and its C++ registry: swapped by threads/run.py"),
    Unswapped("modules", "sys.modules: threads/isolation/modules.py"),
    Unswapped("registrations", "torch.library, pytrees, safe globals, backends: as for sharding rules"),
    Unswapped("caches", "redistribution plans, tensor metadata: threads/dist_patches.py clears what depends on a rank"),
    Unswapped("warning_registries", "each module's: a warning shown once is shown once for all ranks"),
    Unswapped("working_directory", "os.chdir and os.umask: threads/isolation/isolate.py, where a rank has called them"),
    Unswapped("namespaces", "globals, class attributes, loggers: threads/isolation"),
    Unswapped("signals", "a rank is not the main thread: Python refuses signal.signal there"),
    Unswapped("exit_functions", "atexit.register, codecs.register: what is registered is called once for the process"),
    Unswapped("locale", "locale.setlocale: C code of all threads reads it"),
    Unswapped("compile_configs", "torch._dynamo, _functorch, _inductor: compiled code is shared, so its settings are"),
    Unswapped(
        "profiler",
        "torch.profiler has one tracer per process: the first rank that profiles has it, others a recorder of their thread",
    ),
    Unswapped("forward_ad_levels", "one list in C++: a second rank inside forward_ad.dual_level is refused by torch"),
    Unswapped("vmap_fallback", "private, for debugging functorch"),
    Unswapped("active_ddp_module", "read only by torch.compile"),
    Unswapped("debug_level", "torch.distributed.set_debug_level: logs and checks; 0.15 microseconds at each hand-over"),
    Unswapped("sm_carveout", "experimental, and each change is warned of"),
    Unswapped("default_tensor_type", "set_default_tensor_type is deprecated; its dtype half is the slot default_dtype"),
    Unswapped("cuda_device", "torch.cuda.set_device and streams: the CUDA runtime keeps them per thread"),
    Unswapped("other_generators", "those of MPS and XPU: ranks there are not simulated"),
    Unswapped("context_parallel_functions", "_replaced_functions: keyed by a wrapper that only one rank has"),
    Unswapped("opt_einsum", "the order of an einsum; torch.backends keeps it in two places that torch itself mixes up"),
    Unswapped("rpc", "torch.distributed.rpc and elastic agents are not simulated"),
    Unswapped("sharded_tensor_ids", "the old ShardedTensor numbers its tensors for RPC"),
    Unswapped("flash_attention_registry", "which kernels are installed, by an import"),
    Unswapped("fork_rng_warning", "whether a warning was shown"),
)

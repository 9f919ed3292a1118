"""Tables of the state that torch keeps once per process and a real run has once per rank.  Tried on torch 2.13.0.

`FLAGS` are switches in torch's C++, each with a getter and a setter; `NAMES` are names in the namespace of a module or
object.  Other slots are in generators.py and special_slots.py; what is not swapped, and why, in special_slots.py.  A
part that the installed torch lacks is left out; tests/localtensor/threads/state/test_swap.py lists those.
"""

import gc
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_C: Any = torch._C


def _identity(value: object) -> object:
    return value


@dataclass(frozen=True)
class Flag:
    """A switch in C++.  `put` is called only with what `get` returned."""

    get: Callable[[], Any]
    put: Callable[[Any], object]


@dataclass(frozen=True)
class FlagSlot:
    """A slot of switches."""

    name: str
    why: str
    flags: tuple[Flag, ...]

    def save(self) -> list[Any]:
        return [flag.get() for flag in self.flags]

    def load(self, value: list[Any]) -> None:
        for flag, want in zip(self.flags, value):
            if flag.get() != want:
                flag.put(want)


@dataclass(frozen=True)
class NameSlot:
    """A slot of names in one namespace `home`: "module" or "module:attribute.attribute".

    `plain` values are swapped by reference.  `owned` values are dicts and lists that are changed in place, so each rank
    has a copy.  When a rank imports the module during the run, `fresh` makes the other ranks' first value from its own.
    """

    name: str
    why: str
    home: str
    plain: tuple[str, ...] = ()
    owned: tuple[str, ...] = ()
    fresh: Callable[[Any], Any] = _identity
    older: tuple[str, ...] = ()  # plain values that only older versions keep here

    @property
    def module(self) -> str:
        return self.home.partition(":")[0]

    def space(self) -> dict[str, Any]:
        """The namespace itself, writable.  Its module must have been imported."""
        home = sys.modules[self.module]
        for attribute in filter(None, self.home.partition(":")[2].split(".")):
            home = getattr(home, attribute)
        return vars(home)


MISSING: list[str] = []  # parts that the installed torch lacks; the tests list them


def _flag(get: str, put: str) -> tuple[Flag, ...]:
    if hasattr(_C, get) and hasattr(_C, put):
        return (Flag(getattr(_C, get), getattr(_C, put)),)
    MISSING.extend(f"torch._C.{name}" for name in (get, put) if not hasattr(_C, name))
    return ()


def _switch(*names: str) -> tuple[Flag, ...]:
    return tuple(flag for name in names for flag in _flag(f"_get_{name}", f"_set_{name}"))


def _attention(*names: str) -> tuple[Flag, ...]:
    return tuple(flag for name in names for flag in _flag(f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}"))


def _deterministic() -> tuple[Flag, ...]:
    on, quiet = _C._get_deterministic_algorithms, _C._get_deterministic_algorithms_warn_only
    put = _C._set_deterministic_algorithms
    return (Flag(on, lambda mode: put(mode, warn_only=quiet())), Flag(quiet, lambda only: put(on(), warn_only=only)))


def _anomaly() -> tuple[Flag, ...]:
    on, nan, put = _C.is_anomaly_enabled, _C.is_anomaly_check_nan_enabled, _C.set_anomaly_enabled
    return (Flag(on, lambda mode: put(mode, nan())), Flag(nan, lambda check: put(on(), check)))


def _reductions() -> tuple[Flag, ...]:
    """Newer torch returns a pair: whether it is allowed, and whether for split-k."""
    several = [_switch(f"cublas_allow_{kind}_reduced_precision_reduction") for kind in ("fp16", "bf16")]

    def spread(put: Callable[..., object]) -> Callable[[Any], object]:
        return lambda value: put(*value) if isinstance(value, tuple) else put(value)

    return tuple(Flag(flag.get, spread(flag.put)) for flags in several for flag in flags)


def _only_with_cuda() -> tuple[Flag, ...]:
    """Torch without CUDA refuses any change of these."""
    names = ("linalg_preferred_backend", "blas_preferred_backend", "rocm_fa_preferred_backend")
    return _switch(*names) if torch.backends.cuda.is_built() else ()


_PRECISIONS = (
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn")),
)  # parents first: setting one changes its children
_BACKENDS, _OPS = (tuple(names) for names in zip(*_PRECISIONS))
_matmul, _cudnn, _onednn = _C._get_float32_matmul_precision, _C._get_cudnn_allow_tf32, _C._get_onednn_allow_tf32
MIXED = "mixed"  # torch refuses to read it, because both its old and its new switches were used


def _value_or_mixed(get: Callable[[], Any]) -> object:
    try:
        return get()
    except RuntimeError:
        return MIXED


def precisions() -> tuple[Any, ...]:
    """The old switches, then the new ones: the order for restoring, because old ones set new ones."""
    new = map(_C._get_fp32_precision_getter, _BACKENDS, _OPS)
    try:
        return (_matmul(), _cudnn(), _onednn(), *new)
    except RuntimeError:
        return (_value_or_mixed(_matmul), _value_or_mixed(_cudnn), _value_or_mixed(_onednn), *new)


def put_precisions(want: tuple[Any, ...]) -> None:
    """Restore all switches, except old ones that torch refused to read (`MIXED`), which stay as they are."""
    olds = (_C._set_float32_matmul_precision, _C._set_cudnn_allow_tf32, _C._set_onednn_allow_tf32)
    for put, value, held in zip(olds, want, precisions()):
        if value not in (MIXED, None, held):
            put(value)
    for (backend, op), value in zip(_PRECISIONS, want[len(olds) :]):
        if _C._get_fp32_precision_getter(backend, op) != value:
            _C._set_fp32_precision_setter(backend, op, value)


def _recursion_limit(limit: int) -> None:
    """Set it, unless the rank that hands over is deeper than that: the next one may then go deeper than it asked."""
    try:
        sys.setrecursionlimit(limit)
    except RecursionError:
        return


def _collector(enabled: bool) -> None:
    gc.enable() if enabled else gc.disable()


_INTERPRETER: tuple[Flag, ...] = (
    Flag(lambda: sys.getrecursionlimit(), _recursion_limit),  # noqa: PLW0108  # a run replaces both
    Flag(sys.getswitchinterval, sys.setswitchinterval),
    Flag(gc.get_threshold, lambda three: gc.set_threshold(*three)),
    Flag(gc.isenabled, _collector),
    Flag(socket.getdefaulttimeout, socket.setdefaulttimeout),
    Flag(threading.stack_size, threading.stack_size),
)
if hasattr(sys, "set_int_max_str_digits"):  # since Python 3.10.7
    _INTERPRETER = (*_INTERPRETER, Flag(sys.get_int_max_str_digits, sys.set_int_max_str_digits))

FLAGS = (
    FlagSlot("interpreter", "a rank sets limits of Python and of its collector for itself", _INTERPRETER),
    FlagSlot(
        "default_dtype", "torch.set_default_dtype is process-wide", _flag("get_default_dtype", "_set_default_dtype")
    ),
    FlagSlot(
        "deterministic",
        "a rank may ask for deterministic algorithms, or for filled memory",
        _deterministic() + _switch("deterministic_fill_uninitialized_memory"),
    ),
    FlagSlot(
        "attention_backends",
        "torch.nn.attention.sdpa_kernel sets process-wide flags while its block runs",
        _attention("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
        + _switch("sdp_priority_order", "math_sdp_allow_fp16_bf16_reduction"),
    ),
    FlagSlot(
        "cudnn",
        "torch.backends.cudnn.flags sets them while its block runs",
        _switch("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cudnn_depthwise_kernel"),
    ),
    FlagSlot(
        "cpu_libraries",
        "torch.backends.mkldnn.flags sets them while its block runs",
        _switch("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled", "qengine"),
    ),
    FlagSlot(
        "matmul_reductions",
        "they change the numbers of a product in half precision",
        _reductions()
        + _switch("cublas_allow_fp16_accumulation", "cpu_allow_fp16_reduced_precision_reduction")
        + _only_with_cuda(),
    ),
    FlagSlot(
        "float32_precision",
        "a rank may ask for TF32, and a matmul on another rank must not have it",
        (Flag(precisions, put_precisions),),
    ),
    FlagSlot("anomaly", "torch.autograd.detect_anomaly is process-wide", _anomaly()),
    FlagSlot(
        "checks",
        "what torch checks and warns of, by switches of the process",
        _switch("warnAlways", "autograd_fallback_mode", "backcompat_broadcast_warn", "backcompat_keepdim_warn")
        + _flag("_check_sparse_tensor_invariants", "_set_check_sparse_tensor_invariants"),
    ),
)


def _none(seen: object) -> None:
    return None


def _lasting_handlers(handlers: dict[Any, Any]) -> dict[Any, Any]:
    """The handlers without those that a block (loss_parallel, context_parallel) installs temporarily."""
    passing = ("torch.distributed.tensor.parallel.", "torch.distributed.tensor.experimental.")
    return {op: handler for op, handler in handlers.items() if not handler.__module__.startswith(passing)}


_CP = "torch.distributed.tensor.experimental._context_parallel"
NAMES = (
    NameSlot(
        "module_hooks",
        "hooks for all modules; CommDebugMode registers some",
        "torch.nn.modules.module",
        ("_global_is_full_backward_hook",),
        (
            "_global_buffer_registration_hooks",
            "_global_module_registration_hooks",
            "_global_parameter_registration_hooks",
            "_global_backward_pre_hooks",
            "_global_backward_hooks",
            "_global_forward_pre_hooks",
            "_global_forward_hooks",
            "_global_forward_hooks_always_called",
            "_global_forward_hooks_with_kwargs",
        ),
    ),
    NameSlot(
        "optimizer_hooks",
        "hooks for all optimizers",
        "torch.optim.optimizer",
        owned=("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
    ),
    NameSlot(
        "rng_tracker",
        "DTensor's random state, made for the mesh of one rank",
        "torch.distributed.tensor._random",
        ("_rng_tracker",),
        fresh=_none,
    ),
    NameSlot(
        "dtensor_handlers",
        "loss_parallel and context_parallel change them while their blocks run",
        "torch.distributed.tensor:DTensor._op_dispatcher",
        owned=("_custom_op_handlers",),
        fresh=_lasting_handlers,
        older=("_allow_implicit_replication",),
    ),
    NameSlot(
        "attention_function",
        "context_parallel puts another function there while its block runs",
        "torch.nn.functional",
        ("scaled_dot_product_attention",),
    ),
    NameSlot(
        "context_parallel",
        "how context_parallel is switched on, and the handlers that it puts back",
        f"{_CP}._attention",
        ("_dispatch_mode",),
        ("existing_custom_ops",),
    ),
    NameSlot(
        "context_parallel_options",
        "context_parallel and set_rotate_method change them in place",
        f"{_CP}._attention:_cp_options",
        ("convert_to_f32", "enable_load_balance", "rotate_method"),
    ),
    NameSlot(
        "checkpoint",
        "set_checkpoint_early_stop and its like set them while their blocks run",
        "torch.utils.checkpoint",
        ("_checkpoint_debug_enabled", "_enable_checkpoint_early_stop"),
    ),
    NameSlot(
        "parametrize_cache",
        "parametrize.cached() counts its blocks and keeps tensors",
        "torch.nn.utils.parametrize",
        ("_cache_enabled",),
        ("_cache",),
    ),
    NameSlot(
        "module_conversion",
        "torch.__future__ says how a module's parameters are converted",
        "torch.__future__",
        ("_overwrite_module_params_on_conversion", "_swap_module_params_on_conversion"),
    ),
    NameSlot(
        "saved_tensors",
        "allow_mutation_on_saved_tensors refuses a second block, of whichever rank",
        "torch.autograd.graph",
        ("_allow_mutation_on_saved_tensors_enabled",),
    ),
    NameSlot(
        "dispatch_flags",
        "whether a dispatch mode is on; the modes themselves are per thread, these flags are not",
        "torch.utils._python_dispatch",
        (
            "_is_in_torch_dispatch_mode",
            "_is_in_non_infra_torch_dispatch_mode",
            "_is_in_any_mode_without_ignore_compile_internals",
        ),
    ),
    NameSlot(
        "current_device",
        "a shadow of the default device; the device itself is per thread",
        "torch.utils._device",
        ("CURRENT_DEVICE",),
    ),
    NameSlot(
        "print_options",
        "torch.set_printoptions is process-wide",
        "torch._tensor_str:PRINT_OPTS",
        ("precision", "threshold", "edgeitems", "linewidth", "sci_mode"),
    ),
    NameSlot(
        "transformer_fastpath",
        "torch.backends.mha.set_fastpath_enabled is process-wide",
        "torch.backends.mha",
        ("_is_fastpath_enabled",),
    ),
    NameSlot(
        "redistribute",
        "use_min_cost_redistribution_plan and its like set them while their blocks run",
        "torch.distributed.tensor._redistribute",
        ("_FORCE_MIN_COST_REDISTRIBUTION_PLAN", "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION"),
    ),
    NameSlot(
        "fully_shard",
        "disable_fsdp_module_new_init sets it while its block runs",
        "torch.distributed.fsdp._fully_shard._fully_shard",
        ("_enable_fsdp_module_new_init",),
    ),
    NameSlot(
        "fsdp_extensions",
        "tensor parallelism sets its own for FSDP",
        "torch.distributed.fsdp._fsdp_extensions",
        ("_extensions",),
        fresh=_none,
    ),
    NameSlot(
        "shard_group", "set while it loads", "torch.distributed._shard.api", ("_CURRENT_PROCESS_GROUP",), fresh=_none
    ),
    NameSlot(
        "init_method", "how it was initialised", "torch.distributed.distributed_c10d", ("_default_pg_init_method",)
    ),
    NameSlot(
        "symmetric_memory",
        "stores, workspaces and streams by the name of a group, which the ranks share",
        "torch.distributed._symmetric_memory",
        ("_is_test_mode", "_mocked_group_names"),
        ("_group_name_to_store", "_group_name_to_workspace_tensor", "_backend_streams", "_symm_mem_pools"),
        fresh=lambda seen: type(seen)(),
    ),
    NameSlot("hub_dir", "torch.hub.set_dir is process-wide", "torch.hub", ("_hub_dir",)),
    NameSlot(
        "output", "contextlib.redirect_stdout on one rank must not take another's lines", "sys", ("stdout", "stderr")
    ),
    NameSlot(
        "interpreter_hooks",
        "what is called for an exception that ends the program, or for a value at a prompt",
        "sys",
        ("excepthook", "displayhook", "unraisablehook", "dont_write_bytecode"),
    ),
    NameSlot("thread_hook", "what is called for an exception that ends a thread", "threading", ("excepthook",)),
    NameSlot("import_path", "scripts add folders and ways to import", "sys", owned=("path", "meta_path", "path_hooks")),
    NameSlot("temporary_folder", "tempfile.tempdir is process-wide", "tempfile", ("tempdir",)),
    NameSlot("argv", "scripts read it, and some change it", "sys", owned=("argv",)),
)

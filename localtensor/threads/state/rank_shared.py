"""What is not swapped when one rank hands over to another: torch keeps it per thread already, or ranks may share it."""

from dataclasses import dataclass

from localtensor.threads.state.slots import TRIED


@dataclass(frozen=True)
class Shared:
    """`why` it is not swapped.  tests/localtensor/test_rank_state.py proves each entry of `PER_THREAD`."""

    name: str
    why: str
    tried: tuple[str, ...] = TRIED


# A thread of a rank has these for itself, and begins with torch's own first values, not with the caller's.
PER_THREAD = (
    Shared("default_device", "torch.set_default_device puts a mode on the thread's stack"),
    Shared("grad_mode", "no_grad, enable_grad and inference_mode are in the thread"),
    Shared("autocast", "whether, in which dtype, and its cache"),
    Shared("dispatch_modes", "the stack of TorchDispatchMode"),
    Shared("function_modes", "the stack of TorchFunctionMode"),
    Shared("explicit_redistribution", "ExplicitRedistributionContext keeps itself in a threading.local"),
    Shared("implicit_replication", "a thread-local switch in C++; older torch keeps a name: see dtensor_handlers"),
    Shared("autograd_multithreading", "set_multithreading_enabled is in the thread"),
    Shared("flush_denormal", "a register of the thread; it begins as a copy of that of the thread that started it"),
    Shared("num_threads", "a thread that has computed keeps its number; new threads begin with the last one set"),
    Shared("mesh_stack", "with mesh: device_mesh._mesh_resources is a threading.local"),
    Shared("numpy_errstate", "numpy.errstate is a context variable, which a thread has for itself"),
)

LEFT_ALONE = (
    Shared("process_group_world", "c10d's _world and its C++ registry: the engine's own business"),
    Shared("modules_and_path", "sys.modules and sys.path: one program, imported once"),
    Shared("registrations", "torch.library, pytrees, safe globals, backends: as for sharding rules"),
    Shared("caches", "redistribution plans, tensor metadata: the engine clears what depends on a rank"),
    Shared("warning_registries", "each module's: a warning shown once is shown once for all ranks"),
    Shared("logging", "handlers and levels, but for assertLogs: the engine says whose line it is"),
    Shared("working_directory", "os.chdir, umask, signals: a system call at each hand-over, and rarely a rank's own"),
    Shared("garbage_collector", "one heap, one collector"),
    Shared("exception_hooks", "sys.excepthook and threading.excepthook: the engine gathers errors"),
    Shared("compile_configs", "torch._dynamo, _functorch, _inductor: compiled code is shared, so its settings are"),
    Shared("profiler", "torch.profiler records a process: a profile by one rank shows all"),
    Shared("forward_ad_levels", "one list in C++: a second rank inside forward_ad.dual_level is refused by torch"),
    Shared("vmap_fallback", "private, for debugging functorch"),
    Shared("active_ddp_module", "read only by torch.compile"),
    Shared("debug_level", "torch.distributed.set_debug_level: logs and checks; 0.15 microseconds at each hand-over"),
    Shared("sm_carveout", "experimental, and each change is warned of"),
    Shared("default_tensor_type", "set_default_tensor_type is deprecated; its dtype half is the slot default_dtype"),
    Shared("cuda_device", "torch.cuda.set_device and streams: the CUDA runtime keeps them per thread"),
    Shared("other_generators", "those of MPS and XPU: ranks there are not simulated"),
    Shared("context_parallel_functions", "_replaced_functions: keyed by a wrapper that only one rank has"),
    Shared("opt_einsum", "the order of an einsum; torch.backends keeps it in two places that torch itself mixes up"),
    Shared("symmetric_memory", "its test switches and pools; the simulation has no symmetric memory"),
    Shared("rpc", "torch.distributed.rpc and elastic agents are not simulated"),
    Shared("sharded_tensor_ids", "the old ShardedTensor numbers its tensors for RPC"),
    Shared("flash_attention_registry", "which kernels are installed, by an import"),
    Shared("fork_rng_warning", "whether a warning was shown"),
)

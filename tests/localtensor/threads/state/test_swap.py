import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import io
import logging
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import unittest
import warnings
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext, suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
from torch import nn
from torch.distributed.fsdp import _debug_utils
from torch.distributed.tensor.experimental._context_parallel import _attention, _sharding_rules
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor._util import ambient
from localtensor.threads.state import slots, swap
from localtensor.threads.state.slots import FLAGS, NAMES, FlagSlot, NameSlot
from localtensor.threads.state.swap import SLOTS, OutsideState, RankState, switch

for _slot in NAMES:
    importlib.import_module(_slot.module)
numpy_random = importlib.import_module("numpy.random")


def enter(block):
    """The block is entered and stays open: `switch` must cope with a rank that waits inside it."""
    block.__enter__()
    OPEN.append(block)


OPEN: list[AbstractContextManager] = []


@pytest.fixture(autouse=True)
def close_blocks():
    yield
    with OutsideState():  # so that leaving them in another state than they were entered in harms nobody
        while OPEN:
            with suppress(KeyError):
                OPEN.pop().__exit__(None, None, None)


def enter_in_a_run(block):
    with ambient.simulation_entered(object()):
        enter(block)


def set_by_monkeypatch():
    with ambient.simulation_entered(object()):
        pytest.MonkeyPatch().setattr(math, "e", 7)


def set_argv():
    sys.argv.append("--rank-only")


def set_environment():
    os.environ["LT_MINE"] = "1"


def step_hook(*args):
    pass


FS = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
EXT = importlib.import_module("torch.distributed.fsdp._fsdp_extensions")
SHARD = importlib.import_module("torch.distributed._shard.api")
RED = importlib.import_module("torch.distributed.tensor._redistribute")
SYMM = importlib.import_module("torch.distributed._symmetric_memory")
OPTIM = importlib.import_module("torch.optim.optimizer")
RNG = importlib.import_module("torch.distributed.tensor._random")
DISPATCHER = dtensor.DTensor._op_dispatcher

# slot -> what one rank does, by the way a program does it, and how it or another looks at that
BY_HAND = {
    "output": (lambda: enter(contextlib.redirect_stdout(io.StringIO())), lambda: sys.stdout),
    "sharding_rules": (lambda: DISPATCHER.sharding_propagator.op_strategy_funcs.__setitem__("nobody's op", "a rule"),
        lambda: "nobody's op" in DISPATCHER.sharding_propagator.op_strategy_funcs),
    "registered_backends": (lambda: dist.Backend.register_backend("nobodys", print, devices="cpu"),
                            lambda: (dist.is_backend_available("nobodys"), hasattr(dist.Backend, "NOBODYS"))),
    "profiler_of_fsdp": (lambda: _debug_utils.SimpleProfiler.profiling.add("a part"),
                         lambda: "a part" in _debug_utils.SimpleProfiler.profiling),
    "default_dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "deterministic": (lambda: torch._C._set_deterministic_algorithms(True, warn_only=True),
                      torch.get_deterministic_debug_mode),
    "attention_backends": (lambda: enter(nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)),
                           torch.backends.cuda.flash_sdp_enabled),
    "cudnn": (lambda: enter(torch.backends.cudnn.flags(enabled=False)), lambda: torch.backends.cudnn.enabled),
    "cpu_libraries": (lambda: enter(torch.backends.mkldnn.flags(enabled=False)),
                      lambda: torch.backends.mkldnn.enabled),
    "matmul_reductions": (lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
    "float32_precision": (lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision),
    "anomaly": (lambda: torch._C.set_anomaly_enabled(True, False), torch.is_anomaly_check_nan_enabled),
    "checks": (torch.sparse.check_sparse_tensor_invariants.enable,
               torch.sparse.check_sparse_tensor_invariants.is_enabled),
    "module_hooks": (lambda: nn.modules.module.register_module_forward_hook(step_hook),
                     nn.modules.module._has_any_global_hook),
    "optimizer_hooks": (lambda: OPTIM.register_optimizer_step_pre_hook(step_hook),
                        lambda: list(OPTIM._global_optimizer_pre_hooks.values())),
    "rng_tracker": (lambda: setattr(RNG, "_rng_tracker", step_hook), lambda: RNG._rng_tracker),
    "dtensor_handlers": (lambda: enter(dtensor.parallel.loss_parallel()), lambda: len(DISPATCHER._custom_op_handlers)),
    "attention_function": (lambda: _attention._distribute_function(
        nn.functional.scaled_dot_product_attention, nn.functional, None, None, None),
        lambda: nn.functional.scaled_dot_product_attention.__name__),
    "context_parallel": (lambda: setattr(_attention, "_dispatch_mode", _attention._DispatchMode.MODULE_WRAPPER),
                         lambda: _attention._dispatch_mode),
    "context_parallel_options": (lambda: setattr(_attention._cp_options, "enable_load_balance", False),
                                 lambda: _attention._cp_options.enable_load_balance),
    "context_parallel_rules": (_attention._enable_cp_dtensor_dispatcher,
                               lambda: bool(_sharding_rules._cp_strategy_contexts)),
    "checkpoint": (lambda: enter(checkpoint.set_checkpoint_early_stop(False)),
                   lambda: checkpoint._enable_checkpoint_early_stop),
    "parametrize_cache": (lambda: enter(parametrize.cached()), lambda: parametrize._cache_enabled),
    "module_conversion": (lambda: torch.__future__.set_swap_module_params_on_conversion(True),
                          torch.__future__.get_swap_module_params_on_conversion),
    "saved_tensors": (lambda: setattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", True),
                      lambda: torch.autograd.graph._allow_mutation_on_saved_tensors_enabled),
    "dispatch_flags": (lambda: setattr(torch.utils._python_dispatch, "_is_in_torch_dispatch_mode", True),
                       torch.utils._python_dispatch.is_in_torch_dispatch_mode),
    "current_device": (lambda: setattr(torch.utils._device, "CURRENT_DEVICE", torch.device("meta")),
                       lambda: torch.utils._device.CURRENT_DEVICE),
    "print_options": (lambda: torch.set_printoptions(precision=1), lambda: str(torch.tensor(0.123456))),
    "transformer_fastpath": (lambda: torch.backends.mha.set_fastpath_enabled(False),
                             torch.backends.mha.get_fastpath_enabled),
    "redistribute": (lambda: enter(RED.use_min_cost_redistribution_plan()),
                     lambda: RED._FORCE_MIN_COST_REDISTRIBUTION_PLAN),
    "fully_shard": (lambda: enter(FS.disable_fsdp_module_new_init()), lambda: FS._enable_fsdp_module_new_init),
    "fsdp_extensions": (lambda: EXT._set_fsdp_extensions(step_hook), lambda: EXT._extensions),
    "shard_group": (lambda: setattr(SHARD, "_CURRENT_PROCESS_GROUP", 7), lambda: SHARD._CURRENT_PROCESS_GROUP),
    "symmetric_memory": (lambda: SYMM._group_name_to_workspace_tensor.update(g=1), lambda: dict(SYMM._group_name_to_workspace_tensor)),
    "init_method": (lambda: setattr(torch.distributed.distributed_c10d, "_default_pg_init_method", "tcp://x"),
                    lambda: torch.distributed.distributed_c10d._default_pg_init_method),
    "hub_dir": (lambda: torch.hub.set_dir("/nowhere"), torch.hub.get_dir),
    "interpreter": (lambda: gc.set_threshold(7, 8, 9), gc.get_threshold),
    "interpreter_hooks": (lambda: setattr(sys, "excepthook", step_hook), lambda: sys.excepthook),
    "thread_hook": (lambda: setattr(threading, "excepthook", step_hook), lambda: threading.excepthook),
    "import_path": (lambda: sys.path.append("/nowhere"), lambda: sys.path[-1]),
    "temporary_folder": (lambda: setattr(tempfile, "tempdir", "/nowhere"), lambda: tempfile.tempdir),
    "argv": (set_argv, lambda: sys.argv[-1]),
    "torch_generator": (lambda: torch.manual_seed(99), torch.initial_seed),
    "python_generator": (lambda: random.gauss(0, 1), lambda: random._inst.gauss_next),
    "numpy_generator": (numpy_random.randn, lambda: numpy_random.get_state()[2:]),
    "environment": (set_environment, lambda: os.environ.get("LT_MINE")),
    "patches": (lambda: enter_in_a_run(mock.patch.object(math, "tau", 7)), lambda: math.tau),
    "asserted_logs": (lambda: enter_in_a_run(unittest.TestCase().assertNoLogs("nobody's")),
                      lambda: logging.getLogger("nobody's").propagate),
    "monkeypatches": (set_by_monkeypatch, lambda: math.e),
    "warnings": (lambda: warnings.simplefilter("always"), lambda: warnings.filters[0]),
}  # fmt: skip
NOT_HERE = {"cuda_generators"}
if importlib.util.find_spec("spmd_types"):
    checker = importlib.import_module("spmd_types.checker")
    with checker.typecheck():
        pass  # it imports the rest of the package
    BY_HAND["typecheck"] = (lambda: enter(checker.typecheck()), lambda: vars(torch.autograd.Function)["apply"])
else:
    NOT_HERE |= {"typecheck"}


def test_every_slot_has_a_test_by_hand_and_says_why():
    assert set(BY_HAND) | NOT_HERE == set(SLOTS)
    assert len(SLOTS) == len(FLAGS) + len(NAMES) + len(swap._ALL_SPECIALS)
    for slot in SLOTS.values():
        assert len(slot.why) > 15, slot.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        FLAGS[0].name = "other"


@pytest.mark.parametrize("name", BY_HAND)
def test_what_one_rank_does_no_other_sees(name, ranks):
    """And it finds it again, also after the other has done the same."""
    act, look = BY_HAND[name]
    before = look()
    act()
    mine = look()
    assert mine != before, f"the act for {name} changes nothing"
    switch(*ranks)
    assert look() == before
    switch(ranks[1], ranks[0])
    assert look() == mine
    switch(*ranks)
    act()
    switch(ranks[1], ranks[0])
    assert look() == mine


def slot_text(name):
    """The current value of a slot; None while its module is not imported."""
    slot = SLOTS[name]
    if isinstance(slot, NameSlot):
        space = slot.space() if slot.module in sys.modules else None
        value = space and {key: space[key] for key in (*slot.plain, *slot.older, *slot.owned) if key in space}
    else:
        value = slot.save() if isinstance(slot, FlagSlot) or slot.ready() else None
    return value.tolist() if isinstance(value, torch.Tensor) else str(value)


@pytest.mark.skipif(not hasattr(sys, "set_int_max_str_digits"), reason="this Python has no such limit")
def test_the_longest_text_of_an_int_is_a_rank_s_own():
    before = sys.get_int_max_str_digits()
    with OutsideState():
        states = [RankState(rank, 2, seed=0) for rank in range(2)]
        switch(None, states[0])
        sys.set_int_max_str_digits(before + 1)
        switch(*states)
        assert sys.get_int_max_str_digits() == before
        switch(*reversed(states))
        assert sys.get_int_max_str_digits() == before + 1
    assert sys.get_int_max_str_digits() == before


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_the_caller_has_its_own_back(name, fails):
    act, look = BY_HAND[name]
    outside, shown = slot_text(name), look()

    def run():
        with OutsideState():
            switch(None, RankState(0, 1, seed=5))
            act()
            assert look() != shown
            return {}[name] if fails else None

    with pytest.raises(KeyError) if fails else nullcontext():
        run()
    assert look() == shown
    assert slot_text(name) == outside


@pytest.mark.parametrize("slot", NAMES, ids=lambda slot: slot.name)
def test_every_name_is_swapped(slot, ranks):
    space = slot.space()
    for name in slot.plain:
        mark = object()
        kept, space[name] = space[name], mark
        switch(*ranks)
        assert space[name] is not mark, name
        switch(ranks[1], ranks[0])
        assert space[name] is mark, name
        space[name] = kept
    for name in slot.owned:
        mine = space[name]
        switch(*ranks)
        assert space[name] is not mine and space[name] == mine, name
        switch(ranks[1], ranks[0])
        assert space[name] is mine, name
        space[name] = type(mine)()  # a rank may also put another there
        other = space[name]
        switch(*ranks)
        switch(ranks[1], ranks[0])
        assert space[name] is other, name
        space[name] = mine


WITH_BOOLS = [slot for slot in FLAGS if any(isinstance(flag.get(), bool) for flag in slot.flags)]


@pytest.mark.parametrize("slot", WITH_BOOLS, ids=lambda slot: slot.name)
def test_every_flag_is_swapped(slot, ranks):
    turned = 0
    for flag in slot.flags:
        held = flag.get()
        if isinstance(held, bool) and flag.get.__name__ != "_get_cpu_allow_fp16_reduced_precision_reduction":
            flag.put(not held)  # not that one: a CPU without float16 refuses
            switch(*ranks)
            assert flag.get() == held
            switch(ranks[1], ranks[0])
            assert flag.get() == (not held)
            turned += 1
    assert turned


def test_torch_still_has_every_private_part():
    """Red here: torch has moved what the table names; ranks then see each other's value of it until it is named anew."""
    gone = list(slots.MISSING)
    for slot in NAMES:
        gone += [f"{slot.home} {name}" for name in (*slot.plain, *slot.owned) if name not in slot.space()]
    gone += [f"warnings.{name}" for name in swap.WarningsSlot.wanted if not hasattr(warnings, name)]
    assert gone == []
    assert all(special.ready() for special in swap._ALL_SPECIALS[-2:])


def test_two_names_of_one_dict_are_two_names_of_one_dict_on_each_rank(ranks):
    for here, there in (ranks, ranks[::-1]):
        assert DISPATCHER._custom_op_handlers is _attention.existing_custom_ops
        switch(here, there)


def test_precisions_of_mixed_switches_do_not_stop_a_hand_over(ranks):
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert slots.precisions()[0] == slots.MIXED
    switch(*ranks)
    assert torch.get_float32_matmul_precision() == "highest"
    switch(ranks[1], ranks[0])
    assert slots.precisions()[0] == slots.MIXED
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"


def test_a_hand_over_inside_modes_changes_nothing_they_see(ranks):
    class Listens(TorchDispatchMode):
        rank_results = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.rank_results += 1
            return func(*args, **(kwargs or {}))

    with Listens() as mode, torch.device("meta"), torch.inference_mode():
        switch(*ranks)
        switch(ranks[1], ranks[0])
        assert mode.rank_results == 0


LATE = """
import sys, random, torch
from localtensor.threads.state.swap import OutsideState, RankState, switch
assert "torch.distributed.tensor" not in sys.modules and "numpy.random" not in sys.modules
with OutsideState():
    a, b, c = (RankState(rank, 3, seed=7) for rank in range(3))
    switch(None, a)
    import numpy.random
    numpy.random.seed(1)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel
    import torch.distributed.tensor.experimental._context_parallel._attention as cp
    import torch.distributed.tensor._random as tracker
    tracker._rng_tracker = "mine"
    block = loss_parallel()
    block.__enter__()
    mine = len(DTensor._op_dispatcher._custom_op_handlers)
    switch(a, b)
    assert tracker._rng_tracker is None
    theirs = len(DTensor._op_dispatcher._custom_op_handlers)
    assert theirs < mine, (theirs, mine)
    assert cp.existing_custom_ops is DTensor._op_dispatcher._custom_op_handlers
    got = numpy.random.rand()
    switch(b, c)
    assert numpy.random.rand() == got == numpy.random.RandomState(7).rand()
    switch(c, a)
    assert tracker._rng_tracker == "mine" and len(DTensor._op_dispatcher._custom_op_handlers) == mine
    assert numpy.random.rand() == numpy.random.RandomState(1).rand()
assert tracker._rng_tracker is None and len(DTensor._op_dispatcher._custom_op_handlers) == theirs
print("late enough")
"""


@pytest.mark.slow
def test_a_module_imported_during_the_run_is_swapped_from_then_on():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("late enough\n", 0), done.stderr


@pytest.mark.slow
def test_a_rank_that_imports_nothing_heavy_makes_no_one_else_do_it():
    look = ("import sys, torch, localtensor.threads.state.swap as r; r.RankState(0, 1, 0); "
            "sys.exit('torch.distributed.tensor' in sys.modules)")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", look], check=False).returncode == 0


def test_containers_are_of_the_kind_they_were(ranks):
    assert type(nn.modules.module._global_forward_hooks) is OrderedDict
    assert type(sys.argv) is list


def test_a_hand_over_takes_no_longer_than_counting_to_some_thousands(ranks):
    """It takes as long as Python needs to count to some 4,000; this bound only catches what is wrong by an order of magnitude.

    It is no number of microseconds: processors that run tests differ by a factor of four.
    """

    def there_and_back():
        switch(*ranks)
        switch(ranks[1], ranks[0])

    def counting():
        for _ in range(4_000):
            pass

    both, count = (
        min(timeit.repeat(one, timer=time.thread_time, number=200, repeat=20)) for one in (there_and_back, counting)
    )
    assert both / 2 < 8 * count

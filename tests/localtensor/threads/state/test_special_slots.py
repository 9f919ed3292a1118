import os
import subprocess
import sys
import threading
import warnings
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
import torch.distributed.tensor as dtensor
import torch.distributed.tensor.experimental
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from localtensor.threads.state.special_slots import LEFT_ALONE, PER_THREAD
from localtensor.threads.state.swap import SLOTS, OutsideState, RankState, switch
from tests.tools import warm

DISPATCHER = dtensor.DTensor._op_dispatcher


def printenv(*names):
    """As a program sees it that the rank starts."""
    look = f"import os; print([os.environ.get(name) for name in {names!r}])"
    return subprocess.run([sys.executable, "-Sc", look], capture_output=True, text=True, check=True).stdout.strip()


def test_the_environment_is_that_of_torchrun_also_for_c(ranks):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "LT_A")
    os.environ["LT_A"] = "a"
    assert printenv(*names) == "['0', '0', '2', '2', '0', '0', '127.0.0.1', 'a']"
    switch(*ranks)
    assert [os.environ.get(name) for name in names] == ["1", "1", "2", "2", "0", "1", "127.0.0.1", None]
    assert printenv(*names) == "['1', '1', '2', '2', '0', '1', '127.0.0.1', None]"
    assert os.environb[b"RANK"] == b"1"
    os.environ.pop("WORLD_SIZE")
    switch(ranks[1], ranks[0])
    assert printenv(*names[2:3], "LT_A") == "['2', 'a']"
    switch(*ranks)
    assert printenv("WORLD_SIZE") == "[None]"


def test_the_environment_of_the_caller_is_back_for_c_too():
    data = vars(os.environ)["_data"]
    with OutsideState():
        switch(None, RankState(0, 1, seed=0))
        os.environ.clear()
        os.environ["LT_LEAK"] = "1"
    assert vars(os.environ)["_data"] is vars(os.environb)["_data"] is data
    assert printenv("LT_LEAK", "RANK") == f"[None, {os.environ.get('RANK')!r}]"
    assert os.getenv("PATH") == os.environ["PATH"]


def test_a_rank_inside_catch_warnings_hears_only_its_own(ranks):
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        switch(*ranks)
        with pytest.raises(UserWarning, match="other"):
            warnings.warn("other", UserWarning, stacklevel=1)
        switch(ranks[1], ranks[0])
        warnings.warn("mine", UserWarning, stacklevel=1)
    assert [str(one.message) for one in recorded] == ["mine"]


def test_what_one_rank_was_shown_once_another_still_hears(ranks):
    def warn():
        warnings.warn("from here", UserWarning, stacklevel=1)

    shown = []
    warnings.simplefilter("default")
    warnings.showwarning = lambda *args, **kwargs: shown.append(args)
    warn()
    switch(*ranks)
    with pytest.raises(UserWarning, match="from here"):
        warn()
    assert len(shown) == 1


@pytest.mark.parametrize("leaver", [0, 1])
def test_context_parallel_ends_for_the_rank_that_leaves_it(leaver, ranks):
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    propagator = DISPATCHER.sharding_propagator

    def rules():  # they moved from one table to the other after torch 2.13
        return [getattr(propagator, name, {}).get(op) for name in ("op_strategy_funcs", "op_single_dim_strategy_funcs")]

    outside = rules()
    for here, there in (ranks, ranks[::-1]):
        _attention._enable_cp_dtensor_dispatcher()
        switch(here, there)
    if leaver:
        switch(*ranks)
    _attention._disable_cp_dtensor_dispatcher()
    assert op not in DISPATCHER._custom_op_handlers
    assert rules() == outside != [None, None]
    switch(ranks[leaver], ranks[1 - leaver])
    assert op in DISPATCHER._custom_op_handlers
    assert rules() != outside


IN_ITS_BLOCK = """
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention
from localtensor.threads.state.swap import OutsideState, RankState, switch

op = torch.ops.aten._scaled_dot_product_flash_attention.default
propagator = DTensor._op_dispatcher.sharding_propagator
def rules():
    return [getattr(propagator, name, {}).get(op) for name in ("op_strategy_funcs", "op_single_dim_strategy_funcs")]
before = rules()
assert before != [None, None]
for _ in range(2):
    with OutsideState():
        ranks = [RankState(rank, 2, seed=5) for rank in range(2)]
        switch(None, ranks[0])
        assert rules() == before
        _attention._enable_cp_dtensor_dispatcher()  # which imports the module of the rules, the first time
        switch(*ranks)
        switch(*ranks[::-1])
    from torch.distributed.tensor.experimental._context_parallel import _sharding_rules
    assert not _sharding_rules._cp_strategy_contexts
    assert rules() == before
"""


def test_context_parallel_that_a_rank_never_leaves_is_over_with_the_run():
    done = warm.run([sys.executable, "-c", IN_ITS_BLOCK])
    assert (done.returncode, done.stderr) == (0, "")


RULES_OF_ITS_OWN = """
import torch
from localtensor.threads.state.swap import OutsideState, RankState, switch

with OutsideState():
    ranks = [RankState(rank, 2, seed=5) for rank in range(2)]
    switch(None, ranks[0])
    from torch.distributed.tensor import DTensor
    switch(*ranks)
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    rules["mine"] = print
    switch(*ranks[::-1])
    assert "mine" not in rules
    switch(*ranks)
    assert rules["mine"] is print
assert "mine" not in rules
"""


@pytest.mark.slow
def test_rules_that_a_rank_adds_to_a_dtensor_that_the_run_imported_are_gone_with_it():
    done = subprocess.run([sys.executable, "-c", RULES_OF_ITS_OWN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


OPEN: list[AbstractContextManager] = []  # the blocks that the acting thread is in


def enter(block):
    block.__enter__()
    OPEN.append(block)


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def redistribution_is_explicit():
    return getattr(dtensor._utils.ExplicitRedistributionContext._local, "_active", None)


THREADS = {
    "default_device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "grad_mode": (lambda: enter(torch.no_grad()), torch.is_grad_enabled),
    "autocast": (lambda: enter(torch.autocast("cpu", torch.float16)), lambda: torch.is_autocast_enabled("cpu")),
    "dispatch_modes": (lambda: enter(Quiet()), torch._C._len_torch_dispatch_stack),
    "function_modes": (lambda: enter(TorchFunctionMode()), torch._C._len_torch_function_stack),
    "explicit_redistribution": (lambda: enter(dtensor._utils.ExplicitRedistributionContext()),
                                redistribution_is_explicit),
    "implicit_replication": (lambda: enter(dtensor.experimental.implicit_replication()),
                             lambda: DISPATCHER._allow_implicit_replication),
    "autograd_multithreading": (lambda: torch.autograd.set_multithreading_enabled(False),
                                torch._C._is_multithreading_enabled),
    "flush_denormal": (lambda: torch.set_flush_denormal(True),
                       lambda: float(torch.tensor([1e-310], dtype=torch.float64) * 1)),
    "num_threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    "mesh_stack": (lambda: setattr(torch.distributed.device_mesh._mesh_resources, "lt_mark", 1),
                   lambda: hasattr(torch.distributed.device_mesh._mesh_resources, "lt_mark")),
    "numpy_errstate": (lambda: enter(np.errstate(all="raise")), lambda: np.geterr()["divide"]),
}  # fmt: skip


def test_each_thing_that_is_not_swapped_says_why():
    assert set(THREADS) == {entry.name for entry in PER_THREAD}
    for entry in (*PER_THREAD, *LEFT_ALONE):
        assert len(entry.why) > 15, entry.name
    names = [entry.name for entry in (*PER_THREAD, *LEFT_ALONE)]
    assert len(names) == len(set(names)) and not set(names) & set(SLOTS)


def seen_by_two_threads(act, look):
    """What one thread sees before its act and after, and what another that lives all the while sees at these times."""
    seen: list[object] = []
    began, acted = threading.Barrier(2), threading.Barrier(2)

    def other():
        seen.append(look())
        began.wait(60)
        acted.wait(60)
        seen.append(look())

    def first():
        look()
        began.wait(60)
        before = look()
        act()
        seen.append((before, look()))
        acted.wait(60)
        while OPEN:
            OPEN.pop().__exit__(None, None, None)

    with OutsideState():
        threads = [threading.Thread(target=run) for run in (other, first)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch.set_num_threads(torch.get_num_threads())
    theirs, (before, mine), still = seen
    return before, mine, theirs, still


@pytest.mark.parametrize("name", THREADS)
def test_two_threads_that_live_at_once_do_not_share(name):
    before, mine, theirs, still = seen_by_two_threads(*THREADS[name])
    assert mine != before
    assert still == theirs == before


def test_what_is_process_wide_would_be_caught():
    before, mine, theirs, still = seen_by_two_threads(
        lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype
    )
    assert (before, mine, theirs, still) == (torch.float32, torch.float64, torch.float32, torch.float64)

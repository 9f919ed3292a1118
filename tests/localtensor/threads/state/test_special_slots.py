import os
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.tensor as dtensor
from torch.distributed.tensor.experimental._context_parallel import _attention

from localtensor.threads.state.swap import OutsideState, RankState, switch

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
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        switch(*ranks)
        with pytest.raises(UserWarning, match="other"):
            warnings.warn("other", UserWarning, stacklevel=1)
        switch(ranks[1], ranks[0])
        warnings.warn("mine", UserWarning, stacklevel=1)
    assert [str(one.message) for one in heard] == ["mine"]


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
        _attention._enable_cp_dtensor_dispatcher()  # which imports the room of the rules, the first time
        switch(*ranks)
        switch(*ranks[::-1])
    from torch.distributed.tensor.experimental._context_parallel import _sharding_rules
    assert not _sharding_rules._cp_strategy_contexts
    assert rules() == before
"""


def test_context_parallel_that_a_rank_never_leaves_is_over_with_the_run():
    done = subprocess.run([sys.executable, "-c", IN_ITS_BLOCK], capture_output=True, text=True, check=False)
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


def test_rules_that_a_rank_adds_to_a_dtensor_that_the_run_imported_are_gone_with_it():
    done = subprocess.run([sys.executable, "-c", RULES_OF_ITS_OWN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

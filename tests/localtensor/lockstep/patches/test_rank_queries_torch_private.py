import re
from pathlib import Path

import pytest

from localtensor.collectives.calls_seen import SEEN_PRIVATE
from localtensor.processes import staging
from localtensor.threads import rank_world
from localtensor.threads.state import propagation_settings, shared_propagation
from localtensor.threads.symmetric.patches import SYMMETRIC_PRIVATE
from tests.localtensor.threads.test_rank_world import lacks

_CPP, _C10D = "torch._C._distributed_c10d", "torch.distributed.distributed_c10d"

# Private parts of torch that lockstep uses, and why.  Tried on torch 2.13.0 and 2.15.0; read in the sources of 2.11 to
# 2.14.  Those for compilers and make_fx (`_dynamo`, `ignore_compile_internals`, `_CURRENT_MAKE_FX_TRACER`) were tried
# on 2.11.0 and 2.13.0; some were read in the wheels of 2.12.1 and 2.14.1.  The private functions of DTensor, DeviceMesh and
# torch.distributed that lockstep replaces are the keys of the tables in lockstep/patches.
PRIVATE = {
    "torch.Tensor._make_wrapper_subclass": "a LocalTensor looks like a tensor of one rank",
    "torch._C._disabled_torch_function_impl": "no function mode is asked for a LocalTensor: all it does is ops",
    "torch._C._DisableTorchDispatch": "cells are worked on unseen by modes",
    "torch._C._ForceDispatchKeyGuard": "an op on cells is dispatched as outside of any mode, below autograd",
    "torch._C.DispatchKeySet.from_raw_repr": "the keys for that",
    "torch._C.DispatchKey": "their names",
    "torch._C._dispatch_keys": "whether a tensor has a dispatch of its own",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether an op has a batching rule, or is made of others",
    "torch._C._functorch._vmap_increment_nesting": "one op under vmap, without what torch.vmap adds to a function",
    "torch._C._functorch._vmap_decrement_nesting": "the same",
    "torch._C._functorch._add_batch_dim": "the same",
    "torch._C._functorch._remove_batch_dim": "the same",
    "torch._C._set_conj": "a view of conjugate numbers is put at its place in a memory that was split",
    "torch._C._set_neg": "the same",
    "torch._C._len_torch_dispatch_stack": "whether any mode is on in this thread",
    "torch._C._current_autograd_node": "whose backward is at work, for a message",
    "torch.utils._device._device_constructors": "a default device counts for torch.tensor, which is routed",
    "torch.utils._python_dispatch._is_in_torch_dispatch_mode": "a flag of the process, lowered when no mode is on",
    "torch._C._get_dispatch_mode": "whether shapes are being worked out, and no rank is meant",
    "torch._C._TorchDispatchModeKey.FAKE": "the mode that does so",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo": "no compiler is imported for the mode",
    "torch.utils._python_dispatch.TorchDispatchMode.ignore_compile_internals": "compiled code runs as it is written until Dynamo is patched",
    "torch._C._dynamo.eval_frame._FrameAction.SKIP": "the compiler leaves our dispatch alone",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "the same, for what it calls, too",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "the same",
    "torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER": "whether make_fx records ops",
    "torch._C._TorchDispatchModeKey.PROXY": "the mode that does so",
    "torch.fx.experimental.proxy_tensor.HANDLED_TYPES": "it records ops of LocalTensors as those of plain tensors",
    "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing": "an op is recorded first, then run under the mode",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "whether another mode keeps Dynamo away",
    "torch._C._dynamo.eval_frame.reset_code": "what a mode has compiled is forgotten when it ends",
    "torch.random._manual_seed_impl": "a seed counts for all ranks, or for each",
    f"{_C10D}._world": "which groups there are; ours answers for each thread by its mode",
    f"{_C10D}._World": "the class of that",
    f"{_CPP}.FakeProcessGroup._create_internal": "a Backend that does nothing, under each group",
    f"{_CPP}._register_process_group": "functional collectives know a group by its name",
    f"{_CPP}._unregister_process_group": "no name is left when the mode ends",
    f"{_CPP}._create_work_from_future": "a Work that is over",
    f"{_CPP}.FakeProcessGroup.Options.error_on_collective": "a collective of the tensors of one rank is no collective that moves nothing",
    "torch._library.custom_ops.OPDEFS": "a custom op that communicates runs as it is written",
    "torch.distributed.tensor.experimental._context_parallel._attention._compiled_create_block_mask": "it is made op by op",
    "torch.distributed.ProcessGroup._register_backend": "which backend a group has for a device",
    "torch.distributed.ProcessGroup._set_default_backend": "the same",
    "torch.distributed.ProcessGroup._set_group_name": "the name of a group",
    "torch.distributed.device_mesh.DeviceMesh._compute_coordinates_from_mesh": "where a rank stands, as torch finds it",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "a tensor that a collective brings is wrapped",
    "torch.utils._python_dispatch._disable_current_modes": "an op that is done for each kind shows once to other modes",
    "torch.utils._python_dispatch._push_mode": "the same",
    "torch.utils._python_dispatch._pop_mode": "the same",
    "torch.distributed.distributed_c10d._canonicalize_group_rank": "a root that differs within groups is refused",
    "torch.distributed.distributed_c10d._check_p2p_op_list": "batch_isend_irecv is refused, also where it was imported by name",
    "torch.distributed.distributed_c10d._find_pg_by_ranks_and_tag": "functional collectives take lists of ranks",
    "torch.distributed.nn.functional._Broadcast": "its backward asks whether it is the root",
    "torch.distributed.nn.functional._Gather": "its forward asks whether it is the root",
    "torch.distributed.nn.functional._Scatter": "its forward asks whether it is the root",
    "torch.distributed.nn.functional._AlltoAll": "its forward scatters from one rank after the other",
    "torch.utils._pytree": "the tensors and ints within an object",
}

MODULES = Path(__file__).parents[4] / "localtensor"
TOUCHED = re.compile(r"\btorch\._C\.(_\w+)|\b_functorch\.(_\w+)|\bcpp\.(_\w+)")
ELSEWHERE = {"_distributed_c10d", "_functorch", "_autograd", "_aot_autograd"}  # modules, whose own parts are listed


@pytest.mark.parametrize("path", {**PRIVATE, **SEEN_PRIVATE})
def test_each_private_part_of_torch_is_there(path):
    assert lacks(path) is None, {**PRIVATE, **SEEN_PRIVATE}[path]


def touched():
    """The private names of torch's C++ in each module, by name, with the modules."""
    found = {}
    for module in MODULES.rglob("*.py"):
        for match in TOUCHED.finditer(module.read_text()):
            name = next(part for part in match.groups() if part)
            found.setdefault(name, set()).add(module.stem)
    return found


def test_what_is_touched_is_listed_somewhere():
    listed = {
        part
        for table in (
            PRIVATE,
            rank_world.PRIVATE,
            rank_world.PROCESS_GLOBALS_PRIVATE,
            shared_propagation.PRIVATE,
            propagation_settings.PRIVATE,
            SEEN_PRIVATE,
            SYMMETRIC_PRIVATE,
            staging.PRIVATE,
        )
        for part in table
    }
    last = {part for path in listed for part in path.split(".")} | ELSEWHERE
    assert {name: modules for name, modules in touched().items() if name not in last} == {}

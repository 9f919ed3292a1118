"""torch's private parts that lockstep stands on, all in one place; the test of this room says which is gone.

Those of DTensor and DeviceMesh are the keys of the tables in lockstep/patches/dtensor.py, lockstep/patches/device_mesh.py and lockstep/patches/distributed_calls.py.
"""

_CPP, _C10D = "torch._C._distributed_c10d", "torch.distributed.distributed_c10d"

# Private part of torch: why it is needed.  Tried on torch 2.11.0, 2.13.0 and 2.15.0; read in the sources of 2.12 and 2.14.
PRIVATE = {
    "torch.Tensor._make_wrapper_subclass": "a LocalTensor looks like a tensor of one rank",
    "torch._C._disabled_torch_function_impl": "no function mode is asked for a LocalTensor: all it does is ops",
    "torch._C._DisableTorchDispatch": "cells are worked on unseen by modes",
    "torch._C._ForceDispatchKeyGuard": "an op on cells is dispatched as outside of any mode, below autograd",
    "torch._C.DispatchKeySet.from_raw_repr": "the keys for that",
    "torch._C.DispatchKey": "their names",
    "torch._C._dispatch_tls_local_include_set": "whether inference mode is on",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "whether an op has a batching rule, or is made of others",
    "torch._C._functorch._vmap_increment_nesting": "one op under vmap, without what torch.vmap adds to a function",
    "torch._C._functorch._vmap_decrement_nesting": "the same",
    "torch._C._functorch._add_batch_dim": "the same",
    "torch._C._functorch._remove_batch_dim": "the same",
    "torch._C._set_conj": "a view of conjugate numbers is put at its place in a memory that was split",
    "torch._C._set_neg": "the same",
    "torch._C._len_torch_dispatch_stack": "whether any mode is on in this thread",
    "torch._C._current_autograd_node": "whose backward is at work, for the words of a message",
    "torch.utils._device._device_constructors": "a default device counts for torch.tensor, which is routed",
    "torch.utils._python_dispatch._is_in_torch_dispatch_mode": "a flag of the process, lowered when no mode is on",
    "torch._C._get_dispatch_mode": "whether shapes are being worked out, and no rank is meant",
    "torch._C._TorchDispatchModeKey.FAKE": "the mode that does so",
    "torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo": "no compiler is imported for the mode",
    "torch.random._manual_seed_impl": "a seed counts for all ranks, or for each",
    f"{_C10D}._world": "which groups there are; ours answers for each thread by its mode",
    f"{_C10D}._World": "the class of that",
    f"{_CPP}.FakeProcessGroup._create_internal": "a Backend that does nothing, under each group",
    f"{_CPP}._register_process_group": "functional collectives know a group by its name",
    f"{_CPP}._unregister_process_group": "no name is left when the mode ends",
    f"{_CPP}._create_work_from_future": "a Work that is over",
    "torch.distributed.ProcessGroup._register_backend": "which backend a group has for a device",
    "torch.distributed.ProcessGroup._set_default_backend": "the same",
    "torch.distributed.ProcessGroup._set_group_name": "the name of a group",
    "torch.distributed.device_mesh.DeviceMesh._compute_coordinates_from_mesh": "where a rank stands, as torch finds it",
}

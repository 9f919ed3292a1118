"""What the kernels begin with: the handle of a symmetric tensor, and what lies in its place on each rank."""

from torch import Tensor

from localtensor.errors import NotSymmetric
from localtensor.threads.symmetric import meaning
from localtensor.threads.symmetric.handle import CPP, SymmetricHandle


def handle_of(call: str, tensor: Tensor, group_name: str, name: str = "input", op: str = "sum") -> SymmetricHandle:
    """The handle of a symmetric tensor of the group.  Raises `NotSymmetric`, and `UnknownReduction` for all but sums."""
    meaning.check_reduction(call, op, ("sum",))
    handle: SymmetricHandle | None = CPP.rendezvous(tensor, group_name)
    if handle is None:
        raise NotSymmetric(call, name, f"{name} of shape {tuple(tensor.shape)}", "it was not made by symm_mem.empty")
    return handle


def peers_of(handle: SymmetricHandle, x: Tensor) -> list[Tensor]:
    """What lies where `x` lies, on each rank of the group."""
    return [handle.get_remote_tensor(peer, x.shape, x.dtype) for peer in range(handle.world_size)]

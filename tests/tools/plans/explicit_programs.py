"""Programs of real processes too, which import this file: so it imports little."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from strategies.propagation.explicit.context import ImplicitCommunication, no_implicit_communication

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def laid(*placements, shape=(4, 4), mesh=None):
    mesh = mesh or init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return distribute_tensor(torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape), mesh, list(placements))


def said_by(fn, *args, **options):
    """What a call raises inside, or None."""
    try:
        with no_implicit_communication(**options):
            fn(*args)
    except ImplicitCommunication as error:
        return str(error)
    return None


def step_that_is_refused():
    """Some calls that are refused, one after the other, and a step of training that is not."""
    x, y, w = laid(S0), laid(S1), nn.Parameter(laid(R))
    said = [said_by(f) for f in (lambda: x + y, lambda: x.argmax(0), lambda: torch.equal(x, x))]
    with no_implicit_communication():
        total = (x @ w).sum().redistribute(placements=[R])
        total.backward()
        w.grad = w.grad.redistribute(placements=[R])
        torch.optim.SGD([w], lr=1.0).step()
    torch.distributed.barrier()  # nobody hangs: all were refused
    return said, w.full_tensor().sum().item()

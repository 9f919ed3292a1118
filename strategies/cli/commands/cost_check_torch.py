"""torch's own cost of a redistribution as a function of two specs, to be put to the test that every cost is put to.

| torch part                                                       | needed for                | read on     | run on |
|------------------------------------------------------------------|---------------------------|-------------|--------|
| torch.distributed.tensor._collective_utils.redistribute_cost     | what is tested            | 2.11 - 2.15 | 2.13   |

It is asked with a mesh of CPU ranks, each of which torch takes for a host of its own.
"""

from __future__ import annotations

from torch.distributed.tensor._collective_utils import redistribute_cost

from localtensor.layout.spec import Spec
from strategies.torch_api.specs import device_mesh, to_torch


def torch_cost(src: Spec, dst: Spec) -> float:
    """Seconds that torch would say; infinite where it knows of no way.

    >>> import torch
    >>> from localtensor.layout.mesh import Mesh
    >>> from localtensor.layout.spec import parse
    >>> src, dst = (Spec(Mesh.of(2), (parse(p),), (8, 8), torch.float32) for p in ("S(0)", "R"))
    >>> f"{torch_cost(src, dst) * 1e6:.1f} us"
    '9.3 us'
    """
    mesh = device_mesh(src.mesh)
    return float(redistribute_cost(to_torch(src, mesh), to_torch(dst, mesh))) / 1e6

"""Every overload that DTensor registers, in order: each has to be validated by a sweep, or has a reason why it cannot be.

| torch part (torch._C)                                                     | read on     | run on |
|---------------------------------------------------------------------------|-------------|--------|
| _dispatch_has_computed_kernel_for_dispatch_key(name, key): composite      |             |        |
| kernels count                                                             | 2.11 - 2.15 | 2.13   |
| _dispatch_dump_table(name): a line with the kernel of each key            | 2.11 - 2.15 | 2.13   |

`tests/strategies/torch_api/test_population.py` checks it by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strategies.model.rule import overload
from strategies.torch_api import dtensor

_KEYS = {"cpu": "CPU", "cuda": "CUDA"}


def missing_kernel_reason(op: str, device: str = "cpu") -> str:
    """Why this device has no kernel for the overload of that name, or empty.  Raises as `overload` for an unknown name."""
    known = getattr(torch._C, "_dispatch_has_computed_kernel_for_dispatch_key", None)
    if known is None or known(overload(op).name(), _KEYS[device]):
        return ""
    others = [name for name, key in _KEYS.items() if name != device and known(overload(op).name(), key)]
    elsewhere = f"; it has one for {others[0].upper()}" if others else ""
    return f"no kernel for {device.upper()} in this build of torch{elsewhere}"


def decomposes_first(op: torch._ops.OpOverload, device: str = "cpu") -> bool:
    """Whether autograd runs the op as the ops that it is made of, so that a tensor subclass never sees it.

    It does where its autograd kernel is the implicit composite one: in inference mode DTensor sees the op all the same.
    """
    table = torch._C._dispatch_dump_table(op.name()).splitlines()
    return any(line.startswith(f"Autograd{_KEYS[device]}:") and "[math kernel]" in line for line in table)


FAMILIES = ("foreach", "fused", "prims", "out=", "backward", "in place", "views", "forward")
"""Kinds of overloads; an overload belongs to the first that fits."""


@dataclass(frozen=True, slots=True)
class RegisteredOverload:
    """One overload, the registry that has its rule, and why this device cannot run it (empty if it can)."""

    op: str
    source: str
    cannot: str = ""

    @property
    def family(self) -> str:
        return family(self.op)


def all_registered_overloads(device: str = "cpu") -> list[RegisteredOverload]:
    """Every registered overload in the order of the names.  Nothing is run."""
    named = sorted((str(op), dtensor.registry_of(op)) for op in dtensor.registered_overloads())
    return [RegisteredOverload(name, registry, missing_kernel_reason(name, device)) for name, registry in named]


def family(op: str) -> str:
    """The kind of overload, by its namespace, its name and its schema."""
    namespace, packet, _ = op.split(".")
    if "foreach_" in packet:
        return "foreach"
    if packet.startswith("_fused_"):
        return "fused"
    if namespace != "aten":
        return namespace
    schema = overload(op)._schema
    if any(a.is_out for a in schema.arguments):
        return "out="
    if "backward" in packet:
        return "backward"
    if schema.is_mutable:
        return "in place"
    views = any(r.alias_info is not None for r in schema.returns)
    return "views" if views else "forward"

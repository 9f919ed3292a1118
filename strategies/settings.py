"""What a validation is asked to do, as one frozen value, and the refusals of what it cannot do."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from localtensor.errors import LocalTensorError, refusal
from strategies.samples import DTYPES

CALL = "localtensor validate"
DEFAULT_DTYPES = ("float64", "int64", "bool", "complex64")
"""float64 and not float32: what differs there differs by rounding, and a wrong rule is off by far more."""


class BadSetting(LocalTensorError):
    """A setting that cannot be used."""

    def __init__(self, option: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(refusal(CALL, option, str(value), problem, remedy))


class UnknownOp(LocalTensorError):
    """A name that no OpInfo and no overload bears."""

    def __init__(self, name: str, known: Collection[str]) -> None:
        near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
        remedy = f"Did you mean {' or '.join(near)}?" if near else "`localtensor validate --all` tries every op."
        super().__init__(refusal(CALL, "OP", repr(name), "no op and no overload has this name", remedy))


@dataclass(frozen=True, slots=True)
class Settings:
    """`patterns` are names or globs of ops; `everything` stands for --all.  Raises `BadSetting`."""

    patterns: tuple[str, ...] = ()
    everything: bool = False
    search: bool = False
    ranks: tuple[int, ...] = (2, 3, 4)
    dtypes: tuple[str, ...] = DEFAULT_DTYPES
    device: str = "cpu"
    rules: str = "dtensor"
    confirm: str = "gloo"
    seed: int = 0
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    folder: str = field(default_factory=os.getcwd)

    def __post_init__(self) -> None:
        if not self.patterns and not self.everything and self.rules == "dtensor":
            raise BadSetting("OP", "nothing named", "there is nothing to try", "Name an op, or pass --all.")
        if self.patterns and self.everything:
            raise BadSetting("--all", " ".join(self.patterns), "ops are named as well", "Drop --all or the names.")
        for ranks in self.ranks:
            if ranks < 2:
                raise BadSetting(
                    "--ranks", ranks, "a rule needs at least 2 ranks to be wrong", "Pass --ranks 2 or more."
                )
            if ranks > 64:
                raise BadSetting(
                    "--ranks", ranks, "that many real processes would not fit one machine", "Pass at most 64."
                )
        for name in self.dtypes:
            if name not in DTYPES:
                raise BadSetting(
                    "--dtype", name, "this dtype is not among those tried", f"Choose of {', '.join(DTYPES)}."
                )
        if self.confirm not in ("gloo", "nccl", "none"):
            raise BadSetting("--confirm", self.confirm, "no such way to confirm", "Choose gloo, nccl or none.")
        if self.workers < 1:
            raise BadSetting("--workers", self.workers, "somebody must do the work", "Pass --workers 1 or more.")
        if not 0 <= self.seed < 2**63:
            raise BadSetting("--seed", self.seed, "torch's generators do not take it", "Pass 0 to 2**63 - 1.")
        _check_device(self)


def _check_device(settings: Settings) -> None:
    if settings.device not in ("cpu", "cuda"):
        raise BadSetting("--device", settings.device, "unknown device", "Choose cpu or cuda.")
    gpus = torch.cuda.device_count() if settings.device == "cuda" or settings.confirm == "nccl" else 0
    if settings.device == "cuda" and not gpus:
        raise BadSetting(
            "--device", "cuda", "torch sees no CUDA device here", "Run on a machine with a GPU, or pass --device cpu."
        )
    if settings.confirm == "nccl" and gpus < max(settings.ranks):
        need = f"nccl needs {max(settings.ranks)} GPUs for {max(settings.ranks)} ranks, here are {gpus}"
        raise BadSetting("--confirm", "nccl", need, "Pass --confirm gloo, or fewer --ranks.")

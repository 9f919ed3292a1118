"""What a rank has in use while a step runs: every storage that one of its ops has seen and that is still alive."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class InUse(TorchDispatchMode):
    """While inside, the bytes of this thread's storages are added up after each op; `peak` is the most there were.

    What an op makes and frees within itself is not seen; nor is what other ranks have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                ref = StorageWeakRef(storage)
                self._alive[ref.cdata] = (ref, storage.nbytes())
        self._alive = {at: pair for at, pair in self._alive.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return out

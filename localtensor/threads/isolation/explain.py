"""What ranks of one run share: the text of `localtensor run --explain-isolation`, and writes that all ranks see."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from localtensor.threads.isolation import modules
from localtensor.threads.isolation.modules import World
from localtensor.threads.isolation.namespaces import Namespace
from localtensor.threads.isolation.reach import PatchedNamespaces

_TORCH = str(Path(torch.__file__).parent) + "/"
_STILL_SHARED = (
    "the state of C extensions and of objects that C keeps (queues, locks, open files)",
    "locale.setlocale, atexit.register, codecs.register, resource limits",
    "signal handlers: a rank is not the main thread, so Python refuses signal.signal",
    "what torch registers by name: operators, pytrees, backends",
)


class Overlooked:
    """The functions of torch that no cell tracks, as they were when the run began."""

    def __init__(self, tracks: Callable[[object], bool], of_torch: PatchedNamespaces) -> None:
        self._tracks, self._of_torch = tracks, of_torch
        of_torch.now()

    def writes(self) -> list[str]:
        """The functions that code outside of torch has replaced since, each with the line of the new one."""
        cells = [cell for cell in self._of_torch.changed() if not self._tracks(cell.owner)]
        return [text for cell in cells for text in _replaced(cell)]


def _replaced(cell: Namespace) -> Iterable[str]:
    owner = cell.owner
    where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    for name, value in cell.changes().items():
        code: Any = getattr(getattr(value, "__func__", value), "__code__", None)
        if isinstance(code, CodeType) and not code.co_filename.startswith((_TORCH, "<")):
            yield f"{where}.{name} is now {value.__qualname__} ({code.co_filename}:{code.co_firstlineno}), on all ranks"


def explanation(worlds: Iterable[World]) -> list[str]:
    """What each rank has for itself, and what stays shared and why, a line each."""
    own: dict[str, int] = {}
    for world in worlds:
        for name in world.modules:
            if name != "__main__" and isinstance(world.modules[name], type(sys)):
                own.setdefault(name.partition(".")[0], 0)
                own[name.partition(".")[0]] += 1
    roots = sorted({name.partition(".")[0] for name in dict.keys(sys.modules)})
    seen, by_reason = modules.SHARED.seen(), dict[str, list[str]]()
    for root in roots:
        reason = modules.SHARED.reason(root)
        if reason and root not in seen:
            by_reason.setdefault(reason, []).append(root)
    lines = [f"each rank's own: {', '.join(sorted(own)) or 'no modules but the script'}"]
    for reason, names in sorted(by_reason.items()):
        lines.append(f"shared ({reason}): {', '.join(names) if len(names) < 20 else f'{len(names)} modules'}")
    lines += [f"shared: {root}: {why}" for root, why in sorted(seen.items())]
    return [*lines, *(f"shared: {what}" for what in _STILL_SHARED)]

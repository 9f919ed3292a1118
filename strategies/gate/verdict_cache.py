"""Verdicts of equal runs, kept in a folder: JSON that is read as data, by a name made of all that an answer depends on.

That is the overload and the content of its rule, of what the rule calls and of the op; torch, Python, the processor,
this tool and all that is installed, by their versions or their content; and what was asked.  Of a rule that reads files
or the environment no verdict is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

import localtensor
from strategies.base.atomic_files import write_whole
from strategies.base.journal import Line, of_kind
from strategies.model.settings import Settings

FORMAT = 1
MOST = 4096
"""Files that a folder may hold; beyond, the older half goes."""
Digest = Callable[[str], str | None]
"""A name for the content of an overload's rule and of its op, the same in any process; None if it cannot be known."""


def judge() -> str:
    """A name for all that judges: torch, Python, the processor, the versions of what is installed, and the content of
    this tool; "" if it is unknown."""
    folders = [Path(localtensor.__file__).parent, Path(__file__).parents[1]]
    sources = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    if not {"site-packages", "dist-packages"} & set(Path(torch.__file__).parts):
        return ""  # a torch that may change and keep its version
    own = _hashed(sources)
    kernels = torch.backends.cpu.get_cpu_capability()
    others = sorted({found.read_text("METADATA") or found.read_text("PKG-INFO") or "" for found in distributions()})
    return _hex([torch.__version__, torch.version.git_version, platform.python_version(), platform.machine(), kernels,
                 others, own])  # fmt: skip


def _hashed(paths: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def _hex(told: Any) -> str:
    return hashlib.sha256(json.dumps(told, separators=(",", ":")).encode()).hexdigest()[:40]


@dataclass(frozen=True, slots=True)
class VerdictCache:
    """What is known in `folder` about the question that `settings` ask.

    `tool` is a name for all that judges.  `beside` are the overloads of torch's own that a rules module registers: their
    samples are drawn together.
    """

    folder: Path
    settings: Settings
    digest: Digest
    tool: str
    beside: tuple[str, ...] = ()

    def lines(self, op: str) -> list[Line] | None:
        """The lines of a journal that an equal run wrote about this overload; None if there was none."""
        found = self._read(self._name(op))
        return found if isinstance(found, list) else None

    def ops(self) -> list[str] | None:
        """The overloads that these patterns reached; None if no equal run is known."""
        found = self._read(self._name(""))
        return found if isinstance(found, list) else None

    def keep(self, begin: Line, lines: Sequence[Line], whole: Collection[str]) -> str:
        """Keep what was said of each overload that was tried to the end, `whole`.  Why it could not be kept, or ""."""
        try:
            if not (self.folder / ".gitignore").exists():
                write_whole(self.folder / ".gitignore", "*\n")
            for op, own in by_overload(lines, whole).items():
                self._write(self._name(op), own)
            if self.settings.rules == "dtensor":
                self._write(self._name(""), begin["ops"])
            self._prune()
        except OSError as error:
            return f"{self.folder} cannot be written ({error.strerror}): verdicts are not kept"
        return ""

    def _name(self, op: str) -> str:
        """The name of the file of this overload, or of the question itself; "" where no sound one can be made."""
        asked: dict[str, Any] = {k: v for k, v in self.settings.asked().items() if k not in ("shard", "only")}
        if self.settings.rules != "dtensor":
            asked |= {"beside": list(self.beside)} if op.startswith("aten.") else {}
            asked["patterns"] = []
        content = self.digest(op) if op else "ops"
        if not content or not self.tool:
            return ""
        return _hex([FORMAT, self.tool, sorted(asked.items()), op, content])

    def _read(self, name: str) -> Any:
        if not name:
            return None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # then it is as if absent
            told = json.loads((self.folder / f"{name}.json").read_bytes())
            if told["format"] == FORMAT and told["name"] == name and told["sum"] == _hex(told["said"]):
                return told["said"]
        return None

    def _write(self, name: str, said: Any) -> None:
        if name:
            body = {"format": FORMAT, "name": name, "sum": _hex(said), "said": said}
            write_whole(self.folder / f"{name}.json", json.dumps(body, separators=(",", ":")) + "\n")

    def _prune(self) -> None:
        kept = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in kept[: len(kept) - MOST // 2] if len(kept) > MOST else ():
            path.unlink(missing_ok=True)


def by_overload(lines: Sequence[Line], whole: Collection[str]) -> dict[str, list[Line]]:
    """The lines about each of these overloads; none about one of which a verdict hangs on another's."""
    made: dict[str, list[Line]] = defaultdict(list)
    home: dict[str, str] = {}
    for line in of_kind(lines, "unit"):
        op = line["unit"].split(" ")[0]
        made[op].append({k: v for k, v in line.items() if k != "run"})
        home |= dict.fromkeys([*line.get("suspects", ()), *line.get("whole", ())], op)
    tied = set()
    for line in of_kind(lines, "settled"):
        op = home.get(line["rule"], "")
        made[op].append({k: v for k, v in line.items() if k != "run"})
        if line.get("same_as") and home.get(line["same_as"]) != op:
            tied.add(op)
    return {op: own for op, own in sorted(made.items()) if op in whole and op not in tied}


def remembered(cache: VerdictCache, ops: Iterable[str]) -> Mapping[str, list[Line]]:
    """Of each of these overloads that is known, its lines."""
    found = ((op, cache.lines(op)) for op in ops)
    return {op: lines for op, lines in found if lines is not None}

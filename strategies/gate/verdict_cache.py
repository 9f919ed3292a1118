"""A cache of verdicts in a folder: JSON files, each named by a digest of all that the verdict depends on.

That is the overload and the content of its rule, of what the rule calls and of the op; torch, Python, the processor,
this tool and all installed packages, by their versions or their content; and the settings.  A rule that reads files or
the environment is not cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

import localtensor
from strategies.base.atomic_files import read_bytes, write_whole
from strategies.base.foreign_text import misfit, read_json
from strategies.base.journal import FOREIGN_LINE_ERRORS, Line, line_problem, lines_of_kind
from strategies.model.settings import Settings
from strategies.validation.finding import read_outcome, read_task

FORMAT = 1
MOST = 4096
"""Files that a folder may hold; beyond, the older half is deleted."""


def tool_digest() -> str:
    """A digest of torch, Python, the processor, the installed packages and this tool; "" if it is unknown."""
    folders = [Path(localtensor.__file__).parent, Path(__file__).parents[1]]
    sources = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    if not {"site-packages", "dist-packages"} & set(Path(torch.__file__).parts):
        return ""  # an editable torch may change and keep its version
    own = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in sources)).hexdigest()
    kernels = torch.backends.cpu.get_cpu_capability()
    others = sorted({found.read_text("METADATA") or found.read_text("PKG-INFO") or "" for found in distributions()})
    return _hex([torch.__version__, torch.version.git_version, platform.python_version(), platform.machine(), kernels,
                 others, own])  # fmt: skip


def _hex(value: object) -> str:
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:40]


@dataclass(frozen=True, slots=True)
class VerdictCache:
    """The cached verdicts in `folder` for runs with these settings.

    `digest` gives a digest of an overload's rule and of its op, the same in any process; None if it cannot be known.
    `tool` is the digest that `tool_digest` gives.  `beside` are the overloads of torch's own that a rules module
    registers: their samples are drawn together.
    """

    folder: Path
    settings: Settings
    digest: Callable[[str], str | None]
    tool: str
    beside: tuple[str, ...] = ()

    def lines(self, op: str) -> list[Line] | None:
        """The journal lines of an equal run about this overload; None if there was none."""
        found = self._read(self._name(op))
        return found if found is not None and _are_readable(found) else None

    def ops(self) -> list[str] | None:
        """The overloads that these patterns select; None if no equal run is known."""
        found = self._read(self._name(""))
        return found if found is not None and not misfit(found, [str]) else None

    def keep(self, begin: Line, lines: Sequence[Line], whole: Collection[str]) -> str:
        """Write the verdicts on each overload that was tested completely (`whole`).  Why it failed, or ""."""
        try:
            if not (self.folder / ".gitignore").exists():
                write_whole(self.folder / ".gitignore", "*\n")
            for op, own in lines_by_overload(lines, whole).items():
                self._write(self._name(op), own)
            if self.settings.rules == "dtensor":
                self._write(self._name(""), begin["ops"])
            kept = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in kept[: len(kept) - MOST // 2] if len(kept) > MOST else ():
                path.unlink(missing_ok=True)
        except OSError as error:
            return f"{self.folder} cannot be written ({error.strerror}): verdicts are not kept"
        return ""

    def _name(self, op: str) -> str:
        """The name of this overload's file, or for "" of the list of overloads; "" where the content is unknown."""
        settings: dict[str, Any] = {k: v for k, v in self.settings.asked().items() if k not in ("shard", "only")}
        if self.settings.rules != "dtensor":
            settings |= {"beside": list(self.beside)} if op.startswith("aten.") else {}
            settings["patterns"] = []
        content = self.digest(op) if op else "ops"
        if not content or not self.tool:
            return ""
        return _hex([FORMAT, self.tool, sorted(settings.items()), op, content])

    def _read(self, name: str) -> list[Any] | None:
        if not name:
            return None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # then it is as if absent
            body = read_json(read_bytes(self.folder / f"{name}.json"))
            value = body["value"]
            if body["format"] == FORMAT and body["name"] == name and body["sum"] == _hex(value):
                return value if isinstance(value, list) else None
        return None

    def _write(self, name: str, value: list[Any]) -> None:
        if name:
            body = {"format": FORMAT, "name": name, "sum": _hex(value), "value": value}
            write_whole(self.folder / f"{name}.json", json.dumps(body, separators=(",", ":")) + "\n")


def _are_readable(lines: Sequence[Line]) -> bool:
    """Whether these are lines of a journal: the digest in the file shows only that it was not cut."""
    try:
        for line in lines:
            if line_problem(line):
                return False
            if line["kind"] == "unit":
                read_task(line)
            elif line["kind"] == "settled":
                read_outcome(line)
    except FOREIGN_LINE_ERRORS:
        return False
    return True


def lines_by_overload(lines: Sequence[Line], whole: Collection[str]) -> dict[str, list[Line]]:
    """The lines about each of these overloads, except for those with a verdict that depends on another overload."""
    made: dict[str, list[Line]] = defaultdict(list)
    home: dict[str, str] = {}
    for line in lines_of_kind(lines, "unit"):
        op = line["unit"].split(" ")[0]
        made[op].append({k: v for k, v in line.items() if k != "run"})
        home |= dict.fromkeys([*line.get("suspects", ()), *line.get("whole", ())], op)
    tied = set()
    for line in lines_of_kind(lines, "settled"):
        op = home.get(line["rule"], "")
        made[op].append({k: v for k, v in line.items() if k != "run"})
        if line.get("same_as") and home.get(line["same_as"]) != op:
            tied.add(op)
    return {op: own for op, own in sorted(made.items()) if op in whole and op not in tied}

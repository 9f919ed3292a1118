"""From which files of a project the rules at hand are reached."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from strategies.gate.changes.project import Project
from strategies.gate.changes.registrations import Written


def starts_of(
    project: Project, module: str | None, written: Mapping[str, Sequence[tuple[str, Written]]]
) -> list[str]:  # fmt: skip
    """The file of the rules module, and those of the rule functions, as paths within the project, sorted."""
    files = {path for many in written.values() for path, _ in many}
    if module is not None:
        files.add(project.path_of(getattr(sys.modules.get(module), "__file__", None)))
    return sorted(files - {""})

"""A package of rules as a user would write it, in a repository of its own, and a way to edit it."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from strategies.torch_api import user_modules
from tests.strategies import users

PACKAGE = {
    "{p}/__init__.py": "",
    "{p}/tables.py": """
DIMS = (0, 1)
LIMITS = {"scale": 2, "shift": 3}
UNUSED = 5
""",
    "{p}/util.py": """
from {p}.tables import DIMS, LIMITS
from torch.distributed.tensor import Replicate, Shard


def rows(x, dim):
    placements = [Shard(dim)]
    return (placements, placements)


def helper(x):
    return [rows(x, dim) for dim in DIMS if dim < x.ndim]


def limit(x):
    return helper(x)[: LIMITS["shift"]]


def unused(x):
    return rows(x, 7)
""",
    "{p}/ops.py": """
import torch


def factor():
    return 2


@torch.library.custom_op("{p}::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * factor()


@scale.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("{p}::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@shift.register_fake
def _(x):
    return torch.empty_like(x)
""",
    "{p}/rules.py": """
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding

from {p} import ops, util
from {p}.util import helper


@register_sharding(torch.ops.{p}.scale.default)
def scale_rule(x):
    \"\"\"How scale is sharded.\"\"\"
    whole = ([Replicate()], [Replicate()])
    return [whole, *helper(x)]


def shift_rule(x):
    return [([Replicate()], [Replicate()]), *util.limit(x)]


register_sharding(torch.ops.{p}.shift.default)(shift_rule)
""",
}
numbers = itertools.count()


def git(folder: Path, *command: str, given: str = "") -> str:
    """What git says; the user's own configuration is left out."""
    names = {f"GIT_{who}_{what}": "t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    clean = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", *command],
        cwd=folder,
        env={**os.environ, **names, **clean},
        capture_output=True,
        text=True,
        check=True,
        input=given,
    )
    return done.stdout.strip()


def write(folder: Path, name: str, files: Mapping[str, str]) -> None:
    """Files of this package; `{p}` is its name, in paths and in texts."""
    for path, text in files.items():
        target = folder / path.replace("{p}", name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace("{p}", name))


def commit(folder: Path) -> str:
    """All that is there becomes a commit; its name."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "one")
    return git(folder, "rev-parse", "HEAD")


def _import(folder: Path, files: Mapping[str, str]) -> None:
    """The same, in one process: the files are not in the index, which makes no difference to us."""
    head = (folder / ".git/HEAD").read_text().removeprefix("ref: ").strip()
    blobs = "".join(f"M 100644 inline {path}\ndata {len(text.encode())}\n{text}\n" for path, text in files.items())
    given = f"commit {head}\ncommitter t <t> 0 +0000\ndata 0\n{blobs}"
    git(folder, "fast-import", "--quiet", given=given)


def edited(files: Mapping[str, str], edits: Mapping[str, object]) -> dict[str, str | None]:
    """The files after edits: a text, or a list of (old, new) in turn; None removes the file."""
    after: dict[str, str | None] = dict(files)
    for path, edit in edits.items():
        if isinstance(edit, list):
            text = files[path]
            for old, new in edit:
                assert old in text, f"{old!r} is not in {path}"
                text = text.replace(old, new)
            after[path] = text
        else:
            after[path] = edit if edit is None else str(edit)
    return after


@contextlib.contextmanager
def two_versions(folder: Path, files: Mapping[str, str], edits: Mapping[str, object]) -> Iterator[str]:
    """A repository whose only commit is `files`, and whose work tree is edited; the name of its package, whose module
    `rules` is imported as it is after the edits."""
    name = f"edits{next(numbers)}"
    git(folder, "init", "-q", "--template=")
    write(folder, name, files)
    _import(folder, {path.replace("{p}", name): text.replace("{p}", name) for path, text in files.items()})
    for path, text in edited(files, edits).items():
        if text is None:
            (folder / path.replace("{p}", name)).unlink()
        else:
            write(folder, name, {path: text})
    with users.undone():
        user_modules.load_rules(f"{name}.rules", str(folder))
        yield name

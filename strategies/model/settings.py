"""The settings of a validation as one immutable value, and their checks, which do without torch: a usage error is quick."""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localtensor.errors import Refusal

if TYPE_CHECKING:
    import torch

CALL = "localtensor validate"
NO_MODULE = "there is no such module"
DTYPES = (
    "float64", "float32", "int64", "bool", "complex64", "bfloat16", "float16", "int32", "int8", "uint8",
)  # fmt: skip
"""Dtypes of samples, by torch's names, which `--dtype` takes and its help lists.

`strategies.inputs.variants.undrawn.FURTHER_DTYPES` has those to which a sweep casts a few samples unasked.
"""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of one of the names of `DTYPES`."""
    import torch  # lazy: usage errors do without it

    found: torch.dtype = getattr(torch, name)
    return found


DEFAULT_DTYPES = ("float64", "int64", "bool", "complex64")
"""float64, not float32: rounding errors are far smaller than the error of a wrong rule."""


class BadSetting(Refusal):
    """An invalid setting."""

    def __init__(self, option: str, value: object, problem: str, remedy: str, call: str = CALL) -> None:
        super().__init__(call, option, str(value), problem, remedy)


class UnknownOp(Refusal):
    """A name that matches no OpInfo and no overload; with a rules `module`, none of the `ops` that it registers."""

    def __init__(self, name: str, known: Collection[str], module: str = "", ops: Sequence[str] = ()) -> None:
        near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
        problem, remedy = "no op and no overload has this name", "`localtensor validate --all` tries every op."
        if module:
            problem = f"{module} registers no rule of an op of this name"
            remedy = f"It registers rules of {', '.join(sorted(ops)[:3])}{' ...' if len(ops) > 3 else ''}."
        remedy = f"Did you mean {' or '.join(near)}?" if near else remedy
        super().__init__(CALL, "OP", repr(name), problem, remedy)
        self.name, self.known = name, known


class BadSource(Refusal, call=CALL, argument="--source"):
    """A source that is not known, whose package is not installed, or whose package this version cannot read."""


SOURCE_GROUP = "localtensor.sources"
"""The group of entry points under which installed packages offer sources; each names a class without arguments."""
BUILT_IN_SOURCES = {
    "dtensor": "strategies.validation.sources.dtensor:DTensorSource",
    "local_map": "strategies.validation.sources.local_map:LocalMaps",
    "spmd_types": "strategies.validation.sources.spmd_types.source:SpmdTypes",
}


def source_names() -> tuple[str, ...]:
    """The name of every source, our own first."""
    return tuple(dict.fromkeys([*BUILT_IN_SOURCES, *(one.name for one in metadata.entry_points(group=SOURCE_GROUP))]))


def check_source(name: str) -> None:
    """Raises `BadSource` for a name that no source has, without importing one."""
    if name in BUILT_IN_SOURCES or name in (known := source_names()):
        return
    near = difflib.get_close_matches(name, known, n=1)
    remedy = (
        f"Did you mean {near[0]}?" if near else f"Choose of {', '.join(known)}, or install the package that offers it."
    )
    raise BadSource(repr(name), "no source has this name", remedy)


class BadRules(Refusal, call="localtensor validate", argument="--rules"):
    """A rules module that is not there, cannot be imported, or registers nothing."""


def rules_module(rules: str, folder: str) -> tuple[str, str]:
    """The module that `--rules` names, and the folder from which it is imported: that of a file, else `folder`.

    A file of a package is imported as a module of it.  Raises `BadRules` if there is no such file, or if the text is
    neither a file nor the name of a module.

    >>> rules_module("my_package.my_rules", "/home")
    ('my_package.my_rules', '/home')
    """
    if not rules.endswith(".py"):
        if not all(rules.split(".")) or set(rules) & set("/\\: "):
            remedy = "Write it as after `import`: my_package.my_rules, or name the file: my_rules.py."
            raise BadRules(rules or "''", "this is no name of a module", remedy)
        return rules, folder
    file = Path(folder, rules)
    if not file.is_file():
        raise BadRules(rules, "there is no such file", f"Name a file that registers rules (from {folder}).")
    if not file.stem.isidentifier():
        name = "".join(sign if sign.isalnum() else "_" for sign in file.stem)
        raise BadRules(rules, "`import` takes no file of this name", f"Rename it, to {name}.py for instance.")
    parts, home = [file.stem], file.parent
    while (home / "__init__.py").is_file() and home.name:
        parts, home = [home.name, *parts], home.parent
    return ".".join(parts), str(home)


def check_rules(rules: str, folder: str) -> None:
    """Check without an import that the module of `--rules` is there.  Raises `BadRules`."""
    if rules == "dtensor":
        return
    module, home = rules_module(rules, folder)
    before = list(sys.path)
    sys.path.insert(0, home)
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # of a module in `sys.modules` without a spec, as `__main__`
        return
    finally:
        sys.path[:] = before
    if found is None:
        raise BadRules(rules, NO_MODULE, f"Run from the folder that holds it (now {folder}).")


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
    meshes: tuple[tuple[int, ...], ...] = ()
    """Meshes of several axes to test beside the one-axis meshes of `ranks`."""
    pairs: bool = False
    """Whether each op is also tested with a follower: a second op, its gradient, a prior call of the same op."""
    journal: Path | None = None
    resume: bool = False
    shard: tuple[int, int] | None = None
    """(i, n): shard i of n, counted from 1."""
    executor: str = ""
    source: str = "dtensor"
    """The name of the source whose claims are tested; with another one `rules` is a module with hooks of its kind."""
    only: tuple[str, ...] = ()
    """The overloads to test among those that a rules module registers; empty for all of them."""
    case: str = ""
    """One finding to confirm again, as `strategies.validation.finding.case_text` writes it, in place of a sweep."""
    until: float = 0.0
    """Seconds since the epoch after which no overload is started; 0 for no limit."""

    def __post_init__(self) -> None:
        _check_what(self)
        for ranks in self.ranks:
            if ranks < 2:
                problem = "a rule needs at least 2 ranks to be wrong"
                raise BadSetting("--ranks", ranks, problem, "Pass --ranks 2 or more.")
            if ranks > 64:
                problem = "that many real processes would not fit one machine"
                raise BadSetting("--ranks", ranks, problem, "Pass at most 64.")
        for name in self.dtypes:
            if name not in DTYPES:
                remedy = f"Choose of {', '.join(DTYPES)}."
                raise BadSetting("--dtype", name, "this dtype is not among those tried", remedy)
        if self.confirm not in ("gloo", "nccl", "none"):
            raise BadSetting("--confirm", self.confirm, "no such way to confirm", "Choose gloo, nccl or none.")
        if self.workers < 1:
            problem = "a validation needs at least one worker"
            raise BadSetting("--workers", self.workers, problem, "Pass --workers 1 or more.")
        if not 0 <= self.seed < 2**63:
            raise BadSetting("--seed", self.seed, "torch's generators do not take it", "Pass 0 to 2**63 - 1.")
        _check_meshes(self.meshes)
        _check_journal(self)
        _check_device(self)

    def kinds_and_meshes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Each kind of test with its mesh."""
        from strategies.model.verdict import ALONE, MESHES, PAIRS  # lazy: it imports torch

        axes = [(ALONE, (ranks,)) for ranks in self.ranks]
        pairs = [(PAIRS, (self.ranks[0],))] if self.pairs else []
        return (*axes, *pairs, *((MESHES, mesh) for mesh in self.meshes))

    def asked(self) -> dict[str, Any]:
        """The settings that determine the verdicts, as JSON: two runs with equal options have equal verdicts."""
        import torch

        return {
            "torch": torch.__version__.split("+")[0], "seed": self.seed, "patterns": list(self.patterns),
            "everything": self.everything, "search": self.search, "ranks": list(self.ranks),
            "meshes": [list(mesh) for mesh in self.meshes], "pairs": self.pairs, "dtypes": list(self.dtypes),
            "device": self.device, "rules": self.rules, "confirm": self.confirm,
            "shard": list(self.shard) if self.shard else None,
        } | ({"source": self.source} if self.source != "dtensor" else {}) | ({"only": list(self.only)} if self.only else {}) | ({"case": self.case} if self.case else {})  # fmt: skip

    def mine(self, ops: Iterable[str]) -> list[str]:
        """The overloads of this shard."""
        from strategies.model.verdict import share  # lazy: it imports torch

        if self.shard is None:
            return list(ops)
        number, count = self.shard
        return [op for op in ops if share(op, count) == number - 1]


def _check_what(settings: Settings) -> None:
    if settings.case and (settings.patterns or settings.everything or settings.resume or settings.shard):
        remedy = "Drop OP, --all, --resume and --shard."
        raise BadSetting("--case", settings.case[:24], "it names all that is run", remedy)
    if settings.source != "dtensor":
        _check_source(settings)
    elif not settings.patterns and not settings.everything and settings.rules == "dtensor" and not settings.case:
        raise BadSetting("OP", "nothing named", "there is nothing to try", "Name an op, or pass --all or --rules.")
    if settings.patterns and settings.everything:
        raise BadSetting("--all", " ".join(settings.patterns), "ops are named as well", "Drop --all or the names.")


def _check_source(settings: Settings) -> None:
    """Refuse what only DTensor's rules have."""
    given = {"--search": settings.search, "--pairs": settings.pairs, "--case": bool(settings.case)}
    given |= {"--device": settings.device != "cpu", "--confirm": settings.confirm == "nccl"}
    given |= {"--mesh": bool(settings.meshes)}
    for option, present in given.items():
        if present:
            problem = f"it does not go with --source {settings.source}"
            raise BadSetting(option, "given", problem, "It is for DTensor's rules: drop one of the two.")


def _check_meshes(meshes: tuple[tuple[int, ...], ...]) -> None:
    for mesh in meshes:
        shown = ",".join(map(str, mesh))
        if len(mesh) < 2 or min(mesh) < 1:
            raise BadSetting("--mesh", shown, "this is no mesh of several axes", "Write --mesh 2,2 or --mesh 2,2,2.")
        if not 2 <= math.prod(mesh) <= 64:
            raise BadSetting("--mesh", shown, f"it has {math.prod(mesh)} ranks", "Take a mesh of 2 to 64 ranks.")


def _check_journal(settings: Settings) -> None:
    if settings.resume and settings.journal is None:
        raise BadSetting("--resume", "given", "there is no journal to go on with", "Name it: --journal FILE.")
    if settings.shard is not None:
        number, count = settings.shard
        shown = f"{number}/{count}"
        if count < 1 or not 1 <= number <= count:
            raise BadSetting("--shard", shown, "there is no such shard", "Write --shard 1/4 to --shard 4/4.")
        if settings.journal is None:
            problem = "without a journal it cannot be merged with the others"
            raise BadSetting("--shard", shown, problem, "Name a journal: --journal FILE.")


def _check_device(settings: Settings) -> None:
    if settings.device not in ("cpu", "cuda"):
        raise BadSetting("--device", settings.device, "unknown device", "Choose cpu or cuda.")
    if settings.device == "cpu" and settings.confirm != "nccl":
        return
    import torch

    gpus = torch.cuda.device_count()
    if settings.device == "cuda" and not gpus:
        remedy = "Run on a machine with a GPU, or pass --device cpu."
        raise BadSetting("--device", "cuda", "torch sees no CUDA device here", remedy)
    if settings.confirm == "nccl" and gpus < max(settings.ranks):
        need = f"nccl needs {max(settings.ranks)} GPUs for {max(settings.ranks)} ranks, here are {gpus}"
        raise BadSetting("--confirm", "nccl", need, "Pass --confirm gloo, or fewer --ranks.")


def meshes(ranks: Sequence[int], given: Sequence[str]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The sizes of one-axis meshes, and the meshes of several axes, from `--ranks` and `--mesh`; default 2, 3 and 4 ranks.

    >>> meshes([], ["2", "2,2"])
    ((2,), ((2, 2),))
    """
    read = [tuple(_number(size, text) for size in text.split(",")) for text in given]
    axes = [*ranks, *(mesh[0] for mesh in read if len(mesh) == 1)]
    several = tuple(dict.fromkeys(mesh for mesh in read if len(mesh) > 1))
    return tuple(dict.fromkeys(axes or (2, 3, 4))), several


def _number(text: str, whole: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadSetting("--mesh", whole, "this is no mesh", "Write the size of each axis: --mesh 2,2.") from None


def shard(text: str) -> tuple[int, int] | None:
    """`1/4` as (1, 4); None for an empty text.  Raises `BadSetting`."""
    if not text:
        return None
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and len(text) < 99):  # int() raises for 4,301 digits
        raise BadSetting("--shard", text, "this is no shard", "Write --shard 1/4 for the first of four.")
    return int(number), int(count)

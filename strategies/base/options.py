"""The options of a command as a frozen dataclass: from the command line, and from `[tool.localtensor]` in pyproject.toml.

[tool.localtensor]
    rules = "my_package.my_rules"      # or a file; used where the command line names nothing to judge
    ranks = [2, 3]
    meshes = ["2,2"]                   # used, as ranks, where the command line has neither --ranks nor --mesh
    dtypes = ["float64", "bfloat16"]
    baseline = "accepted.json"
    budget = "5m"

An option on the command line comes first.  Paths are relative to the file.
"""

from __future__ import annotations

import difflib
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, Signature
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from typer import Context, Option

from localtensor.errors import LocalTensorError, Refusal, refusal_sentence
from strategies.base.atomic_files import read_bytes, why_not_writable
from strategies.base.signals import EXIT_USAGE, print_error, run_command

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NAME, SECTION = "pyproject.toml", "[tool.localtensor]"


class BadSection(Refusal):
    """A section that cannot be used."""

    def __init__(self, call: str, file: Path, key: str, problem: str, remedy: str) -> None:
        super().__init__(call, f"{SECTION} of {_relative(file)}", key, problem, remedy)


@dataclass(frozen=True, slots=True)
class Section:
    """Values by the names of the fields of a command's options; empty without a file."""

    file: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def note(self, fields: Collection[str]) -> str:
        """What a message says of values of these fields that came from the file; "" for none."""
        keys = [key for key, (name, *_) in _KEYS.items() if name in fields]
        return f" ({', '.join(keys)}: from {_relative(self.file)})" if keys and self.file else ""

    def without(self, fields: Collection[str], typed: Collection[str]) -> dict[str, Any]:
        """The values of these fields that a command takes whose command line has the fields `typed`."""
        values = {name: value for name, value in self.values.items() if name in fields and name not in typed}
        if not {"plans", "case"}.isdisjoint(typed):  # these bring all that they need
            return {}
        if not {"ops", "everything", "rules"}.isdisjoint(typed):
            values.pop("rules", None)
        if not {"ranks", "mesh"}.isdisjoint(typed):
            values.pop("ranks", None)
            values.pop("mesh", None)
        return values


def read_section(call: str, folder: Path) -> Section:
    """The section of the nearest file that has one, from the folder up to the top of its git repository.

    Raises `BadSection` for a key or a value that cannot be used.
    """
    for file in _files(folder):
        found = _table(call, file)
        if found is None:
            continue
        values: dict[str, Any] = {}
        for key, value in found.items():
            if key not in _KEYS:
                near = difflib.get_close_matches(key, _KEYS, 1)
                remedy = f"Did you mean {near[0]}?" if near else f"The keys are {', '.join(_KEYS)}."
                raise BadSection(call, file, key, "there is no such key", remedy)
            name, read, example = _KEYS[key]
            values[name] = read(value, file.parent)
            if values[name] is None:
                shown = f"{key} = {value!r}"[:80]
                raise BadSection(call, file, shown, "a value of another form is needed", f"Write {key} = {example}.")
        return Section(file, values)
    return Section()


def _files(folder: Path) -> Iterator[Path]:
    """The files that may have the section, the nearest first.  Without a repository only that of the folder."""
    above = [folder, *folder.parents]
    top = next((number for number, one in enumerate(above) if (one / ".git").exists()), 0)
    return (one / NAME for one in above[: top + 1] if (one / NAME).is_file())


def _table(call: str, file: Path) -> dict[str, Any] | None:
    """The section, or None.  A file that cannot be read is an error only if it seems to have one."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # the same, before Python 3.11

    try:
        data = read_bytes(file)
    except OSError:
        return None
    if b"localtensor" not in data:
        return None
    try:
        body = tomllib.loads(data.decode())
    except ValueError as error:
        raise BadSection(call, file, "the file", f"it is no TOML ({error})", "Fix it first.") from None
    except RecursionError:
        raise BadSection(call, file, "the file", "it is nested too deep", "Fix it first.") from None
    found = body.get("tool", {})
    found = found.get("localtensor") if isinstance(found, dict) else None
    if found is not None and not isinstance(found, dict):
        raise BadSection(call, file, "localtensor", "it is no table", f"Write {SECTION} above its keys.")
    return found


def _text(value: object, home: Path) -> str | None:
    return value if isinstance(value, str) and value else None


def _path(value: object, home: Path) -> Path | None:
    fits = isinstance(value, str) and value and "\0" not in value  # no path has that character
    return Path(_relative(home / str(value))) if fits else None


def _rules(value: object, home: Path) -> str | None:
    """The rules as `--rules` takes them in the working folder: a module that is below another folder is named by its file."""
    if not isinstance(value, str) or not value:
        return None
    if value.endswith(".py"):
        return _relative(home / value)
    file = home.joinpath(*value.split("."))
    for one in (file.with_suffix(".py"), file / "__init__.py"):
        if home != Path.cwd() and one.is_file():
            return _relative(one)
    return value


def _numbers(value: object, home: Path) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not value or not all(type(one) is int for one in value):
        return None
    return tuple(value)


def _texts(value: object, home: Path) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        return None
    return tuple(value)


def _meshes(value: object, home: Path) -> tuple[str, ...] | None:
    """Meshes as `--mesh` takes them: "2,2", or [2, 2]."""
    if not isinstance(value, list) or not value:
        return None
    found = [",".join(map(str, one)) if _numbers(one, home) else one for one in value]
    return _texts(found, home)


def _relative(path: Path) -> str:
    """The path from the working folder, which is what messages show and commands take."""
    return os.path.relpath(path)


_KEYS: dict[str, tuple[str, Callable[[object, Path], Any], str]] = {
    "rules": ("rules", _rules, '"my_package.my_rules"'),
    "ranks": ("ranks", _numbers, "[2, 3]"),
    "meshes": ("mesh", _meshes, '["2,2"]'),
    "dtypes": ("dtypes", _texts, '["float64", "int64"]'),
    "baseline": ("baseline", _path, '"localtensor-baseline.json"'),
    "budget": ("budget", _text, '"5m"'),
}
"""Each key: the field of the options, a function that reads a value (None for one of another form), an example."""


Options = TypeVar("Options")
Seed = Annotated[int, Option("--seed", help="Same seed, same output.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress.")]
Workers = Annotated[
    int | None, Option("--workers", help="Worker processes.  [default: one for each core]", show_default=False)
]


class BadOption(LocalTensorError):
    """An option of a command with an invalid value."""

    def __init__(self, call: str, option: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(refusal_sentence(call, option, str(value), problem, remedy))


def check_writable(call: str, **paths: Path | None) -> None:
    """Checks before the work starts that files can be written; `repro` is a folder. Raises `BadOption`."""
    for name, path in paths.items():
        problem, remedy = why_not_writable(path, folder=name == "repro") if path is not None else ("", "")
        if problem:
            raise BadOption(call, f"--{name}", path, problem, remedy)


def check_folder_exists(call: str, path: Path | None, remedy: str, option: str = "--json") -> None:
    """Checks that the folder of a file exists, which `check_writable` does not require. Raises `BadOption`."""
    if path is not None and not path.absolute().parent.is_dir():
        raise BadOption(call, option, path, "its folder is not there", remedy)


def takes_options(
    more: str = "", *, section: bool = False
) -> Callable[[Callable[[Options], int]], Callable[..., None]]:
    """Turns a function of `options` that returns an exit code into a command that typer can register.

    Its parameters are the fields of the dataclass, each annotated with its `Option` or `Argument`; a field that is a
    tuple may be given several times. Options that the dataclass rejects, or its method `check` if it has one, end the
    command with exit code 2, before anything imports torch. With `section`
    options that are not on the command line come from pyproject.toml. For `more` see `run_command`.
    """

    def typed(function: Callable[[Options], int]) -> Callable[..., None]:
        kind, call = get_type_hints(function)["options"], f"localtensor {function.__name__}"
        several = {name for name, hint in get_type_hints(kind).items() if get_origin(hint) is tuple}

        @functools.wraps(function)
        def command(context: Context, **given: Any) -> None:
            def work() -> int:
                lists = {name: tuple(given[name]) for name in several if given[name]}
                options = {name: value for name, value in given.items() if name not in several} | lists
                note = ""
                try:
                    if section:
                        found = read_section(call, Path.cwd())
                        from_file = found.without(given, [name for name in given if _is_typed(context, name)])
                        note = found.note(from_file)
                        options |= from_file
                    chosen = kind(**options)
                    getattr(chosen, "check", bool)()
                except LocalTensorError as error:  # the settings are also those of validate, and say so
                    print_error(str(error).replace("localtensor validate: ", f"{call}: ", 1) + note)
                    return EXIT_USAGE
                return function(chosen)

            run_command(work, more)

        del command.__wrapped__  # whose parameter is another
        command.__annotations__ = {}
        first = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=Context)
        command.__signature__ = Signature([first, *_parameters(kind)])  # type: ignore[attr-defined]
        return command

    return typed


def _is_typed(context: Context, name: str) -> bool:
    """Whether the parameter is on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameters(kind: type[DataclassInstance]) -> list[Parameter]:
    """The fields of a dataclass as parameters for typer, which supports lists, but no tuples of variable length."""
    hints = get_type_hints(kind, include_extras=True)
    found = []
    for one in fields(kind):
        hint, default = hints[one.name], Parameter.empty if one.default is MISSING else one.default
        value = get_args(hint)[0]
        if get_origin(value) is tuple:
            hint = hint.copy_with((GenericAlias(list, get_args(value)[:1]),))
            default = Parameter.empty if default is Parameter.empty else None
        found.append(Parameter(one.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return found

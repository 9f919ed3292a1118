"""The options of a command as a frozen dataclass, whose fields are the parameters of the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from typer import Context, Option

from localtensor.errors import LocalTensorError, refusal_sentence
from strategies.base.atomic_files import why_not_writable
from strategies.base.project_file import read_section
from strategies.base.signals import EXIT_USAGE, print_error, run_command

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

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


def check_folder_exists(call: str, json: Path | None, remedy: str) -> None:
    """Checks that the folder of a file exists, which `check_writable` does not require. Raises `BadOption`."""
    if json is not None and not json.absolute().parent.is_dir():
        raise BadOption(call, "--json", json, "its folder is not there", remedy)


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
                        more = found.without(given, [name for name in given if _is_typed(context, name)])
                        note = found.note(more)
                        options |= more
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
    for field in fields(kind):
        hint, default = hints[field.name], Parameter.empty if field.default is MISSING else field.default
        value = get_args(hint)[0]
        if get_origin(value) is tuple:
            hint = hint.copy_with((GenericAlias(list, get_args(value)[:1]),))
            default = Parameter.empty if default is Parameter.empty else None
        found.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return found

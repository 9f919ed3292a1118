"""The form of the command line: options in groups, usage errors in one sentence, lists of values after one option."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from strategies.base.signals import EXIT_CLEAN, EXIT_INTERRUPTED, EXIT_USAGE, print_error
from strategies.model.settings import DTYPES

GROUPS = {
    "What to judge": "--all --search --rules --changed --case --pairs --plans --samples --planner --dtype --device --confirm",
    "Meshes": "--ranks --mesh",
    "Baseline": "--baseline --update --accept --expires",
    "Links": "--topology --inner --outer --per-node",
    "Output": "--json --repro --junit --sarif --summary --comment --github --quiet --picture --code --alternatives --dtensor --out",
    "Large runs": "--journal --resume --shard --executor --workers --budget --cache --no-cache",
}
"""The groups of options in a long help, in their order; other options come last."""
OTHERS = "Options"
LONG = 8
"""The least number of options that stand in groups."""
_GROUP_OF = {option: group for group, options in GROUPS.items() for option in options.split()}


class Command(TyperCommand):
    """A command whose help has its options in groups."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # why: typer does not export the class of its usage errors, and all are raised again
            if getattr(error, "ctx", ctx) is None:
                vars(error)["ctx"] = ctx  # the parser of words does not know the command
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        found: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{group: [] for group in GROUPS}, OTHERS: []}
        options = [param for param in self.get_params(ctx) if param.param_type_name == "option"]
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            group = _group(param.opts) if len(options) > LONG else OTHERS
            if record is not None:
                found["Arguments" if param.param_type_name == "argument" else group].append(record)
        for group, records in found.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)


def _group(names: Sequence[str]) -> str:
    return next((_GROUP_OF[name] for name in names if name in _GROUP_OF), OTHERS)


class Commands(TyperGroup):
    """A group of commands. A usage error of any of them is one sentence on standard error, and exit code 2."""

    def main(self, args: Any = None, *, standalone_mode: bool = True, **more: Any) -> Any:  # type: ignore[override]
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **more)
        try:
            code = super().main(args, standalone_mode=False, **more)
        except typer.Abort:
            sys.exit(EXIT_INTERRUPTED)
        except Exception as error:  # why: typer does not export the class of its usage errors
            if not hasattr(error, "format_message"):
                raise
            _refuse(error)
        sys.exit(code if isinstance(code, int) else EXIT_CLEAN)


def _refuse(error: Any) -> NoReturn:
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(EXIT_USAGE)
    names: list[str] = []
    context = getattr(error, "ctx", None)
    while context is not None and context.parent is not None:
        names.insert(0, context.info_name)
        context = context.parent
    command = " ".join(["localtensor", *names])
    print_error(f"{command}: {_problem(error)} `{command} --help` shows what it takes.")
    sys.exit(EXIT_USAGE)


def _problem(error: Any) -> str:
    """What is wrong, in one sentence."""
    known = getattr(error, "possibilities", None)
    if known:  # typer appends a list of them
        near = difflib.get_close_matches(error.option_name, known, 1, 0.0)
        return f"no such option: {error.option_name}. Did you mean {near[0]}?"
    text = error.format_message()
    if isinstance(error.__cause__, ValueError) and hasattr(error.__cause__, "errors"):  # of pydantic, without the value
        first = error.__cause__.errors()[0]
        text = f"invalid value for {error.param.get_error_hint()}: {first['input']!r}: {_lower(first['msg'])}"
    return _lower(text if text.endswith("?") else f"{text.rstrip('.')}.")


def _lower(text: str) -> str:
    """The text as a part of a sentence."""
    return text[:1].lower() + text[1:]


def repeat_options(words: Sequence[str]) -> list[str]:
    """The words with one option for each value: `--ranks 2 3`, `--ranks 2,3` and `--ranks=2,3` become
    `--ranks 2 --ranks 3`, and so does `--dtype`.

    >>> repeat_options(["add", "--ranks", "2", "3", "--dtype", "bool,int64"])
    ['add', '--ranks', '2', '--ranks', '3', '--dtype', 'bool', '--dtype', 'int64']
    """
    made: list[str] = []
    option, first = "", False
    equals = ("--ranks=", "--dtype=")
    for word in (part for given in words for part in (given.split("=", 1) if given.startswith(equals) else [given])):
        if word in ("--ranks", "--dtype"):
            option, first = word, True
            continue
        fits = {"--ranks": word.replace(",", "").isdigit(), "--dtype": set(word.split(",")) <= set(DTYPES)}.get(option)
        if option and (first or fits):
            values = [value for value in word.split(",") if value] or [word]
            made += [part for value in values for part in (option, value)]
            first = False
            continue
        option = ""
        made.append(word)
    return [*made, option] if option and first else made

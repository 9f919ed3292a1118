"""docs/command_line.md: the help of every command of `localtensor`, made of the commands themselves."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from typer.main import get_command

from strategies.cli.app import app

PAGE = Path(__file__).parents[2] / "docs/command_line.md"
HEAD = """\
# The command line

`localtensor COMMAND --help` prints what stands here; `python -m localtensor` is the same command. This page is made of the commands
themselves, by `python -m tests.tools.command_page --write`.
"""
NAME = "localtensor"


def commands() -> Iterator[click.Context]:
    """A context of the program, and of each of its commands, groups before what they hold."""
    yield from _below(click.Context(get_command(app), info_name=NAME))


def _below(context: click.Context) -> Iterator[click.Context]:
    yield context
    listed = getattr(context.command, "commands", {})
    for name, command in listed.items():
        yield from _below(click.Context(command, info_name=name, parent=context))


def section(context: click.Context) -> str:
    """One command: what it does, how it is called, its arguments and options, its examples and exit codes."""
    command = context.command
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    parts = [f"## `{context.command_path}`\n", f"{_prose(command.help or '')}\n", f"```text\n{usage}\n```\n"]
    rows = [record for parameter in command.get_params(context) if (record := parameter.get_help_record(context))]
    if rows:
        parts.append("| | |\n|---|---|\n" + "".join(f"| `{_code(name)}` | {_cell(text)} |\n" for name, text in rows))
    if listed := getattr(command, "commands", {}):
        links = (f"| [`{name}`](#{_anchor(f'{context.command_path} {name}')}) | {_cell(one.get_short_help_str(200))} |\n"
                 for name, one in listed.items())  # fmt: skip
        parts.append("| command | |\n|---|---|\n" + "".join(links))
    if command.epilog:
        parts.append(_epilog(command.epilog))
    return "\n".join(parts)


def _prose(text: str) -> str:
    return " ".join(text.replace("\b", "").split())


def _code(text: str) -> str:
    return _prose(text).replace("|", "\\|")


def _cell(text: str) -> str:
    return _code(text).replace("<", "&lt;").replace("*", "\\*")


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _epilog(text: str) -> str:
    """The examples as they stand, and what follows them as prose."""
    examples, _, rest = text.replace("\b\n", "").partition("\n\n")[2].partition("\n\n")
    parts = [f"```text\n{examples.rstrip()}\n```\n"]
    return "\n".join([*parts, f"{_prose(rest)}\n"] if rest.strip() else parts)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(section, commands())])


def main() -> int:
    """Exit code 1 if the page is not up to date and is not to be written."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.command_page", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Examples:\n  python -m tests.tools.command_page          is the page up to date?\n"
        "  python -m tests.tools.command_page --write  write it\n",
    )  # fmt: skip
    parser.add_argument("--write", action="store_true", help="write the page")
    if parser.parse_args().write:
        PAGE.write_text(page())
    elif not PAGE.is_file() or PAGE.read_text() != page():
        sys.stderr.write("docs/command_line.md is not up to date: python -m tests.tools.command_page --write\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

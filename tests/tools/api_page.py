"""docs/api.md: its tables of names, signatures and summaries, made of the public names themselves; and docs/reference.md.

The reference has the names of these tables under the same headings, and the site puts in their docstrings.  A table stands between `<!-- api localtensor.planner: Plan, Move -->` and `<!-- /api -->`; `*` is every name of the namespace.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/api.md"
REFERENCE = PAGE.with_name("reference.md")
_HEAD = """\
# Docstrings

The docstring of each public name, in the order of [public names](api.md), which has a line for each. The site shows them here, by
mkdocstrings; in Python, `help(localtensor.run)` does.
"""
_TABLE = re.compile(r"<!-- api ([\w.]+): ([^>]+?) -->\n.*?<!-- /api -->", re.DOTALL)
_VALUES = {
    "LEGAL": "The table of legal steps along one mesh axis, and the collective of each.",
    "OUR_RULES": "The sharding rules of this package, by overload.",
}
"""Constants, which have no docstring of their own."""


def namespace(path: str) -> Any:
    """`localtensor`, or what a user reaches as an attribute of it: `localtensor.planner`."""
    found: Any = importlib.import_module("localtensor")
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


def names_in(page: str) -> dict[str, list[str]]:
    """The names that the tables of a page list, by namespace."""
    found: dict[str, list[str]] = {}
    for path, names in _TABLE.findall(page):
        found.setdefault(path, []).extend(_listed(namespace(path), names))
    return found


def _listed(space: Any, names: str) -> list[str]:
    return sorted(space.__all__, key=str.lower) if names == "*" else names.split(", ")


def signature(name: str, value: object) -> str:
    """The name with the parameters of a call, without their types; defaults that are not plain values are `...`."""
    if not callable(value) or getattr(value, "_is_protocol", False):
        return name
    if isinstance(value, type) and issubclass(value, BaseException):  # made by this package only
        return name
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return name
    bare = []
    for parameter in parameters:
        plain = parameter.default is None or isinstance(parameter.default, bool | int | float | str | tuple)
        default = parameter.default if plain or parameter.default is parameter.empty else ...
        bare.append(parameter.replace(annotation=parameter.empty, default=default))
    return name + str(inspect.Signature(bare)).replace("Ellipsis", "...")


def summary(name: str, value: object) -> str:
    """The first sentence of the docstring."""
    text = _VALUES.get(name) or inspect.getdoc(value) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.partition("\n\n")[0].split()))[0]


def filled(page: str) -> str:
    """The page with each of its tables written anew."""

    def table(found: re.Match[str]) -> str:
        path, names = found.groups()
        values = [(name, getattr(namespace(path), name)) for name in _listed(namespace(path), names)]
        lines = [f"| `{signature(name, value)}` | {summary(name, value)} |" for name, value in values]
        return "\n".join(
            [f"<!-- api {path}: {names} -->", "| name | what it is |", "|---|---|", *lines, "<!-- /api -->"]
        )

    return _TABLE.sub(table, page)


def reference(page: str) -> str:
    """The page of docstrings: a directive of mkdocstrings for each name that the tables of a page list."""
    parts = [_HEAD]
    for heading, text in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE):
        names = [(path, name) for path, listed in names_in(text).items() for name in listed]
        values = [(f"{path}.{name}", getattr(namespace(path), name)) for path, name in names]
        shown = [f"::: {name}" for name, value in values if not inspect.ismodule(value)]
        parts += [f"## {heading}\n", *(f"{line}\n" for line in shown)] if shown else []
    return "\n".join(parts)


def main() -> int:
    """Exit code 1 if the page is not up to date and is not to be written."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.api_page", description="The tables of docs/api.md, and docs/reference.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Examples:\n  python -m tests.tools.api_page          are the pages up to date?\n"
        "  python -m tests.tools.api_page --write  write them\n",
    )  # fmt: skip
    parser.add_argument("--write", action="store_true", help="write what is not up to date")
    options = parser.parse_args()
    page = filled(PAGE.read_text())
    pages = {PAGE: page, REFERENCE: reference(page)}
    stale = [file for file, text in pages.items() if not file.is_file() or file.read_text() != text]
    for file in stale:
        if options.write:
            file.write_text(pages[file])
        else:
            sys.stderr.write(f"docs/{file.name} is not up to date: python -m tests.tools.api_page --write\n")
    return int(bool(stale) and not options.write)


if __name__ == "__main__":
    sys.exit(main())

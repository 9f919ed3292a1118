"""docs/api.md: its tables of names, signatures and summaries, made of the public names themselves.

A table stands between `<!-- api localtensor.planner: Plan, Move -->` and `<!-- /api -->`; `*` is every name of the namespace.
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


def main() -> int:
    """Exit code 1 if the page is not up to date and is not to be written."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.api_page", description="The tables of docs/api.md.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Examples:\n  python -m tests.tools.api_page          is the page up to date?\n"
        "  python -m tests.tools.api_page --write  write it\n",
    )  # fmt: skip
    parser.add_argument("--write", action="store_true", help="write the tables")
    options = parser.parse_args()
    before = PAGE.read_text()
    after = filled(before)
    if options.write:
        PAGE.write_text(after)
    elif before != after:
        sys.stderr.write("docs/api.md is not up to date: python -m tests.tools.api_page --write\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""docs/api.md lists every public name; what the pages import from this project is public."""

import ast
import re
from pathlib import Path

import pytest

from tests.end_to_end.test_docs import DOCS, ROOT, from_root
from tests.tools.api_page import PAGE, filled, names_in, namespace, signature, summary

DOORS = ["localtensor", *(f"localtensor.{name}" for name in ("errors", "planner", "propagation", "rules", "testing"))]
"""Each of their names is public.  `localtensor.concurrency` has internal ones, too."""
PUBLIC = {path: set(names) for path, names in names_in(PAGE.read_text()).items()}
IN_OUR_TREE = {"rules.md": {"strategies.propagation.overlay.autoload", "strategies.ops"}}
"""Modules that a page names as words of a command line."""


def code_of(page: str) -> list[str]:
    """The Python of a page: its python blocks, and the input lines of its sessions."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    sessions = re.findall(r"^```pycon\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return blocks + [
        "\n".join(line[4:] for line in text.splitlines() if line[:3] in (">>>", "...")) for text in sessions
    ]


def private_imports(page: str) -> list[str]:
    """What the Python of a page imports from this project though docs/api.md does not list it."""
    found = []
    for block in code_of(page):
        for node in ast.walk(ast.parse(re.sub(r"^ +\.\.\.$", "", block))):
            if isinstance(node, ast.Import):
                imported = [(alias.name, None) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [(str(node.module), alias.name) for alias in node.names]
            else:
                continue
            for module, name in imported:
                if module.partition(".")[0] not in ("localtensor", "strategies"):
                    continue
                if module not in PUBLIC or (name is not None and name not in PUBLIC[module]):
                    found.append(f"{module}.{name}" if name else module)
    return found


def private_mentions(page: Path) -> list[str]:
    """Names of `strategies` that a page quotes; a file, `strategies/ops/all_rules.py`, is no name."""
    quoted = re.findall(r"(?<![\w.])strategies\.[\w.]+\w", page.read_text())
    return [name for name in quoted if name not in IN_OUR_TREE.get(page.name, ())]


def test_the_page_is_up_to_date():
    assert filled(PAGE.read_text()) == PAGE.read_text(), "run: python -m tests.tools.api_page --write"


@pytest.mark.parametrize("door", DOORS)
def test_every_public_name_is_on_the_page_and_no_other(door):
    listed = names_in(PAGE.read_text())[door]
    assert sorted(listed) == sorted(namespace(door).__all__)


def test_what_the_page_lists_of_other_namespaces_is_there():
    others = set(PUBLIC) - set(DOORS)
    assert others == {"localtensor.concurrency"}
    assert [name for path in others for name in PUBLIC[path] if name not in namespace(path).__all__] == []


def test_every_name_has_a_summary():
    values = [(name, getattr(namespace(path), name)) for path, names in PUBLIC.items() for name in names]
    assert [name for name, value in values if not summary(name, value)] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=from_root)
def test_a_page_imports_public_names_only(page):
    assert private_imports(page.read_text()) == []


@pytest.mark.parametrize("page", DOCS, ids=from_root)
def test_a_page_quotes_no_name_of_the_other_package(page):
    assert private_mentions(page) == []


def test_planted_imports_are_caught():
    page = "```python\nfrom strategies import plan\nimport localtensor as lt\nfrom localtensor import run, spilt\n```\n"
    page += (
        "```pycon\n>>> import localtensor.layout.spec\n>>> from localtensor.testing import draws\n>>> import os\n```\n"
    )
    assert private_imports(page) == ["strategies.plan", "localtensor.spilt", "localtensor.layout.spec"]


def test_a_signature_has_parameters_and_plain_defaults():
    def call(x: int, *rest: object, by: str = "time", sink: object = object()) -> None: ...

    assert signature("call", call) == "call(x, *rest, by='time', sink=...)"
    assert signature("LIMIT", 3) == "LIMIT" and signature("ValueError", ValueError) == "ValueError"


def test_a_planted_stale_row_is_written_anew():
    stale = "<!-- api localtensor: parse -->\n| `pars()` | Old. |\n<!-- /api -->"
    assert "| `parse(text)` |" in filled(stale) and "Old." not in filled(stale)

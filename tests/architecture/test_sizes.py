"""Rooms stay small: when a file passes 400 lines it is two rooms, and a long function is two functions."""

import ast
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
LONGEST_FILE, MEDIAN_FILE, LONGEST_BODY = 400, 150, 60


def sources(root: Path) -> list[Path]:
    return [file for house in ("localtensor", "strategies") for file in sorted((root / house).rglob("*.py"))]


def bodies(file: Path) -> list[tuple[str, int]]:
    """Each function's name and the lines of its body, docstring left out."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            found.append((node.name, body[-1].end_lineno - body[0].lineno + 1 if body else 0))
    return found


def too_big(root: Path) -> list[str]:
    lengths = {file: len(file.read_text().splitlines()) for file in sources(root)}
    found = [
        f"{file.name} has {lines} lines: it is two rooms" for file, lines in lengths.items() if lines > LONGEST_FILE
    ]
    for file in lengths:
        for name, lines in bodies(file):
            if lines > LONGEST_BODY:
                found.append(f"{name} in {file.name} has {lines} lines: it is two functions")
    if median(lengths.values()) > MEDIAN_FILE:
        found.append(f"the median file has {median(lengths.values())} lines, more than {MEDIAN_FILE}")
    return found


def test_rooms_and_functions_are_small():
    assert sources(ROOT)
    assert too_big(ROOT) == []


def test_planted_giants_are_caught(tmp_path):
    for house in ("localtensor", "strategies"):
        (tmp_path / house).mkdir()
    (tmp_path / "localtensor/fits.py").write_text("x = 1\n" * LONGEST_FILE)
    (tmp_path / "localtensor/giant.py").write_text("x = 1\n" * (LONGEST_FILE + 1))
    fits = 'def fits():\n    """Says\n    much."""\n' + "    x = 1\n" * LONGEST_BODY
    (tmp_path / "strategies/long.py").write_text(fits + "def long():\n" + "    x = 1\n" * (LONGEST_BODY + 1))
    assert too_big(tmp_path) == [
        "giant.py has 401 lines: it is two rooms",
        "long in long.py has 61 lines: it is two functions",
        "the median file has 400 lines, more than 150",
    ]

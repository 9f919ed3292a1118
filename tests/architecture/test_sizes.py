"""Files, functions and folders stay small enough to be read: one idea a file, one step a function."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_FILE, LONGEST_BODY, MOST_FILES, MOST_PACKAGES, MOST_AT_THE_TOP = 400, 60, 16, 12, 4
MOST_MODULES = 481
"""Product modules, `__init__.py` included."""


def sources(root: Path) -> list[Path]:
    return [file for package in ("localtensor", "strategies") for file in sorted((root / package).rglob("*.py"))]


def bodies(file: Path) -> list[tuple[str, int]]:
    """Each function's name and the lines of its body, docstring left out."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            found.append((node.name, body[-1].end_lineno - body[0].lineno + 1 if body else 0))
    return found


def too_big(root: Path) -> list[str]:
    files = sources(root)
    found = [f"{file.name} has {n} lines" for file in files if (n := file.read_text().count("\n")) > LONGEST_FILE]
    for file in files:
        found += [f"{name} in {file.name} has {lines} lines" for name, lines in bodies(file) if lines > LONGEST_BODY]
    for folder in sorted({file.parent for file in files}):
        here = sum(file.parent == folder for file in files)
        packages = sum((child / "__init__.py").exists() for child in folder.iterdir() if child.is_dir())
        top = folder.parent == root
        if here > (MOST_AT_THE_TOP if top else MOST_FILES):
            found.append(f"{folder.relative_to(root)} holds {here} files")
        if packages > MOST_PACKAGES:
            found.append(f"{folder.relative_to(root)} holds {packages} packages")
    return found


def test_files_functions_and_folders_are_small():
    assert 100 < len(sources(ROOT)) <= MOST_MODULES
    assert too_big(ROOT) == []


def test_planted_giants_are_caught(tmp_path):
    for package in ("localtensor", "strategies", *(f"strategies/p{n:02}" for n in range(MOST_PACKAGES + 1))):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "localtensor/fits.py").write_text("x = 1\n" * LONGEST_FILE)
    (tmp_path / "localtensor/giant.py").write_text("x = 1\n" * (LONGEST_FILE + 1))
    fits = 'def fits():\n    """Says\n    much."""\n' + "    x = 1\n" * LONGEST_BODY
    (tmp_path / "strategies/long.py").write_text(fits + "def long():\n" + "    x = 1\n" * (LONGEST_BODY + 1))
    for n in range(MOST_FILES):
        (tmp_path / f"strategies/p00/m{n:02}.py").write_text("")
    for n in range(2):
        (tmp_path / f"localtensor/n{n}.py").write_text("")
    assert too_big(tmp_path) == [
        "giant.py has 401 lines",
        "long in long.py has 61 lines",
        "localtensor holds 5 files",
        "strategies holds 13 packages",
        "strategies/p00 holds 17 files",
    ]

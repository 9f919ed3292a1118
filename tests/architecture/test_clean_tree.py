"""What is tracked is fit for any machine, and the packages keep three habits that no linter of ours knows."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Taken apart, so that this file does not hold what it looks for.
ELSEWHERE = re.compile(
    r"(?<![\w.~}])/(?:ro" r"ot|wor" r"k|ho" r"me/\w+|Us" r"ers/\w+)(?:/|\b(?![-.\w]))"
    r"|\b(?:py" r"pi\.org|py" r"thonhosted\.org|download\.py" r"torch\.org|conda\.ana" r"conda\.org)"
)  # fmt: skip
HABITS = re.compile(r"NotImplementedError|except\s*:|Exception\b")
"""What stands in every file that has one of the habits: few files are parsed."""
SKIPPED = {".git", ".venv", "__pycache__", "build", "dist"}


def tracked(root: Path) -> list[Path]:
    """The files that git tracks or would; all but caches where there is no git."""
    git = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        every = (file for file in root.rglob("*") if not SKIPPED & set(file.relative_to(root).parts))
        return sorted(file for file in every if file.is_file())
    return sorted(root / name for name in set(listed.split("\0")) if name and (root / name).is_file())


def places_elsewhere(file: Path) -> list[str]:
    lines = file.read_text(errors="replace").splitlines()
    return [f"{file.name}:{n}: {hit[0]}" for n, line in enumerate(lines, 1) for hit in ELSEWHERE.finditer(line)]


def bad_habits(file: Path) -> list[str]:
    """Stubs left behind, and handlers that swallow everything without saying why on their own line."""
    source = file.read_text()
    if not HABITS.search(source):
        return []
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        where = f"{file.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
            found.append(f"{where}: raises NotImplementedError; write the thing or leave it out")
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else ""
            if not caught:
                found.append(f"{where}: bare except; name what is caught")
            elif re.search(r"\b(Base)?Exception\b", caught) and "# why: " not in lines[node.lineno - 1]:
                found.append(f"{where}: catches {caught} without '# why: ' on the same line")
    return found


def test_no_file_names_a_place_that_only_one_machine_has():
    files = tracked(ROOT)
    assert {"README.md", "pyproject.toml", "Makefile"} <= {file.name for file in files}
    assert [place for file in files for place in places_elsewhere(file)] == []


def test_the_packages_leave_no_stubs_and_swallow_nothing_in_silence():
    files = [file for house in ("localtensor", "strategies") for file in sorted((ROOT / house).rglob("*.py"))]
    assert len(files) > 2
    assert [habit for file in files for habit in bad_habits(file)] == []


@pytest.mark.parametrize("halves", [
    ("/ro", "ot/.cache"), ("'/ro", "ot'"), ("cd /wor", "k/x"), ("/ho", "me/ann/x"), ("/Us", "ers/ann"),
    ("https://py", "pi.org/simple"), ("files.py", "thonhosted.org"), ("https://download.py", "torch.org/whl"),
])  # fmt: skip
def test_a_planted_place_is_caught(halves, tmp_path):
    file = tmp_path / "notes.md"
    file.write_text("fine\n" + "".join(halves))
    [found] = places_elsewhere(file)
    assert found.startswith("notes.md:2: ")


@pytest.mark.parametrize("text", ["network/rank", "tests/work/x.py", "/worker", "~/home", "the root/leaf", "/bin/sh"])
def test_ordinary_paths_are_let_through(text, tmp_path):
    file = tmp_path / "notes.md"
    file.write_text(text)
    assert places_elsewhere(file) == []


def test_planted_habits_are_caught(tmp_path):
    file = tmp_path / "planted.py"
    file.write_text(
        "def stub():\n    raise NotImplementedError\n"
        "def stub_with_words():\n    raise NotImplementedError('later')\n"
        "try: x()\nexcept: pass\n"
        "try: x()\nexcept Exception: pass\n"
        "try: x()\nexcept (KeyError, BaseException) as e: pass\n"
        "try: x()\nexcept Exception:  # why: a crash of the op under test is a verdict\n    pass\n"
        "try: x()\nexcept KeyError: pass\n"
    )
    assert sorted(bad_habits(file)) == [
        "planted.py:10: catches (KeyError, BaseException) without '# why: ' on the same line",
        "planted.py:2: raises NotImplementedError; write the thing or leave it out",
        "planted.py:4: raises NotImplementedError; write the thing or leave it out",
        "planted.py:6: bare except; name what is caught",
        "planted.py:8: catches Exception without '# why: ' on the same line",
    ]


def test_a_tree_without_git_is_listed_all_the_same(tmp_path):
    for name in ("a.py", ".venv/b.py", "x/__pycache__/c.pyc", "x/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert [file.name for file in tracked(tmp_path)] == ["a.py", "d.py"]


def test_the_files_of_tests_that_come_first_are_there():
    tree = ast.parse((ROOT / "conftest.py").read_text())
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LONGEST"
    ]
    assert len(names) > 20 and [name for name in names if not (ROOT / f"tests/{name}.py").is_file()] == []

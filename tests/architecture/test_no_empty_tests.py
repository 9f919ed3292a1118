"""No test passes by doing nothing: each one asserts something that a reader can point at."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
SPEAKING = ("assert_", "check_")


def asserts(function: ast.AST) -> bool:
    """Whether an `assert`, a `pytest.raises`, or a call of `assert_*` or `check_*` stands in it."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("pytest.raises", "pytest.fail") or called.split(".")[-1].startswith(SPEAKING):
                return True
    return False


def empty_tests(file: Path) -> list[str]:
    """What pytest would collect: a test that stands within another is what that one is about."""
    module = ast.parse(file.read_text())
    groups = [node for node in module.body if isinstance(node, ast.ClassDef)]
    tests = [
        node
        for home in (module, *groups)
        for node in home.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
    ]
    empty = [f"{file.name}:{test.lineno}: {test.name} asserts nothing" for test in tests if not asserts(test)]
    return empty if tests else [f"{file.name} holds no test"]


def test_each_test_asserts_something():
    assert [line for file in FILES for line in empty_tests(file)] == []


def test_planted_empty_tests_are_caught(tmp_path):
    file = tmp_path / "test_planted.py"
    file.write_text(
        "def test_nothing(): pass\n"
        "async def test_compares_and_forgets(): 1 == 2\n"
        "def helper(): compute()\n"
        "class TestGroup:\n    def test_calls(self): compute()\n    def test_checks(self): check_it(1)\n"
        "def test_loops():\n    for x in y:\n        assert x\n"
        "def test_refuses():\n    with pytest.raises(KeyError): d[1]\n"
        "def test_close(): torch.testing.assert_close(a, b)\n"
        "def test_runs_another():\n    def test_within(): compute()\n    assert run(test_within)\n"
    )
    assert sorted(empty_tests(file)) == [
        "test_planted.py:1: test_nothing asserts nothing",
        "test_planted.py:2: test_compares_and_forgets asserts nothing",
        "test_planted.py:5: test_calls asserts nothing",
    ]


def test_a_planted_file_without_tests_is_caught(tmp_path):
    file = tmp_path / "test_misspelt.py"
    file.write_text("def tset_misspelt(): assert True\n")
    assert empty_tests(file) == ["test_misspelt.py holds no test"]

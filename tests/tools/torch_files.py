"""Test files of torch's sources, and how their tests end: shared by the tools that run them on ranks of ours."""

import hashlib
import json
import os
import signal
import sys
import tarfile
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import SkipTest

import pytest
import torch

ADDRESS = "https://raw.githubusercontent.com/pytorch/pytorch/{commit}/{path}"
DEBIAN = "http://deb.debian.org/debian/pool/main/p/pytorch/pytorch_2.6.0+dfsg.orig.tar.xz"
DEBIAN_SHA256 = "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff"
SECONDS = 60  # for one test
PASSED, SKIPPED, FAILED, CRASHED = "passed", "skipped", "failed", "crashed"


class Verdict(NamedTuple):
    """How one test has ended, and for what reason if it has not passed."""

    test: str
    outcome: str
    reason: str = ""


def source(path: str, folder: Path | None = None) -> str:
    """The text of a file of torch's sources: that in the folder, by path or by name, or that of the installed torch's commit.

    Ends the program where it can be had from neither.
    """
    try:
        if folder is not None:
            exact = folder / path
            return (exact if exact.exists() else folder / Path(path).name).read_text()
        address = ADDRESS.format(commit=torch.version.git_version, path=path)
        with urllib.request.urlopen(address, timeout=SECONDS) as answer:
            return str(answer.read().decode())
    except OSError as error:
        sys.exit(f"{folder or 'the download'}: {error}. Name the file of torch's sources ({path}).")


def debian_sources() -> Path:
    """The folder test/distributed of torch 2.6.0, from Debian's source package.

    The package (27 MB) is downloaded once; its tests are kept below `XDG_CACHE_HOME`, or `~/.cache`.
    Ends the program if the package cannot be had, or is another.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "localtensor", "torch-2.6.0")
    tests = folder / "test/distributed"
    if tests.is_dir():
        return tests
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        package, unpacked = Path(name, "package.tar.xz"), Path(name, "unpacked")
        _download_debian(package)
        with tarfile.open(package) as members:
            for member in members:
                path = member.name.partition("/")[2]
                held = members.extractfile(member) if path.startswith("test/distributed/") else None
                if held is not None:  # no `filter="data"`: Python 3.11.2 has none, and the package's hash is known
                    file = unpacked / path
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(held.read())
        try:
            unpacked.rename(folder)
        except OSError:  # another process has been faster
            if not tests.is_dir():
                raise
    return tests


def _download_debian(package: Path) -> None:
    """Writes Debian's source package to a file.  Ends the program if that fails, or if it is not the known one."""
    found = hashlib.sha256()
    try:
        with urllib.request.urlopen(DEBIAN, timeout=SECONDS) as answer, package.open("wb") as out:
            for block in iter(lambda: answer.read(1 << 20), b""):
                found.update(block)
                out.write(block)
    except OSError as error:
        sys.exit(f"{DEBIAN}: {error}. Name a folder of torch's sources.")
    if found.hexdigest() != DEBIAN_SHA256:
        sys.exit(f"{DEBIAN}: its SHA-256 is {found.hexdigest()}, not {DEBIAN_SHA256}. Download it again.")


def ending(error: BaseException | None, kinds: Mapping[type, str] | None = None) -> tuple[str, str]:
    """The outcome of a test by its error, and the reason: the cause's, where a rank raised it.

    `kinds` are outcomes by the type of the error; other errors are failures.
    """
    if error is None:
        return PASSED, ""
    if isinstance(error, pytest.skip.Exception | SkipTest):
        return SKIPPED, str(error)
    if isinstance(error, pytest.xfail.Exception):
        return SKIPPED, "a failure that torch expects"
    cause = error.__cause__ or error
    said = str(cause).partition("To execute this test")[0]  # torch's TestCase adds how to
    return (kinds or {}).get(type(cause), FAILED), f"{type(cause).__name__}: {' '.join(said.split())}"


class Collector:
    """A plugin of pytest that keeps each outcome with its reason."""

    def __init__(self, kinds: Mapping[type, str] | None = None) -> None:
        self.verdicts: list[Verdict] = []
        self._kinds = kinds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = yield
        if report.when == "call" or not report.passed:
            error = call.excinfo.value if call.excinfo else None
            self.keep(Verdict(item.nodeid.partition("::")[2], *ending(error, self._kinds)))
        return report

    def keep(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)


class Kept(Collector):
    """The outcomes of the tests in a file, line by line, so that a crash leaves those before it.  Tests that are there do not run again.

    With `only`, others do not run at all.
    """

    def __init__(self, file: Path, kinds: Mapping[type, str] | None = None, only: Iterable[str] | None = None) -> None:
        super().__init__(kinds)
        self._file = file
        self._only = None if only is None else frozenset(only)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        before = {verdict.test for verdict in read(self._file)}
        names = [item.nodeid.partition("::")[2] for item in items]
        items[:] = [
            item
            for item, name in zip(items, names, strict=True)
            if name not in before and (self._only is None or name in self._only)
        ]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._add(Verdict(nodeid.partition("::")[2], CRASHED, "the process ended"))

    def keep(self, verdict: Verdict) -> None:
        super().keep(verdict)
        self._add(verdict)

    def _add(self, verdict: Verdict) -> None:
        with self._file.open("a") as out:
            print(json.dumps(verdict), file=out)


def read(kept: Path) -> list[Verdict]:
    """The verdicts in a file of lines; of a test the last one counts."""
    return [Verdict(*json.loads(line)) for line in kept.read_text().splitlines()] if kept.exists() else []


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the block where it takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_pytest(name: str, text: str, collector: Collector, options: Sequence[str], *plugins: object) -> list[Verdict]:
    """The verdict on each test of a file of this text.  Ends the program if the file cannot be collected."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_text(text)
        quiet = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", f"--rootdir={folder}"]
        code = pytest.main([*quiet, *options, str(file)], plugins=[collector, *plugins])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest ended with {code!r}: {name} does not fit torch {torch.__version__}?")
    return collector.verdicts


def print_counts(title: str, verdicts: Sequence[Verdict]) -> None:
    """Print the number of tests by outcome."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    print(f"torch {torch.__version__}, {title}, {len(verdicts)} tests:", dict(sorted(counts.items())))


def print_others(verdicts: Iterable[Verdict]) -> None:
    """Print each test that has not passed, with its reason."""
    for verdict in verdicts:
        if verdict.outcome != PASSED:
            print(f"  {verdict.test}: {verdict.outcome}: {verdict.reason[:300]}")

"""`session(source, *options)`: pytest in a process of its own, on one test file, with the plugin."""

import os
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.localtensor.pytest_plugin.in_process import in_process
from tests.tools import warm

ROOT = Path(__file__).parents[4]
HEAD = "import os\nimport pytest\nimport torch\nimport torch.distributed as dist\n\n\n"


class Session:
    """The folder with the test file, and pytest's command line there."""

    def __init__(self, folder):
        self.folder = folder
        self.environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        for name in [name for name in self.environ if name.startswith("PYTEST_")]:
            del self.environ[name]  # what xdist tells its workers is not for sessions inside of them

    def write(self, source):
        self.text = HEAD + textwrap.dedent(source)
        (self.folder / "test_it.py").write_text(self.text)

    def line(self, words):
        """The number of the line of the test file that holds these words."""
        [found] = [number for number, line in enumerate(self.text.splitlines(), 1) if words in line]
        return found

    def arguments(self, *options):
        loaded = any(point.value == "localtensor.pytest_plugin" for point in entry_points(group="pytest11"))
        plugin = [] if loaded else ["-p", "localtensor.pytest_plugin"]
        # Without its option, which is an unknown one where it is not installed, pytest-asyncio warns of it in each session.
        quiet = ["-p", "no:asyncio"] if "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in self.environ else []
        ours = ["-c", os.devnull, "--rootdir", str(self.folder), "-o", "cache_dir=cache", "--color=no", *plugin, *quiet]
        return [*ours, *options, str(self.folder / "test_it.py")]

    def command(self, *options):
        return [sys.executable, "-m", "pytest", *self.arguments(*options)]

    def __call__(self, source, *options):
        self.write(source)
        return warm.run(self.command(*options), cwd=self.folder, env=self.environ, timeout=120)

    def inside(self, pytester, source, *options):
        """The same in this process, where torch is there already; the text that it printed."""
        self.write(source)
        result = in_process(pytester, *self.arguments(*options))
        return result.stdout.str() + result.stderr.str()


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path)

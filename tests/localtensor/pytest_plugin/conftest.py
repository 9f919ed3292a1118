"""`tried(files, *options)`: pytest run on small test files, in this process, with the plugin."""

import textwrap
from importlib.metadata import entry_points

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import localtensor as lt
from tests.localtensor.pytest_plugin.in_process import in_process

# In this process the plugin's package is there already, which pytest remarks upon.
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")


def _use_everything():
    mesh = init_device_mesh("cpu", (2,))
    dist.all_reduce(torch.ones(2), group=mesh.get_group())


@pytest.fixture(scope="session")
def warm():
    lt.run(_use_everything, ranks=2)


@pytest.fixture
def tried(pytester, warm):
    """Called with the text of a test file and options, gives what pytester's runs give, with `text`, all that was printed."""
    loaded = any(point.value == "localtensor.pytest_plugin" for point in entry_points(group="pytest11"))
    head = "import pytest\nimport torch\nimport torch.distributed as dist\n\n\n"

    def run(body, *options):
        pytester.makepyfile(test_it=head + textwrap.dedent(body))
        plugin = () if loaded else ("-p", "localtensor.pytest_plugin")
        result = in_process(pytester, "-p", "no:cacheprovider", "-W", "default", *QUIET, *plugin, *options)
        result.text = f"{result.stdout.str()}\n{result.stderr.str()}"
        return result

    return run

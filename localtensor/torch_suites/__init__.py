"""Test files written for torch's own multi-process base classes, run on rank threads: `pytest -p localtensor.torch_suites`."""

pytest_plugins = ("localtensor.torch_suites.hooks",)  # so that the rest of the package does without pytest

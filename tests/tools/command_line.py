"""The command lines of the tools."""

from __future__ import annotations

import argparse


def parser_of(name: str, examples: str, description: str | None = None) -> argparse.ArgumentParser:
    """The parser of `python -m tests.tools.NAME`; its help ends with the examples, as they are written."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m tests.tools.{name}", None, description, examples, formatter_class=layout)

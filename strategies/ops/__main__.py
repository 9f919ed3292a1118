"""Validates our own rules: `python -m strategies.ops`, with the names of overloads or families for some of them."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from strategies.cli.commands.coverage import compare_ops, validate_ops
from strategies.ops.all_rules import OUR_RULES

app = typer.Typer(
    name="python -m strategies.ops", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
EXAMPLES = """Examples:

\b
  python -m strategies.ops
      every rule, at full strength: tens of minutes
  python -m strategies.ops aten.mv.default --seeds 1
      one overload; --seeds 3 tries it with other calls, too
  python -m strategies.ops convolution "nn*" --seeds 1
      a family, or what a glob names
  python -m strategies.ops --coverage
      beside DTensor's rules on the 300 most used overloads

Exit codes: 0 every rule that was tested is right; 1 one is wrong, or lacking; 2 no such rule; 3 nothing was tested.
"""


@app.command(epilog=EXAMPLES)
def main(
    patterns: Annotated[list[str] | None, typer.Argument(metavar="[NAME ...]", help="Overloads, packets or families, as names or globs.")] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many times, each with other calls and values.")] = 3,
    most: Annotated[int, typer.Option("--calls", min=1, help="Calls of each overload at the most.")] = 24,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Worker processes.")] = os.cpu_count() or 1,
    coverage: Annotated[bool, typer.Option("--coverage", help="Compare with DTensor's rules on the most used overloads.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:  # fmt: skip
    """Validate the sharding rules of our own: all of them, or those that are named."""
    if coverage:
        raise typer.Exit(compare_ops(workers=workers, quiet=quiet))
    raise typer.Exit(validate_ops(OUR_RULES, patterns or (), seeds=seeds, most=most, workers=workers, quiet=quiet))


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it would warn of each out= that is resized
    app()

"""The commands `localtensor cost ...`."""

import typer

from strategies.base.options import takes_options
from strategies.cli import options as command_options
from strategies.cli.usage import Command

COST_EXAMPLES = """Examples:

\b
  localtensor cost check torch
      torch's own redistribute_cost, on a mesh of 2 x 2
  localtensor cost check time --mesh 2,3 --shape 7,5
      the price by which we plan
  localtensor cost check my_package.my_costs:price --json
      a function of yours: of two specs, or of one move

Exit codes: 0 it is a metric; 1 it is none; 2 usage; 3 infrastructure; 130 stopped by Ctrl-C.
"""

cost = typer.Typer(
    name="cost", no_args_is_help=True, help="Tests of redistribution costs, and the bytes that a rule moves.", rich_markup_mode=None,
    epilog=COST_EXAMPLES.partition("Exit codes")[0],
)  # fmt: skip


@cost.callback()
def _cost() -> None:
    """Tests of redistribution costs, and the bytes that a rule moves."""


@cost.command("check", cls=Command, epilog=COST_EXAMPLES, short_help="Test whether a cost is a metric.")
@takes_options()
def check(options: command_options.CostOptions) -> int:
    """Test whether a cost is a metric: 0 for no redistribution, never negative, and no detour cheaper than the direct way."""
    from strategies.cli.commands.plan import check_cost

    return check_cost(options)


RULE_COST_EXAMPLES = """Examples:

\b
  localtensor cost rule aten.add.Tensor
      bytes by placement: DTensor's rules, the overlay's
  localtensor cost rule gather --ranks 8 --json
      the same for a program

Exit codes: 0 printed; 2 usage; 3 no call of the op could be made; 130 stopped by Ctrl-C.
"""


@cost.command("rule", cls=Command, epilog=RULE_COST_EXAMPLES, short_help="Bytes that a call of an op moves.")
@takes_options()
def rule(options: command_options.RuleCostOptions) -> int:
    """Print the bytes that a call of an op moves, by the placements of its arguments: so a right rule shows its price."""
    from strategies.cli.commands.cost_rule import run

    return run(options)

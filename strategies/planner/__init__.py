"""Redistribution: steps, cost, search, execution, audit of DTensor's own."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.planner.audit.causes import Cause as Cause
    from strategies.planner.audit.causes import causes as causes
    from strategies.planner.audit.causes import confirmed as confirmed
    from strategies.planner.audit.compare_with_torch import Theirs as Theirs
    from strategies.planner.audit.compare_with_torch import theirs as theirs
    from strategies.planner.audit.dtensor_tried import Tried as Tried
    from strategies.planner.audit.dtensor_tried import rows as rows
    from strategies.planner.audit.dtensor_tried import wasted as wasted
    from strategies.planner.audit.pairs import draw_pairs as draw_pairs
    from strategies.planner.audit.real_run import Bench as Bench
    from strategies.planner.audit.report import as_json as as_json
    from strategies.planner.audit.report import as_text as as_text
    from strategies.planner.audit.script import script as script
    from strategies.planner.audit.torch_plans import MODES as MODES
    from strategies.planner.audit.verdict import Verdict as Verdict
    from strategies.planner.audit.verdict import judge as judge
    from strategies.planner.execute.lockstep import redistribute as redistribute
    from strategies.planner.execute.process_groups import axes_of as axes_of
    from strategies.planner.execute.process_groups import groups_along as groups_along
    from strategies.planner.execute.process_groups import redistribute_local as redistribute_local
    from strategies.planner.execute.random_specs import Drawn as Drawn
    from strategies.planner.metric_check.check import BadCost as BadCost
    from strategies.planner.metric_check.check import check as check
    from strategies.planner.search.alternatives import CHEAPEST as CHEAPEST
    from strategies.planner.search.alternatives import Way as Way
    from strategies.planner.search.alternatives import ways as ways
    from strategies.planner.search.api import NoPlan as NoPlan
    from strategies.planner.search.api import clear as clear
    from strategies.planner.search.api import plan as plan
    from strategies.planner.steps.alpha_beta import NETWORK as NETWORK
    from strategies.planner.steps.alpha_beta import AxisStep as AxisStep
    from strategies.planner.steps.alpha_beta import Held as Held
    from strategies.planner.steps.alpha_beta import Network as Network
    from strategies.planner.steps.alpha_beta import commute as commute
    from strategies.planner.steps.alpha_beta import move_axis as move_axis
    from strategies.planner.steps.legal_steps import LEGAL as LEGAL
    from strategies.planner.steps.plan import Plan as Plan
    from strategies.planner.steps.prices import Sent as Sent
    from strategies.planner.steps.prices import Time as Time
    from strategies.planner.text.options import Asked as Asked
    from strategies.planner.text.options import BadPlanOption as BadPlanOption
    from strategies.planner.text.options import asked as asked
    from strategies.planner.text.options import sizes_of as sizes_of
    from strategies.planner.text.parser import text_of as text_of
    from strategies.planner.text.plan_code import code_of as code_of

__all__ = [
    "CHEAPEST",
    "LEGAL",
    "MODES",
    "NETWORK",
    "Asked",
    "AxisStep",
    "BadCost",
    "BadPlanOption",
    "Bench",
    "Cause",
    "Drawn",
    "Held",
    "Network",
    "NoPlan",
    "Plan",
    "Sent",
    "Theirs",
    "Time",
    "Tried",
    "Verdict",
    "Way",
    "as_json",
    "as_text",
    "asked",
    "axes_of",
    "causes",
    "check",
    "clear",
    "code_of",
    "commute",
    "confirmed",
    "draw_pairs",
    "groups_along",
    "judge",
    "move_axis",
    "plan",
    "redistribute",
    "redistribute_local",
    "rows",
    "script",
    "sizes_of",
    "text_of",
    "theirs",
    "wasted",
    "ways",
]

_ROOM = {
    "Asked": "strategies.planner.text.options",
    "AxisStep": "strategies.planner.steps.alpha_beta",
    "BadCost": "strategies.planner.metric_check.check",
    "BadPlanOption": "strategies.planner.text.options",
    "Bench": "strategies.planner.audit.real_run",
    "CHEAPEST": "strategies.planner.search.alternatives",
    "Cause": "strategies.planner.audit.causes",
    "Drawn": "strategies.planner.execute.random_specs",
    "Held": "strategies.planner.steps.alpha_beta",
    "LEGAL": "strategies.planner.steps.legal_steps",
    "MODES": "strategies.planner.audit.torch_plans",
    "NETWORK": "strategies.planner.steps.alpha_beta",
    "Network": "strategies.planner.steps.alpha_beta",
    "NoPlan": "strategies.planner.search.api",
    "Plan": "strategies.planner.steps.plan",
    "Sent": "strategies.planner.steps.prices",
    "Theirs": "strategies.planner.audit.compare_with_torch",
    "Time": "strategies.planner.steps.prices",
    "Tried": "strategies.planner.audit.dtensor_tried",
    "Verdict": "strategies.planner.audit.verdict",
    "Way": "strategies.planner.search.alternatives",
    "as_json": "strategies.planner.audit.report",
    "as_text": "strategies.planner.audit.report",
    "asked": "strategies.planner.text.options",
    "axes_of": "strategies.planner.execute.process_groups",
    "causes": "strategies.planner.audit.causes",
    "check": "strategies.planner.metric_check.check",
    "clear": "strategies.planner.search.api",
    "code_of": "strategies.planner.text.plan_code",
    "commute": "strategies.planner.steps.alpha_beta",
    "confirmed": "strategies.planner.audit.causes",
    "draw_pairs": "strategies.planner.audit.pairs",
    "groups_along": "strategies.planner.execute.process_groups",
    "judge": "strategies.planner.audit.verdict",
    "move_axis": "strategies.planner.steps.alpha_beta",
    "plan": "strategies.planner.search.api",
    "redistribute": "strategies.planner.execute.lockstep",
    "redistribute_local": "strategies.planner.execute.process_groups",
    "rows": "strategies.planner.audit.dtensor_tried",
    "script": "strategies.planner.audit.script",
    "sizes_of": "strategies.planner.text.options",
    "text_of": "strategies.planner.text.parser",
    "theirs": "strategies.planner.audit.compare_with_torch",
    "wasted": "strategies.planner.audit.dtensor_tried",
    "ways": "strategies.planner.search.alternatives",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

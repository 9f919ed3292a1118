from strategies.planner.execute.lockstep import redistribute as redistribute
from strategies.planner.execute.process_groups import axes_of as axes_of
from strategies.planner.execute.process_groups import groups_along as groups_along
from strategies.planner.execute.process_groups import redistribute_local as redistribute_local
from strategies.planner.search.api import clear as clear
from strategies.planner.steps.legal_steps import LEGAL as LEGAL

"""The values: call, sample, rule, program, verdict, settings; their JSON; the oracle."""

from localtensor._util.doors import door

__getattr__, __dir__, __all__ = door(__name__, __file__)

"""The values: call, sample, rule, program, verdict, settings; their JSON; the oracle."""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

"""Every exception class, built from the facts of its case, and the text of every failure report.

base                    LocalTensorError, the five parts of its message, errors about arguments
collectives             what ranks bring to a collective
mismatches, programs    calls of ranks that do not fit; other faults of a user's program
symmetric               faults of programs on symmetric memory
runs                    what `lt.run`, an exploration and a pool of processes cannot do, and what one control flow for all ranks cannot
failure_report          the text of a run that failed
"""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

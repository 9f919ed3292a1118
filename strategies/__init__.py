"""Judges claims about sharding: tests each rule of torch, or of your own, against the real op.

The command line is `localtensor validate`.  May import `localtensor`, never the other way round.

`strategies.overlay_dtensor()` gives the running DTensor rules of our own, for a while; `strategies.plan(src, dst)` is
the cheapest redistribution; `strategies.no_implicit_communication()` refuses one that is not written.  Each is imported
on first use.
"""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

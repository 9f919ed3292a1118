"""Judges claims about sharding: takes rules from torch or from you, and puts each on trial.

The command line is `localtensor validate`.  May import `localtensor`, never the other way round.

`strategies.overlay_dtensor()` gives the running DTensor rules of our own, for a while.  It is imported when it is first
asked for: most who come by this door want none of it.
"""

import typing

if typing.TYPE_CHECKING:
    from strategies.overlay import overlay_dtensor as overlay_dtensor

__all__ = ["overlay_dtensor"]


def __getattr__(name: str) -> typing.Any:
    if name == "overlay_dtensor":
        from strategies.overlay import overlay_dtensor

        return overlay_dtensor
    raise AttributeError(f"module 'strategies' has no attribute {name!r}")

"""Plumbing of the process that knows no domain: context, call sites, patching, pickling."""

from localtensor._util.doors import door

__getattr__, __dir__, __all__ = door(__name__, __file__)

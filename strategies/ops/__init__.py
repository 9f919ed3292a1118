"""Our own sharding rules: the book of them all; one folder for each family of ops."""

from localtensor._util.doors import door

__getattr__, __dir__, __all__ = door(__name__, __file__)

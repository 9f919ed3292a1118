"""Our own sharding rules: the book of them all; one folder for each family of ops."""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

"""Our own sharding rules: the registry of all, and one package for each family of ops."""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

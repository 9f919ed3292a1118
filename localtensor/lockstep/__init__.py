"""All ranks in one control flow: LocalTensorMode and the collectives on its tensors."""

from localtensor._util import lazy as _lazy

__getattr__, __dir__, __all__ = _lazy.exports(__name__, __file__)

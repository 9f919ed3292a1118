"""All ranks in one control flow: LocalTensorMode and the collectives on its tensors."""

from localtensor._util.doors import door

__getattr__, __dir__, __all__ = door(__name__, __file__)

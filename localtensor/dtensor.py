"""DTensor in lockstep."""


def install() -> None:
    pass

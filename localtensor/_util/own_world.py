"""torch.distributed's world - which groups there are - as an object of its own, where torch keeps it once per process."""

from typing import Any

from torch.distributed import distributed_c10d as c10d


class OwnWorld(c10d._World):
    """Its values belong to the object; torch's own class keeps most of them in its module."""

    def __init__(self) -> None:
        super().__init__()
        self.group_count = 0


def _own(name: str) -> property:
    def read(self: OwnWorld) -> Any:
        return self.__dict__.setdefault(f"_own_{name}", {})

    def write(self: OwnWorld, value: Any) -> None:
        self.__dict__[f"_own_{name}"] = value

    return property(read, write)


for _name, _value in vars(c10d._World).items():
    if isinstance(_value, property) and _name not in ("default_pg", "pg_coalesce_state", "comms", "pg_config_info"):
        setattr(OwnWorld, _name, _own(_name))

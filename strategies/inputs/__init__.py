"""Which calls to try: captured from OpInfo, drawn from the schema, selected."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:  # for readers and type checkers; _ROOM below says the same to the interpreter
    from strategies.inputs.diverse_subset import choose as choose
    from strategies.inputs.gathering import Shelf as Shelf
    from strategies.inputs.gathering import capture as capture
    from strategies.inputs.hypothesis_source import Pick as Pick
    from strategies.inputs.hypothesis_source import drawn as drawn
    from strategies.inputs.selection import matching as matching
    from strategies.inputs.selection import pick_overloads as pick_overloads
    from strategies.inputs.sibling_samples import gather as gather
    from strategies.inputs.variants.adversarial_calls import Adversary as Adversary
    from strategies.inputs.variants.adversarial_calls import adversaries as adversaries
    from strategies.inputs.variants.adversarial_calls import numbers as numbers
    from strategies.inputs.variants.adversarial_values import VALUES as VALUES
    from strategies.inputs.variants.all_variants import variations as variations
    from strategies.inputs.variants.call_edits import Spot as Spot
    from strategies.inputs.variants.call_edits import changed as changed
    from strategies.inputs.variants.call_edits import counts_dims as counts_dims
    from strategies.inputs.variants.call_edits import holds_tensors as holds_tensors
    from strategies.inputs.variants.call_edits import lists_changed as lists_changed
    from strategies.inputs.variants.call_edits import named as named
    from strategies.inputs.variants.call_edits import put as put
    from strategies.inputs.variants.call_edits import spots as spots
    from strategies.inputs.variants.call_edits import with_call as with_call
    from strategies.inputs.variants.call_edits import with_tensors as with_tensors
    from strategies.inputs.variants.call_edits import without as without
    from strategies.inputs.variants.value_variants import adverse as adverse
    from strategies.inputs.variants.value_variants import kind_of as kind_of
    from strategies.inputs.variants.value_variants import truth_of as truth_of
    from strategies.inputs.variants.variant import Values as Values
    from strategies.model.settings import DTYPES as DTYPES

__all__ = [
    "DTYPES",
    "VALUES",
    "Adversary",
    "Pick",
    "Shelf",
    "Spot",
    "Values",
    "adversaries",
    "adverse",
    "capture",
    "changed",
    "choose",
    "counts_dims",
    "drawn",
    "gather",
    "holds_tensors",
    "kind_of",
    "lists_changed",
    "matching",
    "named",
    "numbers",
    "pick_overloads",
    "put",
    "spots",
    "truth_of",
    "variations",
    "with_call",
    "with_tensors",
    "without",
]

_ROOM = {
    "Adversary": "strategies.inputs.variants.adversarial_calls",
    "DTYPES": "strategies.model.settings",
    "Pick": "strategies.inputs.hypothesis_source",
    "Shelf": "strategies.inputs.gathering",
    "Spot": "strategies.inputs.variants.call_edits",
    "VALUES": "strategies.inputs.variants.adversarial_values",
    "Values": "strategies.inputs.variants.variant",
    "adversaries": "strategies.inputs.variants.adversarial_calls",
    "adverse": "strategies.inputs.variants.value_variants",
    "capture": "strategies.inputs.gathering",
    "changed": "strategies.inputs.variants.call_edits",
    "choose": "strategies.inputs.diverse_subset",
    "counts_dims": "strategies.inputs.variants.call_edits",
    "drawn": "strategies.inputs.hypothesis_source",
    "gather": "strategies.inputs.sibling_samples",
    "holds_tensors": "strategies.inputs.variants.call_edits",
    "kind_of": "strategies.inputs.variants.value_variants",
    "lists_changed": "strategies.inputs.variants.call_edits",
    "matching": "strategies.inputs.selection",
    "named": "strategies.inputs.variants.call_edits",
    "numbers": "strategies.inputs.variants.adversarial_calls",
    "pick_overloads": "strategies.inputs.selection",
    "put": "strategies.inputs.variants.call_edits",
    "spots": "strategies.inputs.variants.call_edits",
    "truth_of": "strategies.inputs.variants.value_variants",
    "variations": "strategies.inputs.variants.all_variants",
    "with_call": "strategies.inputs.variants.call_edits",
    "with_tensors": "strategies.inputs.variants.call_edits",
    "without": "strategies.inputs.variants.call_edits",
}


def __getattr__(name: str) -> _typing.Any:
    if name not in _ROOM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(_importlib.import_module(_ROOM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The sources that are known by name: our own (`BUILT_IN_SOURCES` of model/settings.py), and those that packages offer."""

from __future__ import annotations

import functools
import importlib
from importlib import metadata

from localtensor.errors import error_in_one_line
from strategies.model.settings import (
    BUILT_IN_SOURCES,
    SOURCE_GROUP,
    BadRules,
    BadSource,
    check_source,
    rules_module,
    source_names,
)
from strategies.torch_api.user_modules import import_user_module
from strategies.validation.sources.protocol import Source

__all__ = ["source_named", "source_names", "source_of_rules"]


@functools.cache
def source_named(name: str) -> Source:
    """The source of that name; the same object for each call.  Raises `BadSource`."""
    if name in BUILT_IN_SOURCES:
        module, _, attribute = BUILT_IN_SOURCES[name].partition(":")
        made: Source = getattr(importlib.import_module(module), attribute)()
        return made
    check_source(name)
    return _loaded(name, next(one for one in metadata.entry_points(group=SOURCE_GROUP) if one.name == name))


@functools.cache
def source_of_rules(name: str, rules: str, folder: str) -> Source:
    """The source of that name, restricted to what a user's module gives it: `--source spmd_types --rules my_module`.

    Raises `BadSource` and `BadRules`.
    """
    source = source_named(name)
    if name == "dtensor" or not rules or rules == "dtensor":
        return source
    restricted = getattr(source, "of_module", None)
    if restricted is None:
        raise BadRules(rules, f"--source {name} takes no module", "Drop --rules.")
    module, home = rules_module(rules, folder)
    made: Source = restricted(
        import_user_module(module, home, lambda _, problem, remedy: BadRules(rules, problem, remedy))
    )
    return made


def _loaded(name: str, offered: metadata.EntryPoint) -> Source:
    try:
        made: Source = offered.load()()
    except BadSource:
        raise
    except Exception as error:  # why: a source is a package of others, whose import may raise anything
        problem = f"loading {offered.value} raises {error_in_one_line(error)}"
        raise BadSource(name, problem, "Fix that first, or uninstall it.") from error
    return made

import sys
from importlib import metadata

import pytest

from strategies.model import settings
from strategies.model.settings import BadRules, BadSource
from strategies.validation.sources.dtensor import DTensorSource
from strategies.validation.sources.registry import source_named, source_names, source_of_rules
from strategies.validation.sources.spmd_types import typed


def test_the_built_in_sources_are_known():
    assert source_names()[:3] == ("dtensor", "local_map", "spmd_types")
    assert isinstance(source_named("dtensor"), DTensorSource) and source_named("dtensor") is source_named("dtensor")


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(BadSource, match=r"--source: 'spmdtypes': no source has this name.* Did you mean spmd_types\?"):
        source_named("spmdtypes")
    with pytest.raises(BadSource, match=r"Choose of dtensor, local_map, spmd_types"):
        source_named("zzz")


@pytest.fixture
def offered(monkeypatch):
    """Lets a package offer a source."""

    def offer(value):
        found = metadata.EntryPoints([metadata.EntryPoint("third", value, settings.SOURCE_GROUP)])
        monkeypatch.setattr(settings.metadata, "entry_points", lambda group: found)
        source_named.cache_clear()

    yield offer
    source_named.cache_clear()


def test_a_package_offers_a_source_by_an_entry_point(offered):
    offered("strategies.validation.sources.dtensor:DTensorSource")
    assert "third" in source_names() and isinstance(source_named("third"), DTensorSource)


def test_a_source_that_cannot_be_loaded_is_refused_in_one_sentence(offered):
    offered("no_such_package:Source")
    with pytest.raises(BadSource, match="loading no_such_package:Source raises ModuleNotFoundError"):
        source_named("third")


def test_a_package_that_is_not_installed_is_refused_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "spmd_types", None)
    typed.package.cache_clear()
    source_named.cache_clear()
    with pytest.raises(BadSource, match=r"its package is not installed.* Run pip install 'localtensor\[spmd-types\]'"):
        source_named("spmd_types")
    typed.package.cache_clear()


def test_a_module_goes_only_with_sources_that_take_one(offered):
    offered("strategies.validation.sources.dtensor:DTensorSource")
    with pytest.raises(BadRules, match="--source third takes no module"):
        source_of_rules("third", "my_module", ".")
    assert source_of_rules("dtensor", "my_module", ".") is source_named("dtensor")

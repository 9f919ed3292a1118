"""A description of a cluster: which link an axis has, and one sentence for each thing that is wrong with it."""

import copy
import itertools
import json
import math
import os
from pathlib import Path

import pytest

from localtensor.errors import LocalTensorError
from localtensor.layout import NETWORK, Network
from localtensor.layout.links import BadNetwork
from localtensor.layout.mesh import Mesh
from strategies.planner.steps.prices import TOPOLOGY
from strategies.planner.steps.topology import BadTopology, Cluster, cluster_from_json, parse_topology, read_topology

INNER, OUTER, OWN = Network(1e-6, 1e-12), Network(2e-6, 2e-12), Network(3e-6, 3e-12)
EXAMPLE = Path(__file__).parents[4] / "docs/topology.json"
TOLD = {
    "ranks_per_node": 4,
    "inner": {"latency_us": 1, "gigabytes_per_second": 1000},
    "outer": {"latency_us": 2.5, "gigabytes_per_second": 12.5},
}


@pytest.mark.parametrize(("sizes", "per_node", "inside"), [
    ((4,), 4, [True]), ((8,), 4, [False]), ((2, 4), 4, [False, True]), ((2, 2, 2), 4, [False, True, True]),
    ((2, 4), 8, [True, True]), ((2, 3), 4, [False, False]), ((2, 2), 3, [False, False]), ((1, 4), 1, [True, False]),
    ((3, 2), 2, [False, True]), ((4, 2), 6, [False, True]),
])  # fmt: skip
def test_an_axis_whose_groups_stay_within_a_node_has_the_inner_link(sizes, per_node, inside):
    links = Cluster(per_node, INNER, OUTER).on(Mesh.of(*sizes)).links
    assert [link == INNER for link in links] == inside


def test_the_link_is_the_inner_one_exactly_where_no_group_has_ranks_of_two_nodes():
    for sizes in itertools.chain.from_iterable(itertools.product(range(1, 5), repeat=n) for n in (1, 2, 3)):
        mesh = Mesh.of(*sizes)
        for per_node in (1, 2, 3, 4, 6, 8, 100):
            nodes = [[{rank // per_node for rank in group} for group in mesh.groups(name)] for name in mesh.names]
            inside = [all(len(node) == 1 for node in groups) for groups in nodes]
            assert [link == INNER for link in Cluster(per_node, INNER, OUTER).on(mesh).links] == inside


def test_ranks_are_not_counted_one_by_one():
    links = Cluster(8, INNER, OUTER).on(Mesh.of(10**9, 2 * 10**9, 4)).links
    assert links == (OUTER, OUTER, INNER)


def test_an_axis_may_have_a_link_of_its_own_and_along_several_axes_the_slowest_counts():
    topology = Cluster(4, INNER, OUTER, (("tp", OWN),)).on(Mesh.of(dp=2, tp=4))
    assert topology.links == (OUTER, OWN)
    assert topology.link((0,)) == OUTER
    assert topology.link((0, 1)) == OWN
    assert topology.memory == TOPOLOGY.memory


def test_an_axis_that_the_mesh_has_not_is_refused_with_the_nearest_that_it_has():
    with pytest.raises(BadTopology, match=r"^topology: axes: tpp: there is no such name\. Did you mean tp\?$"):
        Cluster(4, INNER, OUTER, (("tpp", OWN),)).on(Mesh.of(dp=2, tp=4))


def test_a_file_says_the_same_as_python_does(tmp_path):
    file = tmp_path / "topology.json"
    file.write_text(json.dumps(TOLD | {"axes": {"tp": TOLD["inner"]}, "memory": TOLD["inner"]}))
    inner = Network(1e-6, 1e-12)
    assert read_topology(file) == Cluster(4, inner, Network(2.5e-6, 8e-11), (("tp", inner),), inner)
    assert parse_topology(str(file)) == read_topology(file)


def test_the_example_in_the_docs_is_one_and_orders_the_links_as_clusters_do():
    cluster = parse_topology(str(EXAMPLE))
    assert cluster.ranks_per_node == 8
    assert cluster.inner.latency < cluster.outer.latency
    assert cluster.memory.per_byte < cluster.inner.per_byte < cluster.outer.per_byte


def test_two_numbers_are_gigabytes_per_second_within_and_between_nodes():
    topology = parse_topology("300, 25").on(Mesh.of(dp=2, tp=8))
    assert [1 / link.per_byte for link in topology.links] == pytest.approx([25e9, 300e9])
    assert {link.latency for link in topology.links} == {NETWORK.latency}


WRONG = [
    (("ranks_per_node",), 0, "ranks_per_node: 0: it is no whole number of ranks"),
    (("ranks_per_node",), -8, "ranks_per_node: -8: it is no whole"),
    (("ranks_per_node",), 8.0, "ranks_per_node: 8.0: it is no whole"),
    (("ranks_per_node",), True, "ranks_per_node: True: it is no whole"),
    (("ranks_per_node",), "8", "ranks_per_node: '8': it is no whole"),
    (("ranks_per_node",), None, "ranks_per_node: None: it is no whole"),
    (("inner", "latency_us"), -3, "inner.latency_us: -3: a latency is a number of microseconds from 0 to"),
    (("inner", "latency_us"), math.nan, "inner.latency_us: nan: a latency"),
    (("inner", "latency_us"), math.inf, "inner.latency_us: inf: a latency"),
    (("outer", "latency_us"), "fast", "outer.latency_us: 'fast': a latency"),
    (("outer", "latency_us"), True, "outer.latency_us: True: a latency"),
    (("outer", "latency_us"), 10**400, "outer.latency_us: 1000"),
    (("outer", "gigabytes_per_second"), 0, "outer.gigabytes_per_second: 0: a bandwidth is a number of gigabytes"),
    (("outer", "gigabytes_per_second"), -1, "outer.gigabytes_per_second: -1: a bandwidth"),
    (("outer", "gigabytes_per_second"), 1e-300, "outer.gigabytes_per_second: 1e-300: a bandwidth"),
    (("outer", "gigabytes_per_second"), math.nan, "outer.gigabytes_per_second: nan: a bandwidth"),
    (("outer", "gigabytes_per_second"), math.inf, "outer.gigabytes_per_second: inf: a bandwidth"),
    (("outer", "gigabytes_per_second"), [25], "outer.gigabytes_per_second: [25]: a bandwidth"),
    (
        ("outer", "gigabyte_per_second"),
        25,
        "outer: gigabyte_per_second: there is no such name. Did you mean gigabytes_",
    ),
    (("outer",), 25, "outer: 25: it is no object. Write one with latency_us, gigabytes_per_second."),
    (("outer",), {"latency_us": 5}, "outer: {'latency_us': 5}: gigabytes_per_second is missing."),
    (("rank_per_node",), 8, "the whole: rank_per_node: there is no such name. Did you mean ranks_per_node?"),
    (("%%%",), 8, "the whole: %%%: there is no such name. Use ranks_per_node, inner, outer, axes, memory."),
    (("axes",), [], "axes: []: it is no object"),
    (("axes",), {"dp": 5}, "axes.dp: 5: it is no object"),
    (("axes",), {"d\ud800\n": 5}, "axes.'d\\ud800\\n': 5: it is no object"),
    (("memory",), None, "memory: None: it is no object"),
]


@pytest.mark.parametrize(("place", "value", "said"), WRONG, ids=[said[:40] for *_, said in WRONG])
def test_what_is_wrong_in_a_file_is_one_sentence_that_says_where(place, value, said, tmp_path):
    told = copy.deepcopy(TOLD)
    inner = told
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "topology.json").write_text(json.dumps(told))
    with pytest.raises(BadTopology) as caught:
        read_topology(tmp_path / "topology.json")
    assert str(caught.value).startswith(f"topology: {said}")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("missing", ["ranks_per_node", "inner", "outer"])
def test_what_is_missing_is_named(missing):
    with pytest.raises(
        BadTopology, match=rf": {missing} is missing\. Add it; docs/topology\.json is a complete example\.$"
    ):
        cluster_from_json({key: value for key, value in TOLD.items() if key != missing})


@pytest.mark.parametrize(("text", "said"), [
    (b"", "line 1 is no JSON (Expecting value)"),
    (b"{", "line 1 is no JSON (Expecting property name"),
    (b"\xff\xfe\x00", "it is no text in UTF-8"),
    (b"[" * 100_000, "it is nested too deep"),
    (b" " * 1_000_001, "it is longer than 1000000 bytes"),
    (b"9" * 5000, "it has a number of thousands of digits"),
    (b'{"inner": 1, "inner": 2}', "an object in it has 'inner' twice"),
])  # fmt: skip
def test_a_file_that_is_no_description_at_all_is_refused(text, said, tmp_path):
    file = tmp_path / "t.json"
    file.write_bytes(text)
    with pytest.raises(BadTopology) as caught:
        read_topology(file)
    assert str(caught.value).startswith(f"topology: {file}: file: {said}")


@pytest.mark.parametrize("text", ["[]", "1", "null", '"inner"', "NaN"])
def test_json_that_is_no_object_is_refused(text, tmp_path):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(BadTopology, match=r"the whole: .*: it is no object"):
        read_topology(tmp_path / "t.json")


def test_a_list_in_a_list_that_is_just_not_too_deep_is_shown_short(tmp_path):
    (tmp_path / "t.json").write_text("[" * 300 + "]" * 300)
    with pytest.raises(BadTopology, match=r"the whole: .*: it is no object"):
        read_topology(tmp_path / "t.json")


@pytest.mark.parametrize(("name", "why"), [
    ("missing.json", "No such file or directory"), (".", "Is a directory"), ("a\0b", "no file has a name with a null character"),
    ("x" * 300, "File name too long"), ("300,25,8", "No such file"), ("300", "No such file"), ("300,fast", "No such"),
])  # fmt: skip
def test_what_is_neither_a_file_nor_two_numbers_is_refused(name, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadTopology) as caught:
        parse_topology(name)
    assert f"it cannot be read ({why}" in str(caught.value)
    assert str(caught.value).endswith("Name a file of JSON, or write 300,25.")


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "t.json").chmod(0)
    with pytest.raises(BadTopology, match="Permission denied"):
        read_topology(tmp_path / "t.json")


@pytest.mark.parametrize("numbers", ["0,25", "-300,25", "300,nan", "inf,25", "300,1e-9", "300,0"])
def test_two_numbers_that_are_no_links_are_refused(numbers):
    with pytest.raises(BadTopology, match=r"^topology: (inner|outer) GB/s: .*: a bandwidth is a number of gigabytes"):
        parse_topology(numbers)


@pytest.mark.parametrize("value", [-1e-6, math.nan, math.inf, "5e-6", None, True, 1001])
@pytest.mark.parametrize("argument", ["latency", "per_byte"])
def test_a_link_in_python_is_checked_as_well(argument, value):
    with pytest.raises(BadNetwork) as caught:
        Network(**{argument: value})
    assert str(caught.value).startswith(f"Network: {argument}: {value!r}: this is no number of seconds")
    assert isinstance(caught.value, LocalTensorError)

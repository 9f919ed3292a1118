"""How plans print."""

from xml.etree import ElementTree as ET

import pytest

from localtensor._util.units import bytes_text, time_text
from strategies.planner.search.api import plan
from strategies.planner.steps.plan import placement_text
from strategies.planner.text.parser import read


def test_a_step_says_where_how_from_what_to_what_and_at_what_price():
    assert str(plan(*read("f32[1024,1024] @ dp=4: S(0) -> S(1)"))) == "dp: all-to-all S(0) -> S(1)  786.4 kB  77.9 us"
    assert str(plan(*read("f32[8] @ dp=4: R -> SS(0,2)"))) == "dp: local R -> SS(0,2)  1 us"


def test_a_step_along_several_axes_names_them_all():
    made = plan(*read("f32[64,4096] @ dp=4,tp=4: P(sum),P(sum) -> R,R"), flattened=[("dp", "tp")])
    lines = [str(step) for step in made.steps]
    assert any(line.startswith("dp,tp: ") for line in lines)
    assert all(
        line.partition(" -> ")[2].startswith(("R,R ", "S(0),S(0) ", "S(1),S(1) "))
        for line in lines
        if line.startswith("dp,tp")
    )


def test_turns_and_strided_shards_are_printed():
    src, dst = read("f32[8] @ dp=2,tp=2: S(0)[1],S(0)[0] -> SS(0,2),R")
    assert [placement_text(src, axis) for axis in (0, 1)] == ["S(0)[1]", "S(0)[0]"]
    assert placement_text(dst, 0) == "SS(0,2)"
    assert "S(0)[1] -> " in str(plan(src, dst))


def test_a_plan_without_steps_says_so():
    made = plan(*read("f32[8] @ dp=4: R -> R"))
    assert str(made) == "nothing to do" and made.total == "total: nothing to do"
    assert (made.sent, made.seconds, made.memory) == (0, 0.0, 0) and isinstance(made.seconds, float)
    assert len(made.stages) == 1 and made.stages[0].step == ""


def test_the_total_adds_up():
    made = plan(*read("f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)"))
    assert made.total == "total: 2 steps, 16.4 kB sent, 11.3 us, 49.2 kB in use at most"
    assert plan(*read("f32[64,64] @ dp=2: S(0) -> R")).total.startswith("total: 1 step, ")


def test_very_large_tensors_and_long_times():
    made = plan(*read("f64[1000000000,1000000] @ dp=1000: S(0) -> R"))
    assert "PB" in made.total and " h," in made.total
    assert bytes_text(999_949) == "999.9 kB" and bytes_text(999_950) == "1.0 MB" and bytes_text(999.4) == "999 B"
    assert time_text(0.0009994) == "999 us" and time_text(0.0009996) == "1.0 ms" and time_text(3600) == "1.0 h"
    assert time_text(12.3456e-6) == "12.3 us"


def test_the_stages_of_a_plan_are_what_a_picture_shows():
    made = plan(*read("f32[64,64] @ dp=2,tp=2: S(0),P(sum) -> R,S(0)"))
    assert [stage.spec for stage in made.stages] == [made.src, *(step.now for step in made.steps)]
    assert made.stages[-1].spec == made.dst
    assert [stage.axes for stage in made.stages[1:]] == [step.axes for step in made.steps]
    alone = plan(*read("f32[8] @ dp=4: R -> S(0)"))
    assert alone.stages[1].axes == ()


def test_a_notebook_shows_a_picture():
    drawn = plan(*read("f32[64,64] @ dp=2: S(0) -> R"))._repr_svg_()
    assert ET.fromstring(drawn).get("class") == "ltp"
    assert "f32[64,64] @ dp:S(0) -> dp:R" in "".join(ET.fromstring(drawn).itertext())


@pytest.mark.parametrize("shape", ["", "0", "1"])
def test_plans_of_hardly_anything_print(shape):
    made = plan(*read(f"f32[{shape}] @ dp=2,tp=1: P(sum),R -> R,P(sum)"))
    assert str(made) and made.total.startswith("total: ") and made._repr_svg_()

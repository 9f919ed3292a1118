import contextlib
import io
import random

import pytest

from strategies.planner.search.api import plan
from strategies.planner.text.options import BadPlanOption, plan_request
from strategies.planner.text.report import python_code

TEXT = "f32[64,64] @ dp=2,tp=2: S(0)[1],S(0)[0] -> P(sum),S(1)"


@pytest.mark.parametrize("options", [
    {},
    {"by": "bytes"},
    {"by": "torch", "memory": "1MB"},
    {"inner": "3,300", "outer": "5,25", "flattened": ["dp,tp"]},
    {"by": "bytes", "topology": "300,25"},
], ids=str)  # fmt: skip
def test_the_code_makes_the_same_plan(options):
    question = plan_request(TEXT, **options)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(python_code(question), {})
    made = plan(
        question.src, question.dst, question.price, topology=question.topology, memory=question.memory,
        flattened=question.flattened,
    )  # fmt: skip
    assert printed.getvalue() == f"{made}\n"


def test_the_code_of_random_questions_makes_the_same_plan():
    rng = random.Random(5)
    for _ in range(60):
        sizes = [rng.choice((1, 2, 3)) for _ in range(rng.choice((1, 2, 3)))]
        was, now = (",".join(rng.choice(("R", "S(0)", "S(1)", "SS(0,2)", "P(max)")) for _ in sizes) for _ in "12")
        text = f"f32[{rng.choice((0, 5, 64))},7] @ {','.join(map(str, sizes))}: {was} -> {now}"
        question = plan_request(text, by=rng.choice(("time", "bytes", "torch")), topology=rng.choice((None, "300,25")))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(python_code(question), {})
        made = plan(question.src, question.dst, question.price, topology=question.topology)
        assert printed.getvalue() == f"{made}\n", text


def test_a_price_of_ones_own_is_no_value(tmp_path, monkeypatch):
    (tmp_path / "code_price.py").write_text("def price(move):\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadPlanOption, match=r"^plan: --code: --by code_price:price: a price of your own"):
        python_code(plan_request(TEXT, by="code_price:price"))

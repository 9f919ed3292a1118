from dataclasses import replace

from localtensor._util.html_page import xml_safe
from strategies.gate.formats.wording import accepted_keys, fingerprint, kinds_text, stale_remedy, what_happens
from strategies.torch_api.user_modules import SINGLE_DIM_FIRST
from tests.strategies.gate_cases import FULL, GONE, finding, key, new, unasked


def test_what_happens_names_ranks_call_reason_and_example():
    assert what_happens(new(finding())) == (
        "on 2 ranks, cumprod(f64[2], -1): differs at [0]: got 1, expected 2; seen on real gloo processes"
    )
    assert what_happens(new(finding(confirmed_on=None))).endswith("got 1, expected 2")


def test_a_registration_that_is_never_asked_speaks_of_no_ranks():
    (judged,) = unasked().findings
    assert what_happens(judged) == SINGLE_DIM_FIRST
    assert kinds_text(judged.keys) == "any dtypes on any mesh"


def test_a_fingerprint_tells_every_part_of_a_key_apart_and_knows_nothing_else():
    one = key(finding())
    others = [
        replace(one, op="aten.cumsum.default"), replace(one, rule="R -> R"), replace(one, dtypes="bool"),
        replace(one, mesh="2 axes"),
    ]  # fmt: skip
    assert fingerprint(one) == "ebcdeecb7a5cf0382fa1fdc665b75bda"
    assert len({fingerprint(k) for k in (one, *others)}) == 5
    assert fingerprint(replace(one, op=f"{one.op}\n{one.rule}")) != fingerprint(one)


def test_accepted_keys_come_once_and_in_order():
    assert [(k.dtypes, why) for k, why in accepted_keys(FULL)] == [
        ("bool", "reported upstream, 100 % known"),
        ("real", "for good"),
    ]


def test_a_stale_entry_says_what_to_do():
    assert stale_remedy(GONE) == (
        "aten.sort.default: S(0) -> S(0) (real, 1 axis) no longer shows: remove it from the baseline "
        "(localtensor gate --update)"
    )


def test_what_xml_cannot_hold_is_marked_and_the_rest_stays():
    assert xml_safe("a\x00b\x1b\ud800\ufffe\tü\n") == "a\ufffdb\ufffd\ufffd\ufffd\tü\n"


def test_classes_and_meshes_are_listed():
    found = finding()
    assert kinds_text((key(found), key(found, "bool", "2 axes"))) == "real on 1 axis, bool on 2 axes"

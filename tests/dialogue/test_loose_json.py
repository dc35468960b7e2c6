"""JSON passes as it is, what is nearly JSON becomes it, and what is cut can be completed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_mlx.dialogue.calls import as_object, dumps
from dflash2_mlx.dialogue.loose_json import MAX_DEPTH, LooseJson, Run

FLOATS = st.floats(allow_nan=False, allow_infinity=False)  # JSON knows no others
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), FLOATS, st.text()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def written(text: str) -> tuple[str, LooseJson, Run]:
    pieces: list[str] = []
    value = LooseJson(pieces.append)
    run = Run(value.whole())
    run.feed(text)
    return "".join(pieces), value, run


@settings(max_examples=50, deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 2]), ascii_only=st.booleans())
def test_json_passes_unchanged(value: object, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=ascii_only)
    strict, _, run = written(text)
    assert strict == text
    assert run.ended


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("{}[]\"',:\\ \n1-eutrNa")))
def test_whatever_was_written_can_be_completed(text: str) -> None:
    strict, value, _ = written("{" + text)
    assert isinstance(json.loads(strict + value.ending()), dict)
    if ending := value.ending():
        assert json.loads(strict + value.ending(raw=text))["raw"] == text
        assert ending


@pytest.mark.parametrize(
    ("text", "strict"),
    [
        ("{'a': 'say \"hi\"', 'b': 'it\\'s',}", '{"a": "say \\"hi\\"", "b": "it\'s"}'),
        ('["\\d\\u12x\\n\\/"]', '["\\\\d\\\\u12x\\n\\/"]'),
        ("[True, None, -Infinity, NaN, false]", "[true, null, null, null, false]"),
        ('{"a": "tab\there"}', '{"a": "tab\\there"}'),
        ("[1, 2 , ]", "[1, 2 ]"),
    ],
)
def test_what_is_nearly_json_becomes_it(text: str, strict: str) -> None:
    out, _, run = written(text)
    assert (out, run.ended) == (strict, True)
    json.loads(out)


@pytest.mark.parametrize(
    "text", ["{a: 1}", "[1 2]", "[,]", "[01]", "[+1]", "{1: 2}", '{"a" 1}', "[nul]", "[" * 99]
)
def test_what_is_not_stops_the_reader(text: str) -> None:
    out, value, run = written(text)
    assert run.broken
    json.loads(out + value.ending() or "null")
    assert run.feed("more") == 0


def test_depth_is_bounded() -> None:
    assert written("[" * MAX_DEPTH + "]" * MAX_DEPTH)[2].ended
    assert written("[" * (MAX_DEPTH + 1))[2].broken


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"a": {1}}, '{"a": "{1}"}'),
        ({"a": float("nan")}, '{"a": null}'),
        ({"a": "NaN"}, '{"a": "NaN"}'),
        ({"a": "\ud800"}, '{"a": "\\ud800"}'),
        ({"ä": "漢"}, '{"ä": "漢"}'),
        (None, "{}"),
        ("", "{}"),
        ('{"a": 1}', '{"a": 1}'),
        ("x", '{"raw": "x"}'),
        ([1], '{"raw": "[1]"}'),
    ],
)
def test_arguments_are_always_an_object(arguments: object, text: str) -> None:
    assert as_object(arguments) == text
    assert isinstance(json.loads(text), dict)


def test_names_of_numbers_inside_strings_stay() -> None:
    assert dumps(["NaN", 1]) == '["NaN", 1]'

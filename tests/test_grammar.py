"""A grammar that cannot be used is refused in one line that names what is wrong."""

from typing import Any

import pytest
from byte_bpe import byte_bpe
from tiny import END, VOCAB, ByteTokenizer

from dflash2_mlx import SamplingParams
from dflash2_mlx.constraint import Constraint, grammar_tokenizer
from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.grammar import MAX_FAULT, Grammar


def constraint(grammar: Grammar) -> Constraint:
    return Constraint(grammar, grammar_tokenizer(byte_bpe(), VOCAB, {END}), VOCAB)


def after(grammar: Grammar, text: str) -> Constraint:
    """The constraint behind a text, read byte by byte."""
    found = constraint(grammar)
    found.commit(list(text.encode()))
    return found


SCHEMAS: list[tuple[dict[str, Any], str]] = [
    ({"type": "strin"}, "Invalid type: strin"),
    ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
    ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"if": {}, "then": {}}, 'Unimplemented keys: ["if", "then"]'),
    ({"$ref": "#/$defs/nowhere"}, "'/$defs/nowhere' does not exist"),
    ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
    ({"type": "string", "format": "colour"}, "Unknown format: colour"),
    ({"type": "string", "pattern": "(a"}, "unclosed group"),
    ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a' is unsatisfiable"),
]


@pytest.mark.parametrize(("schema", "told"), SCHEMAS)
def test_a_schema_that_cannot_be_obeyed_is_named_with_or_without_a_model(
    schema: dict[str, Any], told: str
) -> None:
    for use in (Grammar.check, constraint):
        with pytest.raises(InvalidRequest) as refusal:
            use(Grammar.json_schema(schema))
        line = str(refusal.value)
        assert line.startswith("the JSON schema cannot be used: ")
        assert told in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("", "not JSON"),
        ("{'a': 1}", "not JSON"),
        ('{"minimum": Infinity}', "not JSON"),
        ({"enum": [object()]}, "not JSON"),
        ({"enum": [float("nan")]}, "not JSON"),
        ("true", "is a bool, expected an object"),
        ('["object"]', "is a list, expected an object"),
    ],
)
def test_a_schema_that_is_no_json_object_is_refused(schema: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^the JSON schema .*{told}"):
        Grammar.json_schema(schema)


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar.regex("(a"), r"regular expression cannot be used: .*unclosed group"),
        (Grammar.regex("a" + 3 * "\\"), r"lone backslash"),
        (Grammar.regex(r"\bword"), r"lookarounds not supported"),
        (Grammar.lark(""), r"Lark grammar cannot be used: Empty grammar"),
        (Grammar.lark("begin: /a/"), r"no start rule found"),
        (Grammar.lark('start: "a" nowhere'), r'unknown name: "nowhere"'),
        (Grammar.lark('start: "a'), r"lexer error"),
        (Grammar.lark("start: a\na[temperature=2]: /x/"), r"a rule sets a temperature"),
    ],
)
def test_what_is_no_regex_or_lark_grammar_is_refused_in_one_line(
    grammar: Grammar, told: str
) -> None:
    for use in (Grammar.check, constraint):
        with pytest.raises(InvalidRequest, match=told) as refusal:
            use(grammar)
        assert "\n" not in str(refusal.value)
        assert "^" not in str(refusal.value)


@pytest.mark.parametrize("value", [{"type": "object"}, "a+"])
def test_what_is_no_grammar_is_no_sampling_field(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar is a (dict|str), expected a Grammar"):
        SamplingParams(grammar=value)


def test_a_token_that_only_the_tokenizer_knows_of_is_named_and_the_line_stays_short() -> None:
    grammar = Grammar.lark("start: <|nowhere|>")
    grammar.check()
    with pytest.raises(InvalidRequest, match=r'"<.nowhere.>".*\.\.\.$') as refusal:
        constraint(grammar)
    assert len(str(refusal.value)) < MAX_FAULT + 60


def test_an_even_number_of_backslashes_is_a_backslash() -> None:
    assert after(Grammar.regex(r"a\\"), "a\\").complete


def test_a_grammar_that_outgrows_the_matcher_is_an_error_and_no_end() -> None:
    grammar = Grammar.regex("((a{1,1000}b?){1,1000}c?){1,1000}")
    grammar.check()
    told = r"^the regular expression cannot be used: lexer error: too many expressions"
    with pytest.raises(InvalidRequest, match=told) as refusal:
        read_on(constraint(grammar), b"aababab" * 40)
    assert "<state>" not in str(refusal.value)


def read_on(found: Constraint, text: bytes) -> None:
    for token in text:
        found.masks()
        found.commit([token])


def test_any_object_is_an_object_and_nothing_else() -> None:
    assert after(Grammar.json_object(), '{"a":[1,{"b":null}],"":-2.5e3}').complete
    assert not after(Grammar.json_object(), '{"a":[1').complete
    for other in ("[", '"', "1", " "):
        assert not allows(constraint(Grammar.json_object()), ord(other))


def test_json_has_no_spare_whitespace_even_if_the_schema_asks_for_it() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    assert not allows(after(Grammar.json_schema(schema), "{"), ord(" "))


def allows(found: Constraint, token: int) -> bool:
    return bool(found.masks()[0][token // 32] >> token % 32 & 1)


def test_an_answer_is_complete_where_it_may_end() -> None:
    grammar = Grammar.regex("ab(cd)?")
    states = {text: after(grammar, text).complete for text in ("", "a", "ab", "abc", "abcd")}
    assert states == {"": False, "a": False, "ab": True, "abc": False, "abcd": True}
    ended = after(grammar, "ab")
    ended.commit([END])
    assert ended.complete


def test_a_tokenizer_that_llguidance_cannot_read_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer allows no grammar: Only fast"):
        grammar_tokenizer(ByteTokenizer(), VOCAB, {END})


@pytest.mark.parametrize("ends", [set(), {VOCAB + 5}, {END + 20}])
def test_a_model_without_an_end_token_is_refused(ends: set[int]) -> None:
    with pytest.raises(InvalidRequest, match="eos_token list must not be empty"):
        grammar_tokenizer(byte_bpe(), VOCAB, ends)


def test_end_tokens_that_a_tokenizer_lacks_do_not_matter() -> None:
    assert grammar_tokenizer(byte_bpe(), VOCAB, {END, VOCAB - 1, 10**6}).eos_tokens == [END]


def test_a_tokenizer_larger_than_the_embedding_is_cut_to_it() -> None:
    rows = END + 2
    found = Constraint(Grammar.regex("bc|x"), grammar_tokenizer(byte_bpe(), rows, {END}), rows)
    allowed = found.allowed(found.masks())
    assert allowed.shape == (1, rows)
    assert [token for token, is_allowed in enumerate(allowed[0].tolist()) if is_allowed] == [
        ord("b"),
        ord("x"),
    ]

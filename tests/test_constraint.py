"""The promise: an answer held to a grammar obeys it, and drafting changes none of its tokens."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import families
import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from byte_bpe import byte_bpe
from tiny import END, VOCAB, ScriptedDrafter, pair_of, tiny_drafter, tiny_pair, tiny_target

from dflash2_mlx import SamplingParams, generate, stream_generate
from dflash2_mlx.chooser import Chooser
from dflash2_mlx.constraint import Constraint, grammar_tokenizer
from dflash2_mlx.decode import FORCED_ROWS, Conversation, decode
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.grammar import Grammar
from dflash2_mlx.models.selector import Trellis
from dflash2_mlx.pair import Pair, join
from dflash2_mlx.randomness import Randomness
from dflash2_mlx.target import Target

PROMPT = list(b"A prompt that is longer than every window.")
NUM_TOKENS = 60
BLOCKS = [2, 3, 4, 8, 16]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["bcd", "bd", "bdbd"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "s": {"type": "string", "maxLength": 6},
    },
    "required": ["name", "n", "s"],
    "additionalProperties": False,
}
REGEX = r"(a|bc|bd){3,9}, [0-9]{2,4}"
LARK = """
start: item "," item "!"
item: "name" | /[a-d]{2,5}/
"""
GRAMMARS = {
    "schema": Grammar.json_schema(SCHEMA),
    "regex": Grammar.regex(REGEX),
    "lark": Grammar.lark(LARK),
}


def obeys(name: str, text: str) -> bool:
    """Whether a text obeys, by other means than the engine's."""
    if name == "schema":
        return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))
    pattern = REGEX if name == "regex" else r"(name|[a-d]{2,5}),(name|[a-d]{2,5})!"
    return re.fullmatch(pattern, text) is not None


def fresh(grammar: Grammar, tokens: Sequence[int] = ()) -> Constraint:
    """A constraint that has read tokens."""
    constraint = Constraint(grammar, grammar_tokenizer(byte_bpe(), VOCAB, {END}), VOCAB)
    constraint.commit(list(tokens))
    return constraint


def held(pair: Pair) -> Pair:
    """The pair with the tokenizer that grammars know."""
    pair.tokenizer = byte_bpe()
    return pair


def run(pair: Pair, grammar: Grammar, block: int, max_tokens: int = NUM_TOKENS, **fields: Any):
    params = SamplingParams(grammar=grammar, **fields)
    return generate(pair, PROMPT, params, max_tokens=max_tokens, block_size=block)


@cache
def truth(name: str) -> tuple[int, ...]:
    """The greedy ids of plain decoding."""
    return run(held(pair_of(Target(tiny_target()))), GRAMMARS[name], 1).token_ids


def start(pair: Pair, grammar: Grammar, **fields: Any) -> Conversation:
    """A conversation behind the prompt, held to a grammar."""
    params, constraint = SamplingParams(**fields), held(pair).constraint(grammar)
    chooser = Chooser(params, Randomness.from_seed(0), VOCAB, constraint)
    conversation = Conversation(pair.target, pair.drafter, chooser)
    conversation.prefill(PROMPT)
    return conversation


def test_masks_are_the_language() -> None:
    """Against a language that is enumerated here, behind each of its beginnings."""
    texts = [x + y for x in ("a", "bc", "bd") for y in ("a", "bc", "bd")]
    pieces = {"a": 97, "b": 98, "c": 99, "d": 100, "bc": 260, "bd": 261}
    assert {piece: byte_bpe().convert_tokens_to_ids(piece) for piece in pieces} == pieces
    for text in {whole[:end] for whole in texts for end in range(len(whole) + 1)}:
        may_follow = {
            token
            for piece, token in pieces.items()
            if any(whole.startswith(text + piece) for whole in texts)
        }
        constraint = fresh(Grammar.regex("(a|bc|bd){2}"), list(text.encode()))
        allowed = np.flatnonzero(np.array(constraint.allowed(constraint.masks())[0]))
        assert set(allowed.tolist()) == (may_follow or {END})


@pytest.mark.parametrize("kind", ["dense", "sliding"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_random_drafter_changes_nothing(name: str, kind: str) -> None:
    pair = held(tiny_pair(kind))
    plain = run(pair, GRAMMARS[name], 1)
    assert plain.finish_reason == "stop"
    assert obeys(name, plain.text)
    for block in BLOCKS:
        assert run(pair, GRAMMARS[name], block).token_ids == plain.token_ids


@pytest.mark.parametrize("name", GRAMMARS)
def test_sampled_answers_obey_and_vary(name: str) -> None:
    pair = held(tiny_pair(selector_top_k=VOCAB // 2))
    answers = [
        run(pair, GRAMMARS[name], block, temperature=1.0, seed=seed)
        for seed, block in enumerate([1, 2, 4, 8] * 2)
    ]
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert all(obeys(name, answer.text) for answer in answers)
    assert len({answer.token_ids for answer in answers}) > 4
    assert any(answer.tokens_per_pass > 1 for answer in answers)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "deepseek_v41"])
def test_recurrent_and_undraftable_targets_obey(family: str) -> None:
    drafter = tiny_drafter()
    pair = held(pair_of(join(families.build(family), drafter), drafter))
    plain, drafted = (run(pair, GRAMMARS["schema"], block) for block in (1, 4))
    assert obeys("schema", plain.text)
    assert drafted.token_ids == plain.token_ids
    assert (drafted.tokens_per_pass > 1) == (pair.target.undraftable is None)


Script = Callable[[Sequence[int], int], Sequence[int]]
SCRIPTS: dict[str, Script] = {
    "always right": lambda drafts, at: drafts,
    "never obeys": lambda drafts, at: [250] * len(drafts),
    "proposes end tokens": lambda drafts, at: [END] * len(drafts),
    "right, then never obeys": lambda drafts, at: [*drafts[:2], *[250] * len(drafts)][
        : len(drafts)
    ],
    "right, then ends": lambda drafts, at: [*drafts[:1], *[END] * len(drafts)][: len(drafts)],
    "obeys and is wrong": lambda drafts, at: others(at, len(drafts)),
    "right, then obeys and is wrong": lambda drafts, at: [
        *drafts[:1],
        *others(at + 1, max(0, len(drafts) - 1)),
    ],
}


def others(at: int, count: int) -> list[int]:
    """Tokens that obey where they are drafted but are not the target's, where there are such."""
    ids, drafts = truth("regex"), []
    constraint = fresh(GRAMMARS["regex"], ids[:at])
    for place in range(at, at + count):
        allowed = np.flatnonzero(np.array(constraint.allowed(constraint.masks())[0])).tolist()
        target = ids[place] if place < len(ids) and not drafts else None
        drafts.append(next((token for token in allowed if token != target), allowed[0]))
        if constraint.complete:
            return [*drafts, *[END] * count][:count]
        constraint.commit([drafts[-1]])
    return drafts


def scripted_pair(script: Script) -> Pair:
    ids = truth("regex")

    def propose(position: int, width: int) -> Sequence[int]:
        at = position + 1 - len(PROMPT)
        return script([*ids[at : at + width - 1], *[0] * width][: width - 1], at)

    return held(pair_of(Target(tiny_target(), taps=[0]), ScriptedDrafter(propose)))


def steps_of(conversation: Conversation, block: int):
    return decode(conversation, lambda: block, max_tokens=NUM_TOKENS, end_tokens=frozenset({END}))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_behind_every_step_the_grammar_stands_where_the_answer_does(
    script: str, block: int
) -> None:
    conversation = start(scripted_pair(SCRIPTS[script]), GRAMMARS["regex"])
    emitted: list[int] = []
    for step in steps_of(conversation, block):
        emitted += step.tokens
        expected = fresh(GRAMMARS["regex"], emitted).masks()
        assert np.array_equal(conversation.chooser.constraint.masks(), expected)
    assert tuple(emitted) == truth("regex")


def test_the_scripts_do_what_they_say() -> None:
    shares = {}
    for name, script in SCRIPTS.items():
        steps = list(steps_of(start(scripted_pair(script), GRAMMARS["regex"]), 4))
        shares[name] = (sum(step.drafted for step in steps), sum(step.from_draft for step in steps))
    assert shares["always right"][0] == shares["always right"][1] > 6
    assert shares["never obeys"][0] <= shares["proposes end tokens"][0] < 4
    for name in ("obeys and is wrong", "right, then obeys and is wrong"):
        drafted, stood = shares[name]
        assert drafted > stood + 6


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_closing_early_leaves_the_grammar_where_the_answer_is(num_steps: int) -> None:
    conversation = start(scripted_pair(SCRIPTS["obeys and is wrong"]), GRAMMARS["regex"])
    steps = steps_of(conversation, 4)
    emitted = [token for _ in range(num_steps) for token in next(steps).tokens]
    steps.close()
    expected = fresh(GRAMMARS["regex"], emitted).masks()
    assert np.array_equal(conversation.chooser.constraint.masks(), expected)
    rest = [token for step in steps_of(conversation, 3) for token in step.tokens]
    assert (*emitted, *rest) == truth("regex")


@pytest.mark.parametrize("block", [1, 2, 8])
def test_an_answer_ends_where_its_grammar_does(block: int) -> None:
    pair = scripted_pair(SCRIPTS["proposes end tokens"])
    result = run(pair, Grammar.regex("ab?"), block)
    assert result.token_ids[-1] == END
    assert result.text in ("a", "ab")
    assert result.finish_reason == "stop"


def test_an_end_token_is_drafted_where_the_grammar_may_end() -> None:
    """`a+` can always end, and this drafter knows when."""
    ids = run(held(pair_of(Target(tiny_target()))), Grammar.regex("(a|b|c){2,9}"), 1).token_ids
    first = len(PROMPT) - 1
    drafter = ScriptedDrafter(lambda at, width: [*ids[at - first :], *[0] * width][: width - 1])
    pair = held(pair_of(Target(tiny_target(), taps=[0]), drafter))
    result = run(pair, Grammar.regex("(a|b|c){2,9}"), 16)
    assert result.token_ids == ids
    assert result.passes == 2


SENTENCE = "Once upon a time, nothing was left to choose."


def test_what_is_forced_is_drafted_without_the_drafter() -> None:
    drafter = ScriptedDrafter(lambda at, width: [0] * (width - 1))
    pair = held(pair_of(Target(tiny_target(), taps=[0]), drafter))
    result = run(pair, Grammar.regex(re.escape(SENTENCE)), 8)
    assert result.text == SENTENCE
    assert drafter.widths == []
    assert result.accepted[0] == FORCED_ROWS
    assert set(result.accepted[1:-1]) == {8}
    assert result.from_draft[: FORCED_ROWS + 8] == (
        *[True] * (FORCED_ROWS - 1),
        False,
        *[True] * 7,
        False,
    )


def test_forced_tokens_are_drafted_where_the_tuner_parks_the_drafter() -> None:
    drafter = ScriptedDrafter(lambda at, width: [0] * (width - 1))
    pair = held(pair_of(Target(tiny_target(), taps=[0]), drafter))
    constraint = fresh(Grammar.regex(re.escape(SENTENCE)))
    chooser = Chooser(SamplingParams(), Randomness.from_seed(0), VOCAB, constraint)
    conversation = Conversation(pair.target, pair.drafter, chooser)
    conversation.prefill(PROMPT)
    steps = [*decode(conversation, lambda: 1, max_tokens=99, end_tokens=pair.end_tokens)]
    assert {len(step.tokens) for step in steps[:-1]} == {FORCED_ROWS}
    assert all(step.forced and step.pass_s is None for step in steps[:-1])
    assert drafter.widths == []


def test_what_is_forced_behind_a_draft_is_drafted_with_it() -> None:
    drafter = ScriptedDrafter(lambda at, width: [ord("a"), *[0] * (width - 2)])
    pair = held(pair_of(Target(tiny_target(), taps=[0]), drafter))
    biased = {ord("a"): 50.0}
    result = run(pair, Grammar.regex("(a|b)(a|b), and so on"), 8, logit_bias=biased)
    assert result.text == "aa, and so on"
    assert result.accepted[:2] == (1, 8)
    assert drafter.widths == [8]


class Trellises(ScriptedDrafter):
    """Proposes a trellis of its own making."""

    def __init__(self, make: Callable[[int], Trellis]) -> None:
        super().__init__(lambda at, width: [0] * (width - 1))
        self.make = make

    def propose(self, context: Any, taps: Any, anchor: mx.array, width: int) -> Trellis:
        super().propose(context, taps, anchor, width)
        return self.make(width - 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [mx.nan, mx.inf, -mx.inf])
def test_scores_that_are_not_numbers_cost_speed_only(temperature: float, value: float) -> None:
    candidates = mx.arange(VOCAB, dtype=mx.uint32)

    def make(num_rows: int) -> Trellis:
        scores = mx.full((num_rows, VOCAB, VOCAB), value)
        return Trellis(mx.broadcast_to(candidates, (num_rows, VOCAB)), scores)

    pair = held(pair_of(Target(tiny_target(), taps=[0]), Trellises(make)))
    result = run(pair, GRAMMARS["regex"], 4, temperature=temperature, seed=1)
    assert obeys("regex", result.text)
    if temperature == 0:
        assert result.token_ids == truth("regex")


FIELDS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {97: 3.0, 260: -2.0, 98: -50.0}},
    "repetition": {"repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.6},
    "all": {
        "logit_bias": {97: 3.0},
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "penalty_context": 5,
    },
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_hold_inside_a_grammar_as_in_plain_decoding(name: str) -> None:
    pair = held(tiny_pair(selector_top_k=VOCAB // 2))
    plain = run(pair, GRAMMARS["regex"], 1, **FIELDS[name])
    assert obeys("regex", plain.text)
    assert plain.token_ids != truth("regex")
    for block in BLOCKS:
        assert run(pair, GRAMMARS["regex"], block, **FIELDS[name]).token_ids == plain.token_ids


def test_log_probabilities_are_those_of_plain_decoding_among_tokens_that_obey() -> None:
    pair = held(tiny_pair(selector_top_k=VOCAB // 2))
    plain, drafted = (run(pair, GRAMMARS["schema"], block, logprobs=3) for block in (1, 4))
    assert plain.logprobs is not None
    assert drafted.logprobs is not None
    for place, (ours, theirs) in enumerate(zip(drafted.logprobs, plain.logprobs, strict=True)):
        constraint = fresh(GRAMMARS["schema"], plain.token_ids[:place])
        allowed = np.flatnonzero(np.array(constraint.allowed(constraint.masks())[0])).tolist()
        assert {token for token, _ in theirs.top} <= set(allowed)
        assert len(theirs.top) == min(3, len(allowed))
        assert theirs.top[0] == (plain.token_ids[place], pytest.approx(theirs.logprob))
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=1e-3)
    assert any(len(entry.top) == 1 and entry.logprob == 0.0 for entry in plain.logprobs)


@pytest.mark.parametrize("tolerance", [0.5, 5.0])
def test_near_ties_inside_a_grammar_get_passes_of_their_own(tolerance: float) -> None:
    conversation = start(held(tiny_pair(selector_top_k=VOCAB // 2)), GRAMMARS["regex"])
    conversation.chooser._tolerance = tolerance
    steps = list(steps_of(conversation, 4))
    assert tuple(token for step in steps for token in step.tokens) == truth("regex")
    assert any(step.in_doubt for step in steps)
    assert any(step.from_draft for step in steps)


@pytest.mark.parametrize("block", [1, 2, 8])
def test_a_stop_string_ends_an_answer_inside_its_grammar(block: int) -> None:
    result = run(held(tiny_pair()), GRAMMARS["schema"], block, stop=('","n',))
    assert result.finish_reason == "stop"
    assert result.text == '{"name":"bd'


@pytest.mark.parametrize("block", [1, 4])
def test_an_answer_that_runs_out_of_tokens_is_incomplete(block: int) -> None:
    whole = truth("schema")
    for max_tokens in (1, 7, len(whole) - 2, len(whole) - 1, len(whole)):
        generation = stream_generate(
            held(tiny_pair()),
            PROMPT,
            SamplingParams(grammar=GRAMMARS["schema"]),
            max_tokens=max_tokens,
            block_size=block,
        )
        reason = [step.finish_reason for step in generation][-1]
        assert generation.result.token_ids == whole[:max_tokens]
        assert reason == ("stop" if max_tokens == len(whole) else "length")
        assert generation.incomplete == (max_tokens < len(whole) - 1)


def test_an_answer_without_a_grammar_is_never_incomplete() -> None:
    generation = stream_generate(tiny_pair(), PROMPT, max_tokens=2)
    assert [step.finish_reason for step in generation][-1] == "length"
    assert not generation.incomplete


@pytest.mark.parametrize("block", [1, 4])
def test_a_target_whose_scores_are_not_numbers_is_an_error_and_no_answer(block: int) -> None:
    model = families.build("llama")
    model.lm_head.weight = model.lm_head.weight * mx.nan
    drafter = ScriptedDrafter(lambda at, width: [ord("a")] * (width - 1))
    pair = pair_of(Target(model, taps=[0]), drafter)
    conversation = start(pair, GRAMMARS["regex"], temperature=1.0)
    with pytest.raises(DFlashError, match=r"^token \d+ does not obey the regular expression"):
        list(steps_of(conversation, block))
    assert {cache.offset for cache in conversation.caches} == {conversation.length}

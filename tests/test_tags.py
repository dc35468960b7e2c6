"""Tags that a tokenizer declares as special tokens still reach whoever reads the answer."""

import importlib
from typing import Any

import pytest
from byte_bpe import byte_bpe
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken

from dflash2_mlx.tags import tag_ids
from dflash2_mlx.text import TextReader, special_ids


def tokenizer_of(tokens: list[str], style: str | None, **options: Any) -> TokenizerWrapper:
    inner = byte_bpe.__wrapped__()
    inner.add_tokens([AddedToken(token, special=True) for token in tokens])
    if style is None:
        return TokenizerWrapper(inner, **options)
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{style}")
    start, end = parser.tool_call_start, parser.tool_call_end
    found = TokenizerWrapper(inner, tool_call_start=start, tool_call_end=end, **options)
    found._tool_parser = parser.parse_tool_call
    return found


CALLS = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
}


@pytest.mark.parametrize("style", CALLS)
def test_tags_of_calls_show_and_other_special_tokens_do_not(style: str) -> None:
    said = "".join(f"a{tag}b" for tag in CALLS[style])
    tokenizer = tokenizer_of([*CALLS[style], "<|image|>"], style)
    assert len(tag_ids(tokenizer)) == len(CALLS[style])
    ids = tokenizer.encode(f"{said}<|image|><end>")
    assert TextReader(tokenizer).read(ids).text == said


def test_tags_of_thoughts_and_headers_show() -> None:
    from mlx_lm.chat_templates.muse_spark import RESPONSE_FORMAT

    thinker = tokenizer_of(["<think>", "</think>"], None)
    assert len(tag_ids(thinker)) == 2
    assert TextReader(thinker).read(thinker.encode("<think>a</think>b")).text == "<think>a</think>b"
    muse = tokenizer_of(["<|message|>", "<|eom|>"], None, response_format=RESPONSE_FORMAT)
    assert len(tag_ids(muse)) == 2


def test_a_tokenizer_without_tags_hides_all_that_is_special() -> None:
    plain = tokenizer_of(["[TOOL_CALLS]"], None)
    assert tag_ids(plain) == frozenset()
    assert special_ids(plain) == {plain.eos_token_id, plain.convert_tokens_to_ids("[TOOL_CALLS]")}


def test_end_tokens_stay_hidden_even_if_they_are_tags() -> None:
    tokenizer = tokenizer_of(list(CALLS["pythonic"]), "pythonic")
    end = tokenizer.convert_tokens_to_ids("<|tool_call_end|>")
    assert TextReader(tokenizer, hidden={end}).read([97, end]).text == "a"

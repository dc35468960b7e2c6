"""Tags of thoughts and tool calls: special tokens that carry meaning for who reads an answer."""

from collections.abc import Iterator
from typing import Any

# Inside calls; the outer tags are the tokenizer's own to name.
INNER = (
    "[ARGS]",
    "[CALL_ID]",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    '<|"|>',
    "<escape>",
    "<arg_key></arg_key><arg_value></arg_value>",
    "<longcat_arg_key></longcat_arg_key><longcat_arg_value></longcat_arg_value>",
)


def tag_ids(tokenizer: Any) -> frozenset[int]:
    """Special tokens that are, or are part of, a tag which mlx-lm knows for this tokenizer."""
    marks = list(_marks(tokenizer))
    if not marks:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(
        id_
        for id_, token in added.items()
        if token.special and any(token.content in mark for mark in marks)
    )


def _marks(tokenizer: Any) -> Iterator[str]:
    for name in ("think_start", "think_end", "tool_call_start", "tool_call_end"):
        if mark := getattr(tokenizer, name, None):
            yield mark
    if getattr(tokenizer, "tool_call_start", None):
        yield from INNER
    yield from getattr(tokenizer, "structural_markers", ())
    for transitions in getattr(tokenizer, "response_transitions", {}).values():
        yield from (mark for mark, _ in transitions)

"""An agent's session replayed to a pair, with its prompt states and without: does reuse change
anything, and what does it spare?"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from dflash2_mlx.dialogue.events import Ask, Message, Tool
from dflash2_mlx.dialogue.heard import Heard
from dflash2_mlx.dialogue.prompt import prepare
from dflash2_mlx.generation import Result, stream_generate
from dflash2_mlx.pair import Pair
from dflash2_mlx.prefix_cache import PrefixCache
from dflash2_mlx.server.ahead import read_on

TRANSCRIPT = "agent_transcript.jsonl"


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: its ids, tokens of each pass, and what of its prompt was read when."""

    ids: tuple[int, ...]
    accepted: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    read_ahead: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Replay:
    """All turns of a session."""

    turns: list[Turn]

    @property
    def num_read(self) -> int:
        """Tokens that were prefilled, those read ahead included."""
        return sum(turn.prompt_tokens - turn.cached_tokens + turn.read_ahead for turn in self.turns)

    @property
    def tokens_per_pass(self) -> float:
        """Over all turns."""
        passes = [count for turn in self.turns for count in turn.accepted]
        return sum(passes) / max(1, len(passes))


def session() -> tuple[list[Message], tuple[Tool, ...]]:
    """The shipped session: 30 answers of an agent with tools, long results and thoughts."""
    lines = (files("dflash2_mlx.models") / TRANSCRIPT).read_text("utf-8").splitlines()
    first, *messages = [json.loads(line) for line in lines]
    return messages, tuple(Tool(**tool) for tool in first["tools"])


def replay(
    pair: Pair,
    messages: Sequence[Message],
    tools: tuple[Tool, ...],
    *,
    max_tokens: int,
    block_size: int,
    warm: bool,
    progress: Callable[[Turn], None] = lambda turn: None,
) -> Replay:
    """Let the pair answer at every place where the session has an answer, and go on with that one.

    `warm` keeps prompt states in the pair's prefix cache; without, every prompt is read whole, in
    the same chunks. `progress` hears of every turn.
    """
    kept = pair.prefix_cache or PrefixCache(2**40)
    turns = []
    try:
        for place in answers(messages):
            ask = Ask(messages=tuple(messages[:place]), tools=tools, max_tokens=max_tokens)
            pair.prefix_cache = kept  # marks are only looked for where states are kept
            prepared = prepare(pair, ask)
            pair.prefix_cache = kept if warm else None
            generation = stream_generate(
                pair,
                prepared.ids,
                prepared.sampling,
                max_tokens=max_tokens,
                block_size=block_size,
                marks=prepared.marks,
            )
            for _ in generation:
                pass
            ahead = _read_on(pair, ask, messages[place], block_size) if warm else 0
            turns.append(_turn(generation.result, ahead))
            progress(turns[-1])
    finally:
        pair.prefix_cache = kept
    return Replay(turns)


def answers(messages: Sequence[Message]) -> Iterator[int]:
    """Where a session has its answers."""
    return (place for place, message in enumerate(messages) if message["role"] == "assistant")


@dataclass(frozen=True, slots=True)
class SecondTurn:
    """The first token of a second turn, behind so many tokens of context."""

    context_tokens: int
    cold_s: float
    warm_s: float


def second_turn(pair: Pair, context_tokens: int, question: str, block_size: int) -> SecondTurn:
    """Time a second turn cold and warm; its context is text repeated up to so many tokens."""
    kept = pair.prefix_cache
    long = [{"role": "user", "content": _filler(pair, context_tokens)}]
    asked = [
        *long,
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": question},
    ]
    seconds = {}
    for warm in (False, True):
        pair.prefix_cache = PrefixCache(2**40)
        if warm:
            _first_token_s(pair, long, block_size)
        seconds[warm] = _first_token_s(pair, asked, block_size)
    pair.prefix_cache = kept
    return SecondTurn(context_tokens, seconds[False], seconds[True])


def _first_token_s(pair: Pair, messages: Sequence[Message], block_size: int) -> float:
    started = time.perf_counter()
    ask = Ask(messages=tuple(messages), max_tokens=1)
    prepared = prepare(pair, ask)
    generation = stream_generate(
        pair,
        prepared.ids,
        prepared.sampling,
        max_tokens=1,
        block_size=block_size,
        marks=prepared.marks,
    )
    next(generation)
    seconds = time.perf_counter() - started
    generation.close()
    return seconds


def _filler(pair: Pair, num_tokens: int) -> str:
    words: list[str] = []
    while len(pair.encode(" ".join(words))) < num_tokens:
        words += [f"Line {len(words)} of a long text about nothing much."] * 8
    return " ".join(words)


def _read_on(pair: Pair, ask: Ask, message: Message, block_size: int) -> int:
    """As the server does behind an answer, here with the session's own."""
    heard = Heard(message["content"], message.get("reasoning_content", ""))
    heard.calls = [_flat(call) for call in message.get("tool_calls", ())]
    return read_on(pair, ask, heard, block_size, lambda done, total: None)


def _flat(call: dict[str, Any]) -> dict[str, Any]:
    return {"id": call["id"], **call["function"]}


def _turn(result: Result, read_ahead: int) -> Turn:
    return Turn(
        result.token_ids,
        result.accepted,
        result.prompt_tokens,
        result.cached_tokens,
        read_ahead,
        result.ttft_s,
    )

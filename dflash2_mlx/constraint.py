"""Answers that obey a grammar: a JSON schema, a regular expression or a Lark grammar.

llguidance says which tokens may come next. A draft is walked on the host, so that every drafted
token obeys; the rows of the verify pass are masked with the state before each draft. Tokens that
the grammar forces are drafted without asking the drafter.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from dflash2_mlx.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to obey, from its first token to its last."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """JSON that validates; raises `InvalidRequest` when the schema is no JSON object."""
        try:
            loaded = json.loads(schema) if isinstance(schema, str) else dict(schema)
        except ValueError as error:
            raise InvalidRequest(f"json_schema is not JSON: {error}") from None
        if not isinstance(loaded, dict):
            raise InvalidRequest(f"json_schema is a {type(loaded).__name__}, expected an object")
        return cls("json_schema", json.dumps(loaded))

    def compiled(self) -> str:
        """The grammar as llguidance takes it; JSON comes without spare whitespace."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.source)
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(self.source)
        return LLMatcher.grammar_from_json_schema(
            self.source, overrides={"whitespace_flexible": False}
        )


@dataclass(frozen=True, slots=True)
class Walk:
    """Drafted tokens that obey, what they were drawn from, and the masks of L = T + 1 rows."""

    tokens: list[int]
    q: np.ndarray  # [T, K] float32
    masks: np.ndarray  # [L, words] uint32, a bit for each token


class Constraint:
    """Where one answer stands in its grammar; raises `InvalidRequest` for what is no grammar."""

    def __init__(
        self, grammar: Grammar, tokenizer: Any, vocab_size: int, end_tokens: Collection[int]
    ) -> None:
        from llguidance import LLMatcher

        compiled = grammar.compiled()
        if fault := LLMatcher.validate_grammar(compiled, tokenizer):
            raise InvalidRequest(f"{grammar.kind}: {' '.join(fault.split())}")
        self._matcher = LLMatcher(tokenizer, compiled)
        self._vocab_size = vocab_size
        self._only_end = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        for token in end_tokens:
            self._only_end[token // 32] |= np.uint32(1 << token % 32)

    def masks(self) -> np.ndarray:
        """The mask of the next token, as one row."""
        return self._mask()[None]

    def commit(self, tokens: list[int]) -> None:
        """Go on by tokens that were emitted."""
        self._matcher.try_consume_tokens(tokens)

    def forced(self, limit: int) -> Walk | None:
        """Up to `limit` tokens that the grammar leaves no choice about, or None."""
        tokens = self._matcher.compute_ff_tokens()[:limit]
        if not tokens:
            return None
        steps = iter(tokens)
        return self._walk(len(tokens), lambda row, before, mask: (0, next(steps), np.ones(1)))

    def walk(
        self, candidates: np.ndarray, scores: np.ndarray, noise: np.ndarray, temperature: float
    ) -> Walk:
        """Walk a trellis `[T, K]`, `[T, K, K]` over candidates that obey, as far as there are any.

        Greedy at temperature 0; else a draw with Gumbel `noise` `[T, K]`.
        """

        def step(row: int, before: int, mask: np.ndarray) -> tuple[int, int, np.ndarray] | None:
            obeys = _bits(mask, candidates[row]) & np.isfinite(scores[row, before])
            if not obeys.any():
                return None
            weights = np.where(obeys, scores[row, before], -np.inf)
            if temperature > 0:
                weights = weights / temperature
            chosen = int(np.argmax(weights + noise[row] * (temperature > 0)))
            odds = np.exp(weights - weights[obeys].max())
            return chosen, int(candidates[row, chosen]), odds / odds.sum()

        return self._walk(len(candidates), step)

    def _walk(self, num_rows: int, step: Any) -> Walk:
        """Draft row by row, then leave the matcher where it was."""
        tokens: list[int] = []
        odds: list[np.ndarray] = []
        masks, before = [self._mask()], 0
        for row in range(num_rows):
            if self._matcher.is_stopped() or (found := step(row, before, masks[-1])) is None:
                break
            before, token, q = found
            if not self._matcher.try_consume_tokens([token]):
                break
            tokens.append(token)
            odds.append(q)
            masks.append(self._mask())
        self._matcher.rollback(len(tokens))
        q_rows = np.array(odds, dtype=np.float32) if odds else np.zeros((0, 1), dtype=np.float32)
        return Walk(tokens, q_rows, np.stack(masks))

    def _mask(self) -> np.ndarray:
        if self._matcher.is_stopped():
            return self._only_end
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        return words[: len(self._only_end)]

    def allowed(self, masks: np.ndarray) -> mx.array:
        """Masks `[L, words]` as booleans `[L, V]` on the device."""
        bits = (mx.array(masks)[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
        return bits.reshape(len(masks), -1)[:, : self._vocab_size].astype(mx.bool_)


def _bits(mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return (mask[tokens // 32] >> (tokens % 32).astype(np.uint32) & 1).astype(bool)


def grammar_tokenizer(tokenizer: Any, vocab_size: int, end_tokens: Collection[int]) -> Any:
    """llguidance's view of a tokenizer; takes about a second, so keep it.

    Raises `InvalidRequest` for a tokenizer without a fast implementation.
    """
    from llguidance.hf import from_tokenizer

    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    try:
        return from_tokenizer(inner, n_vocab=vocab_size, eos_token=sorted(end_tokens))
    except ValueError as error:
        raise InvalidRequest(f"this model's tokenizer allows no grammar: {error}") from None

"""Answers that obey a grammar, while drafting.

llguidance says which tokens may come next. A draft is walked on the host, so that every drafted
token obeys; the rows of the verify pass are masked with the state before each draft. Tokens that
the grammar forces are drafted without asking the drafter.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dflash2_mlx.errors import DFlashError, InvalidRequest
from dflash2_mlx.grammar import Grammar

# From a row, the index chosen in the row before, and a mask: an index into candidates, and q.
Choose = Callable[[int, int, np.ndarray], tuple[int, np.ndarray] | None]


@dataclass(frozen=True, slots=True)
class Walk:
    """T drafted tokens that obey, what they were drawn from, and the masks of L = T + 1 rows."""

    tokens: list[int]
    candidates: np.ndarray  # [T, K] uint32
    q: np.ndarray  # [T, K] float32
    masks: np.ndarray  # [L, words] uint32, a bit for each token


class Constraint:
    """Where one answer stands in its grammar; `tokenizer` is what `grammar_tokenizer` gives.

    Raises `InvalidRequest` for what is no grammar, and later where llguidance gives up on one.
    """

    def __init__(self, grammar: Grammar, tokenizer: Any, vocab_size: int) -> None:
        self._grammar = grammar
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = frozenset(tokenizer.eos_tokens)
        self._only_end = np.zeros(-(-vocab_size // 32), dtype=np.uint32)
        for token in self._end_tokens:
            self._only_end[token // 32] |= np.uint32(1 << token % 32)
        self._committed: list[int] = []
        self._matcher = self._fresh_matcher()
        self._raise_error()

    @property
    def complete(self) -> bool:
        """Whether the answer obeys as it is, were it to end here."""
        return self._matcher.is_stopped() or self._matcher.is_accepting()

    def masks(self) -> np.ndarray:
        """The mask of the next token, as one row."""
        mask = self._mask()
        if mask is None:
            self._matcher = self._fresh_matcher()
            mask = self._mask()
        if mask is None:
            raise self._grammar.fault(self._matcher.get_error())
        return mask[None]

    def commit(self, tokens: list[int]) -> None:
        """Go on by tokens that were emitted, which may end in an end token."""
        num_read = self._matcher.try_consume_tokens(tokens)
        if self._matcher.is_error():
            self._matcher = self._fresh_matcher()
            num_read = _read_plainly(self._matcher, tokens)
        self._raise_error()
        left = tokens[num_read:]
        if left and not (self._matcher.is_stopped() and self._end_tokens.issuperset(left)):
            raise DFlashError(
                f"token {left[0]} does not obey the {self._grammar.name}, and was emitted all the "
                "same: the model's scores are not numbers; try --dtype float32"
            )
        self._committed += tokens

    def forced(self, limit: int) -> Walk:
        """Up to `limit` tokens that the grammar leaves no choice about, often none."""
        nothing = np.zeros((limit, 1), dtype=np.uint32)
        return self._walk(nothing, lambda row, before, mask: None)

    def walk(
        self, candidates: np.ndarray, scores: np.ndarray, noise: np.ndarray, temperature: float
    ) -> Walk:
        """Walk a trellis `[T, K]`, `[T, K, K]` over candidates that obey, as far as there are any.

        Greedy at temperature 0; else a draw with Gumbel `noise` `[T, K]`. Where the grammar leaves
        no choice, its token is taken, whatever the candidates.
        """

        def choose(row: int, before: int, mask: np.ndarray) -> tuple[int, np.ndarray] | None:
            obeys = _bits(mask, candidates[row]) & np.isfinite(scores[row, before])
            if not obeys.any():
                return None
            weights = np.where(obeys, scores[row, before], -np.inf).astype(np.float64)
            if temperature > 0:
                weights = weights / temperature
            chosen = int(np.argmax(weights + noise[row] * (temperature > 0)))
            odds = np.exp(weights - weights.max())
            return chosen, odds / odds.sum()

        return self._walk(candidates, choose)

    def _walk(self, candidates: np.ndarray, choose: Choose) -> Walk:
        """Draft row by row, then leave the matcher where it was."""
        candidates, q = candidates.copy(), np.zeros(candidates.shape, dtype=np.float32)
        tokens: list[int] = []
        masks, before = [*self.masks()], 0
        for row, line in enumerate(candidates):
            if self._matcher.is_stopped():
                break
            only = _only(masks[-1])
            chosen = choose(row, before, masks[-1]) if only is None else _placed(only, line)
            if chosen is None:
                break
            before, q[row] = chosen
            if (mask := self._mask_behind(int(line[before]))) is None:
                break
            tokens.append(int(line[before]))
            masks.append(mask)
        if self._matcher.is_error():
            self._matcher = self._fresh_matcher()
        else:
            self._matcher.rollback(len(tokens))
        return Walk(tokens, candidates[: len(tokens)], q[: len(tokens)], np.stack(masks))

    def _mask_behind(self, token: int) -> np.ndarray | None:
        return self._mask() if self._matcher.try_consume_tokens([token]) else None

    def _mask(self) -> np.ndarray | None:
        """The mask of the next token; None when the matcher gave up.

        A matcher that gave up allows only end tokens: the answer would end as if it were whole.
        """
        if self._matcher.is_stopped():
            return None if self._matcher.is_error() else self._only_end
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        return None if self._matcher.is_error() else words[: len(self._only_end)]

    def _fresh_matcher(self) -> Any:
        # One that gave up on a draft never recovers. This one has seen only what was emitted, so
        # it gives up where plain decoding would.
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, self._grammar.compiled(), log_level=0)
        _read_plainly(matcher, self._committed)
        return matcher

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise self._grammar.fault(self._matcher.get_error())

    def allowed(self, masks: np.ndarray) -> mx.array:
        """Masks `[L, words]` as booleans `[L, V]` on the device."""
        bits = (mx.array(masks)[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
        return bits.reshape(len(masks), -1)[:, : self._vocab_size].astype(mx.bool_)


def _read_plainly(matcher: Any, tokens: list[int]) -> int:
    """Read tokens with a mask before each, as plain decoding does; returns how many were read."""
    for count, token in enumerate(tokens):
        matcher.compute_bitmask()
        if not matcher.try_consume_tokens([token]):
            return count
    return len(tokens)


def _bits(mask: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return (mask[tokens // 32] >> (tokens % 32).astype(np.uint32) & 1).astype(bool)


def _only(mask: np.ndarray) -> int | None:
    """The one token that a mask allows, if it is one."""
    if np.bitwise_count(mask).sum() != 1:
        return None
    word = int(np.flatnonzero(mask)[0])
    return 32 * word + int(mask[word]).bit_length() - 1


def _placed(token: int, candidates: np.ndarray) -> tuple[int, np.ndarray]:
    """Where a token is among the candidates of a row, put there if it is not, and q for it."""
    found = np.flatnonzero(candidates == token)
    index = int(found[0]) if found.size else 0
    candidates[index] = token
    return index, np.arange(len(candidates)) == index


def grammar_tokenizer(tokenizer: Any, vocab_size: int, end_tokens: Collection[int]) -> Any:
    """llguidance's view of a tokenizer; takes about a second, so keep it.

    Raises `InvalidRequest` for a tokenizer without a fast implementation or an end token.
    """
    from llguidance.hf import from_tokenizer
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    inner = tokenizer._tokenizer if isinstance(tokenizer, TokenizerWrapper) else tokenizer
    ids = set(inner.get_vocab().values()) if hasattr(inner, "get_vocab") else set()
    size = max(ids | {vocab_size - 1}) + 1
    ends = sorted(token for token in ids & set(end_tokens) if token < vocab_size)
    try:
        return from_tokenizer(inner, n_vocab=size, eos_token=ends)
    except Exception as error:  # the two libraries raise several kinds
        raise InvalidRequest(f"this model's tokenizer allows no grammar: {error}") from None

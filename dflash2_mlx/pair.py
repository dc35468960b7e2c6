"""A target with its drafter and tokenizer, loaded once; embedding and head are shared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx

from dflash2_mlx.catalogue import load_catalogue
from dflash2_mlx.chip import this_chip
from dflash2_mlx.constraint import Constraint, grammar_tokenizer
from dflash2_mlx.defaults import merged, sampling_defaults
from dflash2_mlx.drafters import drafter_in_precision
from dflash2_mlx.errors import InvalidRequest, PairMismatch
from dflash2_mlx.fetch import Progress, drafter_folder, target_folder
from dflash2_mlx.folders import read_object, revision_of
from dflash2_mlx.grammar import Grammar
from dflash2_mlx.machine import check_folders
from dflash2_mlx.models.drafter import Drafter
from dflash2_mlx.models.few_rows import speed_up_few_rows
from dflash2_mlx.precision import check_drafter_bits, check_dtype, set_target_precision
from dflash2_mlx.prefix_cache import PrefixCache
from dflash2_mlx.priors import prior_curve
from dflash2_mlx.rounding import dtype_name
from dflash2_mlx.sampling import SamplingParams
from dflash2_mlx.target import Target, most_bits, parameters
from dflash2_mlx.targets import load_target
from dflash2_mlx.tuning import SEPARATOR, Store, Tuning, tuning_key

if TYPE_CHECKING:
    from dflash2_mlx.budget import Guard

# MLX's wide quantized kernel reads the weights once for up to 5 rows (mlx quantized.cpp, qmv_wide).
MAX_QUANTIZED_BLOCK = 5
MAX_BLOCK = 64
NO_LIMIT = 2**31 - 1

BlockSize = Literal["auto"] | int
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Effective:
    """The state in force, shown wherever the user could wonder."""

    target: str
    drafter: str | None
    target_bits: int
    drafter_bits: int | None
    block_size: int
    drafting: bool
    reason: str
    seed: int | None = None

    def describe(self) -> str:
        """One line."""
        drafter = f"{self.drafter} ({self.drafter_bits}-bit)" if self.drafter else "none"
        state = "on" if self.drafting else "off"
        return (
            f"target {self.target} ({self.target_bits}-bit), drafter {drafter}, "
            f"drafting {state}: {self.reason}"
        )


class Pair:
    """What `load_pair` gives: `.target`, `.drafter` (or None), `.tokenizer`.

    `.default_sampling` is what the target's maker recommends; `sampling` puts a request on top.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tokenizer: Any,
        *,
        name: str = "target",
        drafter_name: str | None = None,
        end_tokens: frozenset[int] = frozenset(),
        context_limit: int = NO_LIMIT,
        why_plain: str = "no drafter was named",
        notes: tuple[str, ...] = (),
        default_sampling: SamplingParams | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.name = name
        self.drafter_name = drafter_name
        self.end_tokens = end_tokens
        self.context_limit = context_limit
        self.notes = notes
        self.tuning: Tuning | None = None
        self.prefix_cache: PrefixCache | None = None  # set one, and prompts are not read again
        self.guard: Guard | None = None  # lets in what fits into memory
        self.prefill_step: int | None = None  # tokens read at once, None for the default
        self.revisions: tuple[str, ...] = (name,)  # of target and drafter: name and version each
        self.default_sampling = default_sampling or SamplingParams()
        self._why_plain = why_plain
        self._grammar_tokenizer: Any = None

    @property
    def drafter_limit(self) -> int:
        """Tokens that the drafter's positions reach; beyond them decoding is plain."""
        return NO_LIMIT if self.drafter is None else self.drafter.config.max_position_embeddings

    @property
    def draft_block(self) -> int:
        """Rows that a draft fills at least, however few of them are verified."""
        return 1 if self.drafter is None else self.drafter.draft_block

    @property
    def state_key(self) -> str:
        """Names all that a state depends on besides its tokens."""
        parts = [f"mlx {version('mlx')}", *self.revisions]
        parts.append(f"{self.target.bits}-bit {dtype_name(self.target.dtype)}")
        if self.drafter is not None:
            parts.append(f"{most_bits(self.drafter)}-bit {dtype_name(self.drafter.dtype)}")
        if self.target.kv_bits is not None:
            parts.append(f"{self.target.kv_bits}-bit keys and values")
        return SEPARATOR.join(parts)

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, with the tokenizer's own start token."""
        return list(self.tokenizer.encode(text))

    def encode_chat(self, messages: str | Sequence[Message], **template: Any) -> list[int]:
        """Token ids of a conversation, up to where the answer starts; a str is one user turn.

        `template` are variables of the chat template, such as `tools` and `enable_thinking`.
        Raises `InvalidRequest` when the model has no chat template or its template refuses.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not getattr(self.tokenizer, "chat_template", None) and not getattr(
            self.tokenizer, "has_chat_template", False
        ):
            raise InvalidRequest(f"{self.name} has no chat template; send raw text (--raw)")
        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages), **{"add_generation_prompt": True, **template}
            )
        except Exception as error:  # templates are programs and raise what they like
            raise InvalidRequest(f"the chat template of {self.name} refused: {error}") from None
        return list(ids)

    def sampling(self, **given: Any) -> SamplingParams:
        """Sampling fields for a request: those given, else the model's own, else greedy.

        None is not given, a zero is. Raises `InvalidRequest` for a field or value that is none.
        """
        params = merged(self.default_sampling, given)
        params.check_vocabulary(self.target.vocab_size)
        return params

    def effective(self, block_size: BlockSize = "auto") -> Effective:
        """What will run for this block size; raises `InvalidRequest` for an impossible one."""
        check_block_size(block_size)
        drafter, why_plain = self.drafter, self._why_plain
        if drafter is not None and self.target.undraftable:
            drafter, why_plain = None, self.target.undraftable
        if drafter is not None and block_size == 1:
            drafter, why_plain = None, "block size 1 is plain decoding"
        size, reason = (1, why_plain) if drafter is None else self._block(drafter, block_size)
        return Effective(
            target=self.name,
            drafter=self.drafter_name if self.drafter is not None else None,
            target_bits=self.target.bits,
            drafter_bits=None if self.drafter is None else most_bits(self.drafter),
            block_size=size,
            drafting=drafter is not None,
            reason=reason,
        )

    def constraint(self, grammar: Grammar) -> Constraint:
        """A fresh constraint for one answer; raises `InvalidRequest` for a grammar that is none."""
        vocab_size = self.target.vocab_size
        if self._grammar_tokenizer is None:
            self._grammar_tokenizer = grammar_tokenizer(self.tokenizer, vocab_size, self.end_tokens)
        return Constraint(grammar, self._grammar_tokenizer, vocab_size)

    def make_drafter_safer(self) -> bool:
        """Let the drafter compute in float32; False when it does already, or there is none."""
        if self.drafter is None or self.drafter.dtype == mx.float32:
            return False
        self.drafter.set_dtype(mx.float32)
        return True

    def _block(self, drafter: Drafter, block_size: BlockSize) -> tuple[int, str]:
        trained = drafter.config.block_size
        if block_size != "auto":
            beyond = f", beyond the {trained} it was trained for" if block_size > trained else ""
            return block_size, f"block {block_size} as asked{beyond}"
        if self.tuning is not None:
            return self.tuning.first_block()
        if self.target.quantized and trained > MAX_QUANTIZED_BLOCK:
            return MAX_QUANTIZED_BLOCK, (
                f"block {MAX_QUANTIZED_BLOCK} of the drafter's {trained}: "
                "more rows read quantized weights twice"
            )
        return trained, f"block {trained}, the drafter's own"


def check_block_size(block_size: BlockSize) -> None:
    """Raise `InvalidRequest` unless it is `auto` or a number of rows a pass can have."""
    is_number = isinstance(block_size, int) and not isinstance(block_size, bool)
    if block_size != "auto" and not (is_number and 1 <= int(block_size) <= MAX_BLOCK):
        raise InvalidRequest(
            f"block size is {block_size!r}, expected auto or a number from 1 (plain decoding) "
            f"to {MAX_BLOCK}"
        )


def load_pair(
    target: str,
    drafter: str | Literal[False] | None = None,
    *,
    drafter_bits: int | None = None,
    draft_block: int | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> Pair:
    """Load a target with its drafter.

    `target` and `drafter` are catalogue names, hub ids (`owner/name[@revision]`) or folders.
    `drafter` None takes the catalogue's for this target, False takes none. `dtype` of the target
    is auto (default), stored, float32 or bfloat16; `drafter_bits` are 4, 8, 16 or None (by size
    and chip). The drafter fills `draft_block` rows however few are verified, None: as many as are
    verified. Raises a `DFlashError` naming what does not fit: `OutOfMemory` before anything large
    is read.
    """
    why_plain = "turned off (--no-draft)"
    if drafter is None:
        drafter = target if target in load_catalogue() else False
        why_plain = "no drafter is known for this target; name one with --drafter"
    dtype = dtype or "auto"
    check_dtype(dtype)
    check_drafter_bits(drafter_bits)
    if drafter is False:
        _check_no_drafter_needed(drafter_bits=drafter_bits, draft_block=draft_block)
    folder = target_folder(target, progress=progress)
    check_folders(folder)
    read = load_target(folder)
    default_sampling, default_notes = sampling_defaults(folder)
    precision = set_target_precision(read.model, dtype, this_chip())
    notes = [*read.notes, *default_notes, precision]
    revisions = [f"{target} {revision_of(folder)}"]
    if drafter is False:
        wrapped, loaded, drafter_name = Target(read.model), None, None
    else:
        draft_folder = drafter_folder(drafter, progress=progress)
        check_folders(folder, draft_folder)
        loaded = drafter_in_precision(draft_folder, drafter_bits, this_chip(), progress)
        wrapped = _fitted(read.model, read.tokenizer, loaded, draft_folder)
        drafter_name = _drafter_name(drafter)
        revisions.append(f"{drafter_name} {revision_of(draft_folder)}")
        if draft_block is not None:
            notes.append(set_draft_block(loaded, draft_block))
        notes.extend(loaded.notes)
        if wrapped.undraftable:
            notes.append(f"drafting is off: {wrapped.undraftable}")
    pair = Pair(
        wrapped,
        loaded,
        read.tokenizer,
        name=target,
        drafter_name=drafter_name,
        end_tokens=end_tokens(read.tokenizer, folder),
        context_limit=int(_config(folder).get("max_position_embeddings") or NO_LIMIT),
        why_plain=why_plain,
        notes=tuple(note for note in notes if note),
        default_sampling=default_sampling,
    )
    pair.revisions = tuple(revisions)
    pair.tuning = _tuning(pair)
    return pair


def _tuning(pair: Pair) -> Tuning | None:
    """The pair's tuner, with what this machine knows about it."""
    if pair.drafter is None or pair.target.undraftable:
        return None
    chip, target, drafter = this_chip(), pair.target, pair.drafter
    head = target.embedding.weight.nbytes
    share = (sum(array.nbytes for array in parameters(drafter).values()) + head) / target.nbytes
    guess = prior_curve(chip, target.bits, drafter.config.block_size, share)
    dtypes = dtype_name(target.dtype), dtype_name(drafter.dtype)
    bits = f"{target.bits}-bit {dtypes[0]} with {most_bits(drafter)}-bit {dtypes[1]}"
    if drafter.draft_block > 1:
        bits += f", {drafter.draft_block} rows drafted"
    key = tuning_key(chip, pair.revisions[0], pair.revisions[-1], bits)
    return Tuning(key, guess, quantized=target.quantized, store=Store())


def set_draft_block(drafter: Drafter, rows: int) -> str:
    """Let every draft fill this many rows; in words what that means.

    Raises `InvalidRequest` for more than the drafter was trained for, or none to draft.
    """
    trained = drafter.config.block_size
    if not 2 <= rows <= trained:
        raise InvalidRequest(
            f"draft block is {rows}, expected 2 to {trained}, which the drafter was trained for"
        )
    drafter.draft_block = rows
    return f"every draft fills {rows} rows, however few of them are checked"


def _fitted(model: Any, tokenizer: Any, drafter: Drafter, folder: Path) -> Target:
    """The target joined with a drafter that speaks its tokens."""
    speed_up_few_rows(model, this_chip())
    speed_up_few_rows(drafter, this_chip())
    target = join(model, drafter)
    _check_vocabulary(folder, tokenizer)
    return target


def join(model: Any, drafter: Drafter) -> Target:
    """The target for a drafter: taps set, embedding and head shared; raises `PairMismatch`."""
    target = Target(model)
    drafter.config.check_target(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
    )
    head, dtype = target.head, target.dtype
    drafter.bind(target.embedding, lambda hidden: head(hidden.astype(dtype)))
    return Target(model, drafter.config.target_layer_ids)


def end_tokens(tokenizer: Any, folder: Path) -> frozenset[int]:
    """The union of what tokenizer, config and generation_config call the end."""
    ends = set(getattr(tokenizer, "eos_token_ids", ()))
    for name in ("config.json", "generation_config.json"):
        content = read_object(folder / name)
        for table in (content, content.get("text_config") or {}):
            ids = table.get("eos_token_id")
            ends.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(ends)


def with_seed(effective: Effective, seed: int) -> Effective:
    """The same state with the seed in force."""
    return replace(effective, seed=seed)


def _check_no_drafter_needed(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidRequest(f"{option} is {value}, but no drafter runs; name one (--drafter)")


def _check_vocabulary(folder: Path, tokenizer: Any) -> None:
    """Where the drafter brings a tokenizer, its ids must mean the same texts."""
    if not (folder / "tokenizer.json").exists():
        return
    from tokenizers import Tokenizer

    theirs = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    ours = tokenizer.get_vocab()
    for text, token in theirs.items():
        if ours.get(text) != token:
            raise PairMismatch(
                f"the drafter's tokenizer has {text!r} as token {token}, the target's as "
                f"{ours.get(text)}; they do not belong together"
            )


def _drafter_name(drafter: str) -> str:
    entry = load_catalogue().get(drafter)
    return drafter if entry is None else entry.drafter


def _config(folder: Path) -> dict[str, Any]:
    config = read_object(folder / "config.json")
    return {**config, **(config.get("text_config") or {})}

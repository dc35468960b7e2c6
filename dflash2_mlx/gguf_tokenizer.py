"""The tokenizer of a GGUF file, rebuilt as the files that transformers and mlx-lm read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_mlx.errors import BadCheckpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

Metadata = dict[str, Any]

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "\u2581"  # SentencePiece writes a space like this

# As in the tokenizer.json of Llama 3 and of Qwen 2.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"|\p{N}" + _REST


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, chat template included.

    Raises:
        BadCheckpoint: the tokenizer is of a kind not known here, or is inconsistent.
    """
    try:
        build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
        config = tokenizer_config(metadata)
    except BadCheckpoint:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise BadCheckpoint(
            f"the tokenizer in the GGUF metadata is broken: {type(error).__name__}: {error}"
        ) from error
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """What tokenizer.json has no place for: names of the special tokens, and the chat template."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name in _SPECIAL:
        if (text := _token(metadata, name)) is not None:
            config[f"{name}_token"] = text
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config


def end_ids(metadata: Metadata) -> list[int]:
    """The ids that end a generation: end of text and, where the file names one, end of turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({metadata[key] for key in keys if key in metadata})


def build_tokenizer(metadata: Metadata) -> "Tokenizer":
    """The tokenizer that the metadata describes, special tokens and BOS rule included."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise BadCheckpoint(
            f"tokenizer.ggml.model is {kind!r}, only {', '.join(_BUILDERS)} are read; "
            "use a model in mlx-lm's format"
        )
    tokenizer = _BUILDERS[kind](metadata)
    _add_special_tokens(tokenizer, metadata)
    _add_borders(tokenizer, metadata)
    return tokenizer


def _byte_level(metadata: Metadata) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    name = metadata.get("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise BadCheckpoint(
            f"tokenizer.ggml.pre is {name!r}, only {', '.join(_PRE_TOKENIZERS)} are read; "
            "use a model in mlx-lm's format"
        )
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2() -> "PreTokenizer":
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> "PreTokenizer":
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> "PreTokenizer":
    from tokenizers import Regex, pre_tokenizers

    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), to_bytes])


_PRE_TOKENIZERS: dict[str, Callable[[], "PreTokenizer"]] = {
    "gpt-2": _gpt2,
    "default": _gpt2,
    "smollm": _single_digits,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}


def _sentencepiece(metadata: Metadata) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges_from_scores(vocab, metadata["tokenizer.ggml.scores"])
    unk = _token(metadata, "unk")
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tail: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: a pair of pieces merges as early as its union scores high."""
    ranked = [
        (-scores[i], vocab[token[:cut]], vocab[token[cut:]], (token[:cut], token[cut:]))
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [pair for *_, pair in sorted(ranked)]


_BUILDERS: dict[str, Callable[[Metadata], "Tokenizer"]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _add_special_tokens(tokenizer: "Tokenizer", metadata: Metadata) -> None:
    from tokenizers import AddedToken

    typed = zip(
        metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True
    )
    for text, kind in typed:
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(text, special=False, normalized=False)])


def _add_borders(tokenizer: "Tokenizer", metadata: Metadata) -> None:
    """Begin and end of text around every encoded text, where the file asks for them."""
    from tokenizers import processors

    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", _adds_bos_by_default(metadata))
    borders = {
        "bos": adds_bos and _token(metadata, "bos"),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False) and _token(metadata, "eos"),
    }
    left, right = (f"{borders[name]}:0" if borders[name] else "" for name in ("bos", "eos"))
    named = [
        (text, metadata[f"tokenizer.ggml.{name}_token_id"])
        for name, text in borders.items()
        if text
    ]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{left} $A:0 {right}".strip(), special_tokens=named
    )


def _adds_bos_by_default(metadata: Metadata) -> bool:
    """What llama.cpp assumes when the file does not say."""
    kind = (metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre"))
    return kind[0] == "llama" or kind == ("gpt2", "llama-bpe")


def _token(metadata: Metadata, name: str) -> str | None:
    i = metadata.get(f"tokenizer.ggml.{_SPECIAL[name]}_token_id")
    return None if i is None else str(metadata["tokenizer.ggml.tokens"][i])

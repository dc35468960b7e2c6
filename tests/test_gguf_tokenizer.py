"""A tokenizer rebuilt from GGUF metadata splits text as the one it was made from."""

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf_writer import byte_vocabulary
from mlx_lm.tokenizer_utils import load
from tokenizers import Tokenizer
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from dflash2_mlx.gguf_tokenizer import build_tokenizer, write_tokenizer

TEXTS = [
    "hello hehe 12345 3.14",
    "  two spaces\n\n\ttabs ",
    "Příliš žluťoučký kůň e\u0301",
    "中文字符 日本語 한국어",
    "👩‍👩‍👧 🎉 it's we'll I'M",
    "a<think>b<turn>c<end>",
]
PLAIN = TEXTS[:-1]


def merged(pre: str, pairs: list[str]) -> dict[str, Any]:
    """The byte vocabulary with one more token for each merge, in the order of the merges."""
    metadata = byte_vocabulary(pre)
    metadata["tokenizer.ggml.tokens"] += [pair.replace(" ", "") for pair in pairs]
    metadata["tokenizer.ggml.token_type"] += [1] * len(pairs)
    metadata["tokenizer.ggml.merges"] = ["h e", *pairs]
    return metadata


PAIRS = ["1 2", "12 3", "3 4", "Ġ Ġ", "Ġ t", "' s", "i t", "l l", "Ċ Ċ", "Ã Ń", ". 1"]


def tokens(metadata: dict[str, Any], text: str) -> list[str]:
    return list(build_tokenizer(metadata).encode(text, add_special_tokens=False).tokens)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(pre: str, text: str) -> None:
    tokenizer = build_tokenizer(merged(pre, PAIRS))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "reference"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)]
)
def test_ids_equal_those_of_transformers(pre: str, reference: Any) -> None:
    metadata = merged(pre, PAIRS)
    vocab = {token: id_ for id_, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = reference(vocab=vocab, merges=merges)
    ours = build_tokenizer(metadata)
    for text in PLAIN:
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text)["input_ids"]
    assert "it" in ours.encode("it").tokens  # the merges are in use


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["123", "4", "Ġ", "12"]),
        ("smollm", ["1", "2", "3", "4", "Ġ", "1", "2"]),
        ("llama-bpe", ["123", "4", "Ġ", "12"]),
        ("qwen2", ["1", "2", "3", "4", "Ġ", "1", "2"]),
    ],
)
def test_digits_are_split_as_the_model_was_trained(pre: str, expected: list[str]) -> None:
    assert tokens(merged(pre, PAIRS), "1234 12") == expected


def test_llama_bpe_takes_whole_words_and_threes_of_digits() -> None:
    metadata = merged("llama-bpe", ["1 2", "12 3", "123 4"])
    metadata["tokenizer.ggml.tokens"] += ["word"]  # no merges lead to it
    metadata["tokenizer.ggml.token_type"] += [1]
    assert tokens(metadata, "word1234") == ["word", "123", "4"]


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = build_tokenizer(byte_vocabulary())
    encoding = tokenizer.encode("a<think>b<turn>")
    assert encoding.tokens == ["a", "<think>", "b", "<turn>"]
    assert tokenizer.decode(encoding.ids, skip_special_tokens=True) == "a<think>b"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, ["a"]),
        ({"tokenizer.ggml.add_bos_token": True}, ["<turn>", "a"]),
        ({"tokenizer.ggml.add_eos_token": True}, ["a", "<end>"]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, ["<turn>", "a"]),  # llama.cpp's default for it
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, ["a"]),
    ],
)
def test_begin_and_end_follow_the_flags(extra: dict[str, Any], expected: list[str]) -> None:
    assert build_tokenizer(byte_vocabulary() | extra).encode("a").tokens == expected


def test_the_written_files_load_in_mlx_lm(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.unknown_token_id": 257}
    write_tokenizer(byte_vocabulary("smollm") | extra, tmp_path)
    loaded = load(tmp_path, eos_token_ids=[257])
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token) == ("<turn>", "<end>", "<end>")
    chat = loaded.apply_chat_template([{"role": "user", "content": "hey 12"}])
    assert loaded.decode(chat) == "hey 12<turn>"
    assert loaded.encode("hey 12")[0] == 258
    assert type(loaded.detokenizer).__name__ == "BPEStreamingDetokenizer"


@pytest.fixture(scope="module")
def trained() -> sentencepiece.SentencePieceProcessor:
    """A small SentencePiece BPE model, trained here."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PLAIN * 3 + ["the theme of these words is the the"]),
        model_writer=model,
        model_type="bpe",
        vocab_size=360,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def spm_metadata(model: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    ids = range(model.get_piece_size())
    kinds = {model.is_unknown: 2, model.is_control: 3, model.is_byte: 6}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [
            next((kind for test, kind in kinds.items() if test(i)), 1) for i in ids
        ],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }


def test_sentencepiece_ids_equal_its_own(trained: sentencepiece.SentencePieceProcessor) -> None:
    tokenizer = build_tokenizer(spm_metadata(trained))
    for text in [*PLAIN, "the words ψ of these"]:
        ids = tokenizer.encode(text).ids
        assert ids == [trained.bos_id(), *trained.encode(text)]
        assert tokenizer.decode(ids) == text
    assert "▁the" in tokenizer.encode("the words").tokens


def test_sentencepiece_without_its_space(trained: sentencepiece.SentencePieceProcessor) -> None:
    metadata = spm_metadata(trained) | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = build_tokenizer(metadata)
    assert "".join(tokenizer.encode("the").tokens) == "<s>the"
    assert tokenizer.decode(tokenizer.encode(" the").ids) == " the"


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    from dflash2_mlx.fetch import cached_folder

    folder = cached_folder("smollm2-135m")
    if folder is None:
        pytest.skip("the demo target is not fetched")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.demo
def test_the_demo_tokenizer(demo: Tokenizer) -> None:
    for text in TEXTS:
        ids = demo.encode(text).ids
        assert demo.decode(ids, skip_special_tokens=False) == text
    assert demo.encode("<|im_start|>user 42").tokens == ["<|im_start|>", "user", "Ġ", "4", "2"]
    assert demo.get_vocab_size() == 49152

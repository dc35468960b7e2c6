"""Text is the same however its tokens are split, and nothing of a stop string is ever sent."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash2_mlx.text import Detokenizer, Segment, StopStrings, TextReader, special_ids

SAMPLE = "naïve ď e\u0301 한국어 日本 👩‍👩‍👧 🇨🇿  a , b\n\n\tdef f(x): …"


class ByteTokenizer:
    """One id per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2 style: every byte, a merge that ends inside a character, a special and a plain tag."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id_ for id_, token in enumerate([*alphabet, "ðŁ", "Ġa"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("ð", "Ł"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return wrap(tokenizer)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama-2 style: leading space cut, bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "▁", "▁a", "▁b", "a", "b", ",", "é", "日"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: id_ for id_, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrap(tokenizer)


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES, BYTE_LEVEL, SPM = ByteTokenizer(), byte_level(), sentencepiece_like()
TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [BYTES, BYTE_LEVEL, SPM], ids=["bytes", "byte-level", "sentencepiece"]
)
VOCAB_SIZES = {BYTES: 256, BYTE_LEVEL: len(BYTE_LEVEL), SPM: len(SPM)}


def full_decode(tokenizer: Any, ids: list[int]) -> str:
    if tokenizer is BYTES:
        return BYTES.decode(ids)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text))


def blocks(items: Sequence[Any], rng: random.Random, longest: int = 8) -> list[Any]:
    """`items` in consecutive slices of random length; some are empty."""
    cut, slices = 0, []
    while cut < len(items):
        length = rng.randint(0, longest)
        slices.append(items[cut : cut + length])
        cut += length
    return slices


def pieces_of(tokenizer: Any, steps: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(step) for step in steps), detokenizer.finish()]


@TOKENIZERS
@given(text=st.text(max_size=80), rng=st.randoms(use_true_random=False))
@example(text=SAMPLE, rng=random.Random(0))
def test_joined_pieces_equal_one_decode_of_any_text(
    tokenizer: Any, text: str, rng: random.Random
) -> None:
    ids = encode(tokenizer, text)
    assert "".join(pieces_of(tokenizer, blocks(ids, rng))) == full_decode(tokenizer, ids)


@TOKENIZERS
@given(data=st.data(), rng=st.randoms(use_true_random=False))
def test_joined_pieces_equal_one_decode_of_any_ids(
    tokenizer: Any, data: st.DataObject, rng: random.Random
) -> None:
    any_id = st.integers(0, VOCAB_SIZES[tokenizer] - 1)
    ids = data.draw(st.lists(any_id, max_size=120))
    assert "".join(pieces_of(tokenizer, blocks(ids, rng))) == full_decode(tokenizer, ids)


@TOKENIZERS
@pytest.mark.parametrize("text", ["👍", "ď", "日本", "e\u0301", SAMPLE])
def test_a_character_over_several_tokens_never_shows_in_part(tokenizer: Any, text: str) -> None:
    ids = encode(tokenizer, text)
    for cut in range(len(ids) + 1):
        pieces = pieces_of(tokenizer, [ids[:cut], ids[cut:]])
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == text


@TOKENIZERS
def test_a_stream_cut_inside_a_character_ends_in_a_replacement_mark(tokenizer: Any) -> None:
    ids = encode(tokenizer, "a👍")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.add(ids) == ("" if tokenizer is SPM else "a")
    assert "\ufffd" in detokenizer.finish()
    assert detokenizer.finish() == ""


@TOKENIZERS
def test_text_is_sent_as_soon_as_it_is_certain(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.add([id_]) for id_ in encode(tokenizer, "abab")] == ["a", "b", "a", "b"]


def test_the_spaces_of_a_line_survive() -> None:
    ids = encode(BYTE_LEVEL, "  a , b")
    assert "".join(pieces_of(BYTE_LEVEL, [[id_] for id_ in ids])) == "  a , b"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SPM], ids=["byte-level", "sentencepiece"])
def test_special_tokens_stay_hidden_and_plain_tags_show(tokenizer: Any) -> None:
    end, think, a, b = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<think>", "a", "b"])
    assert special_ids(tokenizer) == {end}
    assert "".join(pieces_of(tokenizer, [[a, end], [think], [end, a]])) == "a<think>a"
    assert TextReader(tokenizer, hidden={b}).read([a, b, a]).text == "aa"


class CountingTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids)


@pytest.mark.parametrize(
    "data", [b"a", b"\xff", "👍".encode()], ids=["letters", "invalid", "emoji"]
)
def test_a_line_without_end_costs_the_same_per_token(data: bytes) -> None:
    tokenizer = CountingTokenizer()
    ids = list(data * 2000)
    assert "".join(pieces_of(tokenizer, [[id_] for id_ in ids])) == BYTES.decode(ids)
    assert 0 < tokenizer.num_decoded < 64 * len(ids)


def expected_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The same rule said slowly: the first end at which any stop fits, the longest of those."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def feed_all(stops: list[str], pieces: Sequence[str]) -> tuple[str, bool]:
    watcher = StopStrings(stops)
    fed = [watcher.feed(piece) for piece in pieces]
    return "".join(text for text, _ in fed) + watcher.finish(), any(hit for _, hit in fed)


@pytest.mark.parametrize("size", [1, 2, 5, 11, 100])
@pytest.mark.parametrize(
    ("stops", "text", "sent"),
    [
        (["beta gamma"], "alpha beta gamma delta", "alpha "),
        (["beta gamma", "beta"], "alpha beta gamma delta", "alpha "),
        (["gamma", "beta"], "alpha beta gamma delta", "alpha "),
        (["abcd", "bc"], "xabcd", "xa"),
        (["abab", "b"], "aab", "aa"),
        (["aab"], "aaab", "a"),
        (["👍"], "ok 👍", "ok "),
    ],
)
def test_nothing_of_a_stop_is_sent(size: int, stops: list[str], text: str, sent: str) -> None:
    pieces = [text[cut : cut + size] for cut in range(0, len(text), size)]
    assert feed_all(stops, pieces) == (sent, True)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    text=st.text("abc", max_size=20),
    rng=st.randoms(use_true_random=False),
)
def test_stops_do_not_depend_on_the_split(stops: list[str], text: str, rng: random.Random) -> None:
    assert feed_all(stops, blocks(text, rng)) == expected_stop(text, stops)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    text=st.text("abc", max_size=20),
)
def test_only_what_could_become_a_stop_is_held(stops: list[str], text: str) -> None:
    sent, reached = StopStrings(stops).feed(text)
    held = text[len(sent) :]
    assert reached or not held or any(stop.startswith(held) for stop in stops)
    assert reached or all(
        not stop.startswith(text[cut:]) for stop in stops for cut in range(len(sent))
    )


def test_a_false_alarm_is_sent_and_nothing_follows_a_stop() -> None:
    watcher = StopStrings(["END"])
    assert watcher.feed("an E") == ("an ", False)
    assert watcher.feed("N") == ("", False)
    assert watcher.feed("D") == ("", True)
    assert watcher.feed("more") == ("", True)
    assert watcher.finish() == ""


@given(cuts=st.lists(st.integers(0, 24), max_size=4))
def test_the_reader_names_the_token_that_completed_the_stop(cuts: list[int]) -> None:
    ids = BYTES.encode("alpha beta gamma delta")
    borders = [0, *sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]
    reader = TextReader(BYTES, ["beta gamma"])
    text, num_read = "", 0
    for start, end in itertools.pairwise(borders):
        segment = reader.read(ids[start:end])
        text, num_read = text + segment.text, num_read + segment.num_read
        if segment.stopped:
            break
    assert (text, segment.stopped) == ("alpha ", True)
    assert bytes(ids[:num_read]) == b"alpha beta gamma"


def test_the_last_bytes_can_complete_a_stop() -> None:
    reader = TextReader(SPM, ["👍"])
    ids = encode(SPM, "a 👍")
    assert reader.read(ids) == Segment("a ", len(ids), False)
    assert reader.finish() == Segment("", 0, True)


def test_no_stops_means_all_is_read_at_once() -> None:
    reader = TextReader(BYTES)
    assert reader.read(BYTES.encode("a👍")[:-1]) == Segment("a", 4, False)
    assert reader.finish() == Segment("\ufffd", 0, False)


@pytest.fixture(scope="module")
def demo_tokenizer() -> Any:
    fetch = pytest.importorskip("dflash2_mlx.fetch")
    folder = fetch.cached_folder("smollm2-135m")
    if folder is None:
        pytest.skip("the demo target is not fetched")
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.demo
@given(text=st.text(max_size=60), rng=st.randoms(use_true_random=False))
def test_the_demo_tokenizer_keeps_the_promise(
    demo_tokenizer: Any, text: str, rng: random.Random
) -> None:
    ids = demo_tokenizer.encode(text, add_special_tokens=False)
    whole = demo_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces_of(demo_tokenizer, blocks(ids, rng))) == whole


@pytest.mark.demo
def test_the_demo_tokenizer_brings_the_sample_back(demo_tokenizer: Any) -> None:
    ids = demo_tokenizer.encode(SAMPLE, add_special_tokens=False)
    assert "".join(pieces_of(demo_tokenizer, [[id_] for id_ in ids])) == SAMPLE

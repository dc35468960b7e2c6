"""A target is tapped where its config says, and nothing is left on the model."""

import families
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tiny import HIDDEN, LLAMA, NUM_LAYERS, build_model, plain_ids, tiny_drafter, tiny_target

from dflash2_mlx.errors import BadCheckpoint, PairMismatch
from dflash2_mlx.pair import join
from dflash2_mlx.target import Target

TOKENS = mx.arange(30)


class Counting(nn.Module):
    """A model whose layer i adds i to every value."""

    class Layer(nn.Module):
        def __init__(self, add: int) -> None:
            super().__init__()
            self.add = add

        def __call__(self, x: mx.array, mask=None, cache=None, **unknown) -> mx.array:
            assert unknown == {"wrapped": True}
            return x + self.add

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(4, 2)
        self.embed_tokens.weight = mx.zeros((4, 2))
        self.layers = [self.Layer(add) for add in range(5)]

    def __call__(self, inputs: mx.array, cache=None) -> mx.array:
        x = self.embed_tokens(inputs)
        for layer in self.layers:
            x = layer(x, wrapped=True)
        return x


def test_taps_are_outputs_of_the_layers_named() -> None:
    target = Target(Counting(), taps=(1, 3))
    reading = target.read(mx.array([0]), target.make_caches())
    assert reading.taps.tolist() == [[[1.0, 1.0, 6.0, 6.0]]]


def test_taps_equal_in_prefill_and_in_verify() -> None:
    target = Target(tiny_target("sliding"), taps=(0, 2, 3))
    whole = target.read(TOKENS, target.make_caches()).taps
    caches = target.make_caches()
    parts = [target.read(part, caches).taps for part in mx.split(TOKENS, [17, 18, 25])]
    assert mx.allclose(mx.concatenate(parts, axis=1), whole, atol=1e-4)


def test_a_forward_leaves_no_trace() -> None:
    model, twin = tiny_target("dense"), tiny_target("dense", seed=5)
    classes = [type(module) for _, module in model.named_modules()]
    before = [name for name, _ in tree_flatten(model.parameters())]
    call = type(model.layers[0]).__call__
    target = Target(model, taps=(0, 1))
    target.read(TOKENS, target.make_caches())
    assert [type(module) for _, module in model.named_modules()] == classes
    assert [name for name, _ in tree_flatten(model.parameters())] == before
    assert type(model.layers[0]).__call__ is call
    assert type(model.layers[0]) is type(twin.layers[0])


def test_a_forward_that_raises_leaves_no_trace() -> None:
    model = tiny_target("dense")
    before = type(model.layers[1])
    target = Target(model, taps=(1,))
    with pytest.raises(ValueError, match=r"."):
        target.read(TOKENS.reshape(2, 15)[None], target.make_caches())
    assert type(model.layers[1]) is before


def test_a_drafter_that_does_not_fit_changes_nothing_for_others() -> None:
    model = tiny_target("dense")
    expected = plain_ids(model, [1, 2, 3], 10)
    with pytest.raises(PairMismatch):
        join(model, tiny_drafter(vocab_size=400))
    assert plain_ids(model, [1, 2, 3], 10) == expected


def test_logits_equal_the_unwrapped_model_bit_for_bit() -> None:
    for kind in ("dense", "sliding", "tied"):
        model = tiny_target(kind)
        target = Target(model, taps=(0, 3))
        ours = target.read(TOKENS, target.make_caches()).logits
        assert mx.array_equal(ours, model(TOKENS[None], cache=make_prompt_cache(model))[0])


@pytest.mark.parametrize("kind", ["dense", "sliding", "grouped sliding"])
def test_a_rewound_cache_equals_one_that_never_read_more(kind: str) -> None:
    target = Target(tiny_target(kind))
    for num_before in (3, 30, 90):
        for kept in range(9):
            used, clean = target.make_caches(), target.make_caches()
            prompt = mx.arange(num_before)
            for caches in (used, clean):
                target.read(prompt, caches)
            block = mx.arange(100, 108)
            target.rewind(used, target.read(block, used), kept)
            if kept:
                target.read(block[:kept], clean)
            logits = [target.read(mx.array([9]), caches).logits for caches in (used, clean)]
            assert mx.allclose(*logits, atol=1e-4)


def test_a_cache_that_cannot_rewind_turns_drafting_off_with_the_reason() -> None:
    target = Target(families.build("deepseek_v41"), taps=(0, 2))
    assert target.undraftable == "its cache kind LayerCache cannot be rewound"
    assert target.read(TOKENS, target.make_caches()).taps is None


def test_a_model_that_does_not_run_is_refused_in_one_line() -> None:
    model = tiny_target()
    classes = [type(module) for _, module in model.named_modules()]
    head, model.lm_head = model.lm_head, nn.Linear(3, 3)
    try:
        with pytest.raises(BadCheckpoint, match=r"^llama does not run on this machine: .+$"):
            Target(model)
    finally:
        model.lm_head = head
    assert [type(module) for _, module in model.named_modules()] == classes


@pytest.mark.parametrize(
    ("family", "embedding", "head"),
    [
        ("llama", "model.embed_tokens", "lm_head"),
        ("gpt_neox", "model.embed_in", "model.embed_out"),
        ("internlm2", "model.tok_embeddings", "output"),
        ("spark2_5", "model.embedding", "lm_head"),
        ("gemma4", "language_model.model.embed_tokens", "language_model.lm_head"),
        ("afm7", "model.embedding", "model.embedding"),
        ("phixtral", "transformer.embd.wte", "lm_head.linear"),
    ],
)
def test_embedding_and_head_are_found_whatever_their_names(
    family: str, embedding: str, head: str
) -> None:
    target = Target(families.build(family))
    modules = dict(target.model.named_modules())
    hidden = mx.random.normal((3, HIDDEN), key=mx.random.key(0))
    expected = modules[head].as_linear if head == embedding else modules[head]
    assert target.embedding is modules[embedding]
    assert mx.array_equal(target.head(hidden), expected(hidden))


def test_sizes_are_read_from_the_model() -> None:
    model = build_model("llama", LLAMA)
    target = Target(model)
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (300, 64, NUM_LAYERS)
    assert (target.bits, target.quantized) == (32, False)
    nn.quantize(model, group_size=32, bits=4)
    target = Target(model)
    assert (target.vocab_size, target.hidden_size) == (300, 64)
    assert (target.bits, target.quantized) == (4, True)

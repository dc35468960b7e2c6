"""A fast tokenizer with one token per byte and a few longer ones, for grammars."""

from functools import cache

from tiny import END
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

MERGES = ['{ "', '" :', '" ,', "b c", "b d", "n a", "m e", "na me"]


@cache
def byte_bpe() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes, as in `tiny.ByteTokenizer`; then the end, then longer tokens."""
    char = bytes_to_unicode()
    vocab = {char[byte]: byte for byte in range(256)} | {"<end>": END}
    merges = [tuple(line.split()) for line in MERGES]  # all ASCII, which stands for itself
    vocab |= {"".join(pair): END + number for number, pair in enumerate(merges, start=1)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")

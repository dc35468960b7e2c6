"""Products of few rows on an AMD CPU: there the weights multiply them from the left.

On those MKL reads the weights of `W @ x.T` for some rows nearly as fast as for one, those of
`x @ W.T` not: a forward of 4 rows, as a block has, takes 0.78 of the time (docs/speed.md).
"""

import mlx.core as mx
import mlx.nn as nn

from dflash2_mlx.chip import Chip

FEW = range(3, 8)  # rows for which it pays; fewer cost the same either way, more lose


class FewRowsLinear(nn.Linear):
    """A linear layer with the same results up to rounding."""

    few: range  # sizes of inputs that have few rows

    def __call__(self, x: mx.array) -> mx.array:
        """`[.., D]` -> `[.., O]`."""
        weight = self["weight"]
        out = _from_left(weight, x) if x.size in self.few else x @ weight.T
        return out + self["bias"] if "bias" in self else out


class FewRowsEmbedding(nn.Embedding):
    """An embedding that may also be the head, with the same results up to rounding."""

    few: range  # sizes of inputs that have few rows

    def as_linear(self, x: mx.array) -> mx.array:
        """`[.., D]` -> logits `[.., V]`."""
        return _from_left(self.weight, x) if x.size in self.few else super().as_linear(x)


FASTER = {nn.Linear: FewRowsLinear, nn.Embedding: FewRowsEmbedding}


def speed_up_few_rows(model: nn.Module, chip: Chip) -> None:
    """Let all layers with float32 weights multiply few rows from the left, where that is faster."""
    for _, module in model.named_modules() if chip.few_rows_from_left else ():
        if type(module) in FASTER and module.weight.dtype == mx.float32:
            module.__class__ = FASTER[type(module)]
            row = module.weight.shape[-1]
            module.few = range(FEW.start * row, FEW.stop * row, row)


def _from_left(weight: mx.array, x: mx.array) -> mx.array:
    out = weight @ x.reshape(-1, x.shape[-1]).T
    return mx.contiguous(out.T).reshape(*x.shape[:-1], -1)

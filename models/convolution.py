"""DFlash 2's grouped dynamic convolution over the rows of one block."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

Kernel = tuple[mx.array, ...]


class GroupedDynamicConv(nn.Module):
    """Two short causal convolutions around a sublayer, with coefficients that depend on its input.

    Side 0 runs on the sublayer's input, side 1 on its output. A coefficient is a trained base per
    channel plus a projected term per group of channels. Rows before the block count as zero, so
    row 1 reads the anchor and row 0 reads nothing (DFlash 2, `attention_conv` and `mlp_conv`).
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self._shape = (2, kernel_size, hidden_size // group_size, 1)
        self.base_kernel = mx.zeros((2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(
            hidden_size, 2 * kernel_size * hidden_size // group_size, bias=False
        )

    def coefficients(self, x: mx.array) -> tuple[Kernel, Kernel]:
        """Both sides' kernels for a sublayer's input `[L, D]`: a `[L, 1, groups, group]` per tap.

        Zero where a tap would read a row before the block.
        """
        num_rows, num_taps = len(x), self._shape[1]
        dynamic = self.kernel_projection(x).reshape(num_rows, *self._shape)
        base = self.base_kernel.reshape(*self._shape[:3], -1).astype(x.dtype)
        inside = np.arange(num_rows)[:, None] >= np.arange(num_taps)
        kernel = (base + dynamic) * mx.array(inside[:, None, :, None, None], dtype=x.dtype)
        taps = mx.split(kernel.flatten(1, 2), 2 * num_taps, axis=1)
        return tuple(taps[:num_taps]), tuple(taps[num_taps:])

    def __call__(self, x: mx.array, kernel: Kernel) -> mx.array:
        """Convolve rows `[L, D]` -> `[L, D]`."""
        rows = x.reshape(kernel[0].shape)
        out = kernel[0] * rows
        for tap, coefficients in enumerate(kernel[1:], 1):
            # Rows before the block are read as row 0; their coefficients are zero.
            earlier = np.maximum(np.arange(len(x)) - tap, 0)
            out = out + coefficients * mx.take(rows, mx.array(earlier), axis=0)
        return out.reshape(x.shape)

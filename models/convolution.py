"""DFlash 2's grouped dynamic convolution over the rows of one block."""

import mlx.core as mx
import mlx.nn as nn


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

    def coefficients(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Both sides' kernels `[B, L, taps, groups, group]` for a sublayer's input `[B, L, D]`."""
        dynamic = self.kernel_projection(x).reshape(*x.shape[:2], *self._shape)
        base = self.base_kernel.reshape(*self._shape[:3], -1).astype(x.dtype)
        kernel = base + dynamic
        return kernel[:, :, 0], kernel[:, :, 1]

    def __call__(self, x: mx.array, kernel: mx.array) -> mx.array:
        """Convolve rows: `[B, L, D]` with `[B, L, taps, groups, group]` -> `[B, L, D]`."""
        batch, length, _ = x.shape
        num_taps = kernel.shape[2]
        rows = x.reshape(batch, length, *kernel.shape[3:])
        padded = mx.pad(rows, [(0, 0), (num_taps - 1, 0), (0, 0), (0, 0)])
        out = kernel[:, :, 0] * rows
        for tap in range(1, num_taps):
            first = num_taps - 1 - tap
            out = out + kernel[:, :, tap] * padded[:, first : first + length]
        return out.reshape(x.shape)

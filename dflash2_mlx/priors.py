"""What a pass probably costs on a chip where nothing was measured yet."""

from dflash2_mlx.chip import Chip
from dflash2_mlx.curve import Curve

# Verify rows -> time relative to one row, whole targets. Sources: "apple linear" is MLX's dispatch
# for M1 and M2 (one weight read per row up to 5, tiles from 6 rows on; mlx quantized.cpp);
# "apple 4-bit" mlx#3852, mlx PR3863 and mlxcel on M3 Max, M4 Pro and M5 Max; "apple 8-bit"
# mlx-dspark on M4 Pro; "apple 16-bit" gemv_wide of mlx 0.32.1; "cpu float" and "cpu quantized" the
# demo target on two x86-64 cores (45 ms and 157 ms a row).
ROWS: dict[str, dict[int, float]] = {
    "apple linear": {1: 1.0, 2: 1.9, 3: 2.8, 4: 3.7, 5: 4.6, 6: 4.0, 8: 4.0, 12: 4.1, 16: 4.2},
    "apple 4-bit": {1: 1.0, 2: 1.03, 3: 1.15, 4: 1.35, 5: 1.65, 6: 2.1, 8: 2.7, 12: 4.0, 16: 5.0},
    "apple 8-bit": {1: 1.0, 2: 1.02, 3: 1.04, 4: 1.1, 5: 1.15, 6: 1.45, 8: 1.75, 12: 2.4, 16: 3.0},
    "apple 16-bit": {1: 1.0, 2: 1.1, 3: 1.1, 4: 1.15, 5: 1.15, 6: 1.2, 8: 1.25, 12: 1.4, 16: 1.5},
    "cpu float": {1: 1.0, 2: 1.2, 3: 1.4, 4: 2.0, 5: 1.8, 6: 1.9, 8: 2.3, 12: 3.0, 16: 2.8},
    "cpu quantized": {1: 1.0, 2: 2.2, 3: 3.4, 4: 4.6, 5: 5.8, 6: 7.0, 8: 9.4, 12: 14.0, 16: 18.7},
}
FIRST_WIDE_AFFINE = 15  # M3: the first generation whose affine kernels serve 5 rows at once
CONTEXT_SHARE = 0.02  # of a plain pass, per row and thousand tokens of context


def row_costs(chip: Chip, bits: int) -> dict[int, float]:
    """Relative cost by rows for a target of so many bits."""
    if chip.on_cpu:
        return ROWS["cpu float" if bits >= 16 else "cpu quantized"]
    is_old = chip.generation is not None and chip.generation < FIRST_WIDE_AFFINE
    if is_old and bits < 16:
        return ROWS["apple linear"]
    return ROWS["apple 16-bit" if bits >= 16 else "apple 8-bit" if bits > 6 else "apple 4-bit"]


def prior_curve(chip: Chip, bits: int, block: int, draft_share: float) -> Curve:
    """A guess in units of one plain pass, for widths up to `block`.

    `draft_share` is what proposing costs beside it: bytes read by the drafter and the head over
    bytes read by the target. Only ratios matter; live times correct them.
    """
    rows = {width: cost for width, cost in row_costs(chip, bits).items() if width <= block}
    return Curve(
        {width: cost + (draft_share if width > 1 else 0.0) for width, cost in rows.items()},
        {width: CONTEXT_SHARE * width for width in rows},
    )

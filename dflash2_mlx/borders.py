"""Where the reading of a prompt is cut into chunks: decided by the prompt alone.

How a matrix product rounds depends on how many rows it has. So a state is only used where a run
without it would have read the very same chunks, and borders never depend on what is stored.
"""

from dataclasses import dataclass

PREFILL_STEP = 2048  # tokens, mlx-lm's own chunk, so that chunk borders round alike
FULL_STEP_DEPTH = 32_768  # deeper, chunks shrink: macOS ends GPU work that runs too long
LEAST_STEP = 256


@dataclass(frozen=True, slots=True)
class Marks:
    """Positions that the next prompt of a conversation will share: each ends a chunk.

    `stem` is the one behind system message and tools, which other conversations share too; 0 if
    there is none.
    """

    positions: tuple[int, ...] = ()
    stem: int = 0


def chunk_borders(length: int, marks: Marks | None, step: int) -> list[int]:
    """The positions, ascending, behind which the chunks of `length` tokens end; `length` is one."""
    marked = [*(marks.positions if marks else ()), marks.stem if marks else 0, length]
    borders, at = [], 0
    for mark in sorted({mark for mark in marked if 0 < mark <= length}):
        while at < mark:
            at = min(at + step_at(at, step), mark)
            borders.append(at)
    return borders


def step_at(position: int, step: int) -> int:
    """Tokens of a chunk there: `step`, halved whenever the depth has doubled."""
    while position >= FULL_STEP_DEPTH and step > LEAST_STEP:
        position, step = position // 2, step // 2
    return step


def kept_borders(borders: list[int], marks: Marks, step: int) -> set[int]:
    """The borders worth a whole state, where that is more than the rows of a chunk.

    The stem, the last two marks (behind the last answer and the last question), the end, and in
    between one border for every doubling of the depth.
    """
    last = [mark for mark in marks.positions if borders and mark <= borders[-1]][-2:]
    kept = {marks.stem, *last, *borders[-1:]}
    for before, border in zip([0, *borders], borders, strict=False):
        if (border // step).bit_length() > (before // step).bit_length():
            kept.add(border)
    return kept & set(borders)

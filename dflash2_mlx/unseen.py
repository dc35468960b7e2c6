"""Hidden states that wait for a parked drafter, in one buffer that is written in place."""

import mlx.core as mx

MAX_UNSEEN = 256  # tokens that a parked drafter lags behind before it catches up


class Unseen:
    """Taps `[1, rows, taps * D]` of committed tokens that the drafter's context has not taken in.

    Held one by one they would keep the target's hidden states alive, and every pass would have to
    ask for new memory: 2 % of a plain pass of the demo pair on a CPU.
    """

    def __init__(self) -> None:
        self._rows: mx.array | None = None
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def state(self) -> list[mx.array]:
        """The array to evaluate, or nothing."""
        return [] if self._rows is None else [self._rows]

    def add(self, taps: mx.array) -> None:
        """Take in the taps `[1, S, taps * D]` of the next S tokens."""
        num_rows = self._num_rows + taps.shape[1]
        if self._rows is None:
            self._rows = taps
        else:
            if num_rows > self._rows.shape[1]:
                room = mx.zeros((1, MAX_UNSEEN, taps.shape[2]), dtype=taps.dtype)
                self._rows = mx.concatenate([self._rows[:, : self._num_rows], room], axis=1)
            at = mx.array([self._num_rows])
            self._rows = mx.slice_update(self._rows, taps, at, axes=(1,))
        self._num_rows = num_rows

    def take(self) -> mx.array | None:
        """Hand over all rows, None where there are none."""
        rows = None if self._rows is None else self._rows[:, : self._num_rows]
        self._rows, self._num_rows = None, 0
        return rows

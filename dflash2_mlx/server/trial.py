"""A grammar tried on a model's tokens, away from the thread that others wait for."""

import numpy as np

from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.grammar import Grammar
from dflash2_mlx.pair import Pair

NUM_TRIED = 3  # first tokens; where all of them end in a fault, so would the answer


def try_grammar(pair: Pair, grammar: Grammar) -> None:
    """Raise `InvalidRequest` for a grammar that outgrows the parser's limits at its beginning.

    The engine would find that out itself: on its own thread, and behind a status of 200.
    """
    for place in range(NUM_TRIED):
        constraint = pair.constraint(grammar)
        (mask,) = constraint.masks()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        is_last = place + 1 >= min(NUM_TRIED, len(allowed))
        try:
            constraint.commit([int(allowed[place])])
            constraint.masks()
            return
        except InvalidRequest:
            if is_last:
                raise

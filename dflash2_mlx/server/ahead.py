"""Reading, behind an answer, what the next request of the conversation will begin with.

The answer's own passes left rows behind that a cold run would have rounded otherwise. So the answer
is read once more, as a prompt, while its client is busy with it: the next turn then reads only what
is new. Where the client sends something else, no more than this reading is lost.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from dflash2_mlx.decode import OnPrefill
from dflash2_mlx.dialogue.events import Ask, Message
from dflash2_mlx.dialogue.heard import Heard
from dflash2_mlx.dialogue.prompt import render
from dflash2_mlx.generation import read_ahead
from dflash2_mlx.marking import marker_of, marks_of
from dflash2_mlx.pair import BlockSize, Pair

log = logging.getLogger("dflash2_mlx.server")


def read_on(pair: Pair, ask: Ask, heard: Heard, block_size: BlockSize, go_on: OnPrefill) -> int:
    """Read the conversation up to the end of its last answer; gives the tokens that were new.

    `go_on` hears of every chunk.
    """
    if ask.prompt is not None or ask.messages[-1]["role"] == "assistant":
        return 0
    following = replace(ask, messages=(*ask.messages, heard.message, *heard.replies))
    rendered = render(pair, following)
    marks = marks_of(pair, rendered.messages, rendered.ids, rendered.variables)
    if marks is None:
        return 0
    place = _last_answer(rendered.messages) + 1
    end = marker_of(pair).end_before(place, rendered.messages, rendered.ids, rendered.variables)
    num_read = read_ahead(
        pair,
        rendered.ids[:end],
        marks,
        session=ask.session,
        block_size=block_size,
        on_prefill=go_on,
    )
    log.debug("read ahead %d tokens for the next turn", num_read)
    return num_read


def _last_answer(messages: Sequence[Message]) -> int:
    return max(n for n, message in enumerate(messages) if message["role"] == "assistant")

"""How many rows each pass of one answer gets, and the words for why."""

from dataclasses import replace

from dflash2_mlx.canary import Canary
from dflash2_mlx.decode import Conversation, Step
from dflash2_mlx.pair import BlockSize, Effective, Pair
from dflash2_mlx.tuning import kind_of

RECENT = 1024  # tokens of a prompt that tell its kind: what is asked stands at its end


class Steering:
    """Steers one answer: by a fixed block, or by the pair's tuner when the block size is auto.

    Drafting ends for good past the drafter's positions, and for a drafter whose drafts never stand.
    """

    def __init__(
        self, pair: Pair, block_size: BlockSize, prompt: list[int], *, grammar: bool = False
    ) -> None:
        self._asked: Effective = pair.effective(block_size)
        self._pair = pair
        self._canary = Canary()
        self._passes = self._depth = 0
        self._fallback = ""  # what was changed since drafts never stood, in words
        self._pilot, self._kind = None, kind_of("")
        if block_size == "auto" and self._asked.drafting and pair.tuning is not None:
            self._kind = "grammar" if grammar else kind_of(pair.tokenizer.decode(prompt[-RECENT:]))
            self._pilot = pair.tuning.pilot(self._kind)

    @property
    def effective(self) -> Effective:
        """The state in force; put into words only when somebody asks, not in every pass."""
        state = self._asked
        if self._pilot and state.drafting and (width := self._pilot.width):
            reason = self._pilot.describe(self._depth)
            state = replace(state, block_size=width, drafting=width > 1, reason=reason)
        return replace(state, reason=state.reason + self._fallback)

    def width(self, conversation: Conversation) -> int:
        """Rows of the next pass."""
        if conversation.drafter is None:
            return 1
        depth, limit = conversation.reach, self._pair.drafter_limit
        width = self._pilot.choose(depth) if self._pilot else self._asked.block_size
        if depth + max(width, self._pair.draft_block) > limit:
            self._stop(conversation, f"past the {limit} tokens the drafter can read")
            return 1
        return width

    def watch(self, conversation: Conversation, step: Step) -> None:
        """Take in a pass that was made."""
        if not step.tokens:
            return
        self._passes += 1
        # What stood behind the cut of a last pass is not known, and what a grammar forces is no
        # achievement of the drafter.
        unknown = step.finish_reason is not None or step.forced
        if self._pilot and conversation.drafter and not unknown:
            ms = None if step.pass_s is None else 1000 * step.pass_s
            self._pilot.watch(step.drafted + 1, step.depth, step.from_draft, ms)
            self._depth = step.depth
        if self._canary.watch(step.drafted, step.from_draft):
            self._distrust(conversation)

    def finish(self) -> None:
        """Let the pair learn from the answer."""
        if self._pilot and self._pair.tuning is not None:
            self._pair.tuning.learn(self._pilot, self._kind, self._passes)

    def _distrust(self, conversation: Conversation) -> None:
        """Drafts that never stand cost time: try the safer dtype once, else decode plainly."""
        seen = self._canary.describe()
        if self._pair.make_drafter_safer():
            self._fallback = f"; now in float32, since {seen}"
            self._canary = Canary()
            return
        self._stop(
            conversation,
            f"stopped, since {seen}; is the drafter made for this target and revision?",
        )

    def _stop(self, conversation: Conversation, reason: str) -> None:
        conversation.stop_drafting()
        self._asked, self._fallback = replace(self.effective, drafting=False, reason=reason), ""

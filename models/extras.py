"""Tensors in a checkpoint that belong to a part which this program does not run."""

from collections.abc import Iterable, Mapping

# The part as a note names it, and the pieces of tensor names that give it away.
Parts = Mapping[str, tuple[str, ...]]
Found = dict[str, list[str]]

UNUSED: Parts = {
    "of multi-token prediction": ("mtp",),
    "for images": (
        "visual",
        "vision_tower",
        "vision_model",
        "embed_vision",
        "multi_modal_projector",
    ),
    "for audio": ("audio_tower", "embed_audio"),
}
TARGETS_OWN: Parts = {
    "that the target has itself": (
        "embed_tokens",
        "lm_head",
        "verifier_norm",
        "verifier_lm_head",
    ),
}


def find_extras(names: Iterable[str], parameters: Iterable[str], *parts: Parts) -> Found:
    """The tensors of each part, save for parts that are among the model's own parameters."""
    own = {piece for name in parameters for piece in name.split(".")}
    foreign = {name: set(name.split(".")) - own for name in names}
    signs = [item for some in parts for item in some.items()]
    found = {
        part: [name for name, pieces in foreign.items() if pieces.intersection(sign)]
        for part, sign in signs
    }
    return {part: of_part for part, of_part in found.items() if of_part}


def describe(whose: str, found: Found) -> tuple[str, ...]:
    """A note for each part."""
    return tuple(
        f"{whose}: ignored {len(names)} tensor{'s' * (len(names) > 1)} {part} (first {min(names)})"
        for part, names in found.items()
    )

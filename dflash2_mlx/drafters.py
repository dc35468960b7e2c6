"""A drafter in the precision it will run in; quantized once, then kept on disk."""

from pathlib import Path

import mlx.nn as nn

import dflash2_mlx
from dflash2_mlx.chip import Chip
from dflash2_mlx.folders import Progress, build_once, digest_of, origin_of
from dflash2_mlx.models import checkpoint
from dflash2_mlx.models.drafter import Drafter, load_drafter
from dflash2_mlx.models.quantize import backbone_bits, quantize, save
from dflash2_mlx.precision import choose_drafter_bits, set_drafter_precision
from dflash2_mlx.target import parameters


def drafter_in_precision(
    folder: Path, bits: int | None, chip: Chip, progress: Progress | None = None
) -> Drafter:
    """Load a drafter for this chip in 4, 8 or 16 bits, or what suits its size (None).

    Raises `BadCheckpoint` for a folder that is no drafter, `InvalidRequest` for bits it cannot
    have.
    """
    drafter = load_drafter(folder)
    stored = backbone_bits_of(drafter)
    num_params = sum(array.size for array in parameters(drafter).values())
    chosen = choose_drafter_bits(bits, stored, num_params, chip)
    if chosen < stored:
        notes = drafter.notes
        drafter = load_drafter(quantized_copy(folder, drafter, chosen, progress))
        drafter.notes = notes
    set_drafter_precision(drafter, chip, keep_bits=chosen < stored or bits is not None)
    return drafter


def backbone_bits_of(drafter: nn.Module) -> int:
    """Bits of the backbone's linear layers, as the first of them has it."""
    layer = drafter.fc
    return int(getattr(layer, "bits", 8 * layer.weight.dtype.size))


def quantized_copy(
    folder: Path, drafter: Drafter, bits: int, progress: Progress | None = None
) -> Path:
    """The cached copy of a drafter with its backbone in `bits`, made now if it is not there.

    Its config.json says under `provenance` what it was made from, and by what.
    """
    origin = origin_of(folder)
    digest = digest_of(origin)

    def make(copy: Path, _: Path) -> None:
        if progress:
            progress(f"quantizing the drafter to {bits} bits", 0, None)
        quantization = quantize(drafter, backbone_bits(bits))
        config = checkpoint.read_json(folder / "config.json")
        provenance = {**origin, "bits": bits, "made_by": f"dflash2-mlx {dflash2_mlx.__version__}"}
        save(drafter, {**config, "quantization": quantization, "provenance": provenance}, copy)

    return build_once(f"{folder.name}-{bits}bit-{digest}", make, progress, "drafters")

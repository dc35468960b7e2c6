"""The memory of this machine, and whether weights fit into it, before they are loaded."""

import os
from contextlib import suppress
from pathlib import Path

from dflash2_mlx.memory import Machine, check_weights

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container on Linux


def physical_memory() -> int:
    """Bytes of memory that are built in."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def this_machine() -> Machine:
    """The machine in use, or the container that this runs in."""
    memory = physical_memory()
    with suppress(OSError, ValueError):  # no container, or one without a limit: "max"
        memory = min(memory, int(CGROUP_LIMIT.read_text("ascii")))
    import mlx.core as mx  # here, since `doctor` asks for memory where MLX does not work

    gpu = mx.device_info().get("max_recommended_working_set_size")
    return Machine(memory, int(gpu) if gpu else None)


def check_folders(*folders: Path) -> None:
    """Raise `OutOfMemory` when the weight files alone are more than may be used."""
    machine = this_machine()
    check_weights(sum(map(weights_in, folders)), machine.limit_bytes, machine)


def known_weights() -> dict[str, int]:
    """Bytes of target and drafter of each known pair whose target is on this machine."""
    from dflash2_mlx.catalogue import load_catalogue
    from dflash2_mlx.fetch import cached_folder, drafter_source

    found = {}
    for name in load_catalogue():
        if folder := cached_folder(name):
            drafter = drafter_source(name).cached()
            found[name] = weights_in(folder) + (weights_in(drafter) if drafter else 0)
    return found


def weights_in(folder: Path) -> int:
    """Bytes of the files that hold the tensors of a model folder."""
    endings = ("safetensors", "gguf")
    return sum(file.stat().st_size for end in endings for file in folder.glob(f"*.{end}"))

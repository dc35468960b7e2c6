"""The sampling that a model's maker recommends, and how a request is put on top of it."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dflash2_mlx.errors import InvalidRequest
from dflash2_mlx.folders import read_object
from dflash2_mlx.sampling import SamplingParams

FILE = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> tuple[SamplingParams, list[str]]:
    """What a model folder's generation_config.json sets, and notes: that, and what was ignored.

    Greedy where it asks for that (`do_sample` false) or sets nothing.
    """
    content = read_object(folder / FILE)
    defaults, notes = SamplingParams(), list[str]()
    if content.get("do_sample") is False:
        return defaults, notes
    if content.get("do_sample") is True:  # transformers then samples at 1 if nothing is set
        defaults = replace(defaults, temperature=1.0)
    for name in FIELDS:
        if content.get(name) is None:
            continue
        try:
            defaults = replace(defaults, **{name: content[name]})
        except InvalidRequest as error:
            notes.append(f"{FILE}: {error}; ignored")
    if words := defaults.describe():
        notes.append(f"the model's own sampling ({FILE}): {words}")
    return defaults, notes


def merged(defaults: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    """The fields given, else the defaults; None is not given, a zero is.

    Raises `InvalidRequest` for an unknown field or an impossible value.
    """
    if unknown := given.keys() - {field.name for field in fields(SamplingParams)}:
        raise InvalidRequest(f"{min(unknown)} is no sampling field; leave it out")
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})

"""A target from its folder: read by mlx-lm, strictly, with parts left aside that are never run."""

import difflib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx_lm.utils import MODEL_REMAPPING, _get_classes, load_model, load_tokenizer

from dflash2_mlx.errors import BadCheckpoint
from dflash2_mlx.models.extras import UNUSED, describe, find_extras
from dflash2_mlx.target import parameters

Weights = dict[str, mx.array]


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A model of mlx-lm's with its tokenizer; `notes` say what was not taken as it stands."""

    model: nn.Module
    tokenizer: Any
    notes: tuple[str, ...]


def load_target(folder: Path) -> LoadedTarget:
    """Load model and tokenizer. Raises `BadCheckpoint`, in one line, for whatever goes wrong."""
    notes: list[str] = []

    def classes(config: dict[str, Any]) -> tuple[Callable[[Any], nn.Module], type]:
        model_class, args_class = _classes(config, notes)
        return lambda args: _leaving_extras_aside(model_class(args), notes), args_class

    try:
        model, config = load_model(folder, get_model_classes=classes)
        vars(model).pop("sanitize")
        tokenizer = load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # mlx-lm and transformers raise whatever a broken file makes of it
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadCheckpoint(f"cannot load the target in {folder}: {reason:.400}") from None
    return LoadedTarget(model, tokenizer, tuple(notes))


def _leaving_extras_aside(model: nn.Module, notes: list[str]) -> nn.Module:
    """The model with a `sanitize` of its own, for the time of loading: mlx-lm stays strict."""
    own = parameters(model)
    sanitize: Callable[[Weights], Weights] = getattr(model, "sanitize", lambda weights: weights)

    def without_extras(weights: Weights) -> Weights:
        notes.extend(describe("target", find_extras(weights, own, UNUSED)))
        weights = sanitize(weights)
        found = find_extras(weights, own, UNUSED)
        aside = {name for names in found.values() for name in names}
        return {name: weight for name, weight in weights.items() if name not in aside}

    object.__setattr__(model, "sanitize", without_extras)
    return model


def _classes(config: dict[str, Any], notes: list[str]) -> tuple[Any, Any]:
    """mlx-lm's classes for a config, also if its model_type is a new name for a known class."""
    if "model_type" not in config:
        raise ValueError("its config.json has no model_type; name the folder of a language model")
    try:
        return _get_classes(config)
    except ValueError:
        known = _type_of_architecture(config)
        if known is None:
            raise ValueError(_unknown(config["model_type"])) from None
        classes = _get_classes({**config, "model_type": known})
    notes.append(
        f"target: mlx-lm has no model_type '{config['model_type']}', it is read as '{known}', "
        "the family of its architecture"
    )
    return classes


def _type_of_architecture(config: Mapping[str, Any]) -> str | None:
    """The family whose name is in the class that the config names: Qwen3MoeFor... is qwen3_moe."""
    families = {re.sub("[_-]", "", family).lower(): family for family in _families()}
    for architecture in config.get("architectures") or ():
        name = re.sub("For(CausalLM|ConditionalGeneration)$", "", architecture)
        if name != architecture and name.lower() in families:
            return families[name.lower()]
    return None


def _families() -> list[str]:
    files = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]
    return [*files, *MODEL_REMAPPING]


def _unknown(model_type: str) -> str:
    near = difflib.get_close_matches(model_type, _families(), n=4, cutoff=0.4)
    renamed = (
        f"; if it is {' or '.join(near)} by another name, write that name there" if near else ""
    )
    return (
        f"mlx-lm {version('mlx-lm')} has no model_type '{model_type}' (config.json){renamed}; "
        "'dflash2-mlx models' lists targets that work"
    )

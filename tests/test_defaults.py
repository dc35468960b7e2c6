"""What a model folder says of sampling is read as it is meant, and said in words."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import LLAMA, tiny_target

from dflash2_mlx import targets
from dflash2_mlx.defaults import sampling_defaults
from dflash2_mlx.grammar import Grammar
from dflash2_mlx.pair import load_pair
from dflash2_mlx.sampling import SamplingParams

GREEDY = SamplingParams()


def read(folder: Path, content: Any) -> tuple[SamplingParams, list[str]]:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return sampling_defaults(folder)


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ({"temperature": 1.0, "top_k": 20}, {"temperature": 1.0, "top_k": 20}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 1}, {"temperature": 0.6}),
        ({"do_sample": True, "min_p": 0.1, "top_p": None}, {"temperature": 1.0, "min_p": 0.1}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1}, {}),
        ({"eos_token_id": 2, "max_new_tokens": 9, "num_beams": 4}, {}),
        ({}, {}),
        ([1, 2], {}),
    ],
)
def test_fields_that_are_set_are_taken(tmp_path: Path, content: Any, fields: Any) -> None:
    expected = SamplingParams(**fields)
    params, notes = read(tmp_path, content)
    assert params == expected
    own = f"the model's own sampling (generation_config.json): {expected.describe()}"
    assert notes == ([] if expected == GREEDY else [own])


def test_a_folder_without_the_file_is_greedy(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == (GREEDY, [])


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", -1), ("top_p", 1.5), ("temperature", "hot"), ("min_p", True)]
)
def test_an_impossible_value_is_ignored_with_a_note(tmp_path: Path, name: str, value: Any) -> None:
    params, notes = read(tmp_path, {"do_sample": True, "repetition_penalty": 1.1, name: value})
    assert params == SamplingParams(temperature=1.0, repetition_penalty=1.1)
    assert notes[0].startswith(f"generation_config.json: {name} is {value!r}, expected ")
    assert notes[0].endswith("; ignored")


def test_a_loaded_pair_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "load_tokenizer", lambda folder, **_: "tokenizer")
    weights = dict(tree_flatten(tiny_target().parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **LLAMA}))
    read(tmp_path, {"temperature": 1.0, "top_k": 20})
    pair = load_pair(str(tmp_path), False, dtype="stored")
    assert pair.default_sampling == SamplingParams(temperature=1.0, top_k=20)
    assert pair.notes[0].endswith(": temperature 1, top_k 20")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ""),
        ({"seed": 5, "top_p": 0.9, "stop": ("x",), "penalty_context": 7, "logprobs": 2}, ""),
        ({"temperature": 0.7, "top_p": 0.9, "seed": 123}, "temperature 0.7, top_p 0.9, seed 123"),
        (
            {"temperature": 1, "top_k": 20, "min_p": 0.05, "seed": -1},
            "temperature 1, top_k 20, min_p 0.05, seed -1",
        ),
        (
            {"repetition_penalty": 1.1, "penalty_context": 64, "top_k": 20},
            "temperature 0, repetition_penalty 1.1, penalty_context 64",
        ),
        (
            {"presence_penalty": -0.5, "frequency_penalty": 1, "logit_bias": {1: 2.0}},
            "temperature 0, presence_penalty -0.5, frequency_penalty 1, logit_bias on 1 token",
        ),
        ({"logit_bias": {1: 2.0, 2: 1.0}}, "temperature 0, logit_bias on 2 tokens"),
        ({"grammar": Grammar("json_schema", "{}")}, "temperature 0, held to a JSON schema"),
    ],
)
def test_the_fields_in_force_are_named_and_no_others(fields: Any, words: str) -> None:
    assert SamplingParams(**fields).describe() == words


def test_filters_are_idle_at_temperature_0() -> None:
    assert SamplingParams(top_p=0.9, min_p=0.1).idle == {"top_p", "min_p"}
    assert SamplingParams(top_p=0.9, temperature=0.1).idle == frozenset()

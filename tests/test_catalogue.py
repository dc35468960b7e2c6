"""The catalogue is complete, pins only what is really a commit, and helps with typing errors."""

import json
import re
from importlib.util import find_spec

import pytest

from dflash2_mlx.catalogue import Entry, load_catalogue, unknown_model
from dflash2_mlx.fetch import drafter_source, target_source
from dflash2_mlx.models.config import DrafterConfig

ENTRIES = list(load_catalogue().values())
FIELDS_OF_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "presence_penalty"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_is_sound(entry: Entry) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.target)
    assert entry.kind in {"DFlash 1", "DFlash 2"}
    assert entry.target_bits in {4, 8, 16}
    assert entry.licence
    assert entry.drafter_licence
    assert set(entry.sampling) <= FIELDS_OF_SAMPLING
    for revision in (entry.target_revision, entry.drafter_revision):
        assert revision is None or re.fullmatch(r"[0-9a-f]{40}", revision)
    assert entry.gguf is None or re.fullmatch(r"[0-9a-f]{64}", entry.gguf.sha256)
    assert entry.block in {None, 8, 16}
    assert entry.window is None or entry.window > 0
    assert entry.taps is None or list(entry.taps) == sorted(set(entry.taps))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_family_is_a_model_of_mlx_lm_or_the_pair_says_it_cannot_run(entry: Entry) -> None:
    is_known = find_spec(f"mlx_lm.models.{entry.family}") is not None
    assert is_known == (entry.undraftable is None)


def test_the_embedded_drafter_is_described_as_its_config_has_it() -> None:
    entry = load_catalogue()["smollm2-135m"]
    folder = drafter_source(entry.name).cached()
    assert folder is not None
    config = DrafterConfig.from_dict(json.loads((folder / "config.json").read_text("utf-8")))
    assert entry.taps == config.target_layer_ids
    assert (entry.window, entry.block) == (config.sliding_window, config.block_size)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_both_halves_of_a_pair_have_a_source(entry: Entry) -> None:
    assert str(target_source(entry.name))
    assert str(drafter_source(entry.name))


@pytest.mark.parametrize(
    "name", ["smollm2-135m", "qwen3.8-27b-4bit", "qwen3.8-27b-8bit", "muse-glimmer-30b-4bit"]
)
def test_the_promised_pairs_are_there(name: str) -> None:
    assert load_catalogue()[name].verified


def test_only_the_demo_pair_needs_no_hub() -> None:
    assert [entry.name for entry in ENTRIES if entry.gguf] == ["smollm2-135m"]
    assert [entry.name for entry in ENTRIES if entry.drafter_is_embedded] == ["smollm2-135m"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("smollm2", "smollm2-135m"), ("Qwen3.8-27B-4bit", "qwen3.8-27b-4bit")],
)
def test_a_near_name_is_suggested(typed: str, meant: str) -> None:
    message = str(unknown_model(typed))
    assert message.startswith(f"'{typed}' is not a known model")
    assert f"did you mean {meant}" in message


def test_a_far_name_points_to_the_list() -> None:
    assert "see 'dflash2-mlx models'" in str(unknown_model("zzz"))

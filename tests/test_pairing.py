"""A pair is described by its drafter's own config once that is on disk, else by the catalogue."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import DRAFTER, LLAMA

from dflash2_mlx import pairing as module
from dflash2_mlx.catalogue import Entry, load_catalogue
from dflash2_mlx.fetch import Folder
from dflash2_mlx.pairing import Pairing, pairing, pairings

ENTRY = replace(load_catalogue()["qwen3.8-27b-4bit"], name="tiny")


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Describes the entry with these configs on disk; None leaves a folder out."""

    def write(name: str, config: dict[str, Any] | str | None) -> Folder:
        folder = tmp_path / name
        if config is not None:
            folder.mkdir()
            (folder / "model.safetensors").touch()
            text = config if isinstance(config, str) else json.dumps(config)
            (folder / "config.json").write_text(text)
        return Folder(folder)

    def describe(drafter: Any = None, target: Any = None, entry: Entry = ENTRY) -> Pairing:
        folders = {"drafter": write("drafter", drafter), "target": write("target", target)}
        monkeypatch.setattr(module, "drafter_source", lambda _: folders["drafter"])
        monkeypatch.setattr(module, "target_source", lambda _: folders["target"])
        return pairing(entry)

    return describe


def test_without_a_drafter_on_disk_the_catalogue_speaks(on_disk: Any) -> None:
    seen = on_disk()
    assert (seen.taps, seen.window, seen.block) == (ENTRY.taps, 2048, 8)
    assert (seen.drafting, seen.why) == (True, "a DFlash 2 drafter is known for it")
    assert not seen.to_dict()["cached"]


def test_a_drafter_on_disk_speaks_for_itself(on_disk: Any) -> None:
    seen = on_disk(DRAFTER, LLAMA)
    assert (seen.taps, seen.window, seen.block) == ((0, 2), 10, 8)
    assert seen.drafting
    assert seen.to_dict()["cached"]


def test_full_attention_has_no_window_whatever_the_field_holds(on_disk: Any) -> None:
    assert on_disk({**DRAFTER, "layer_types": ["full_attention"] * 2}).window is None


def test_both_must_be_on_disk_to_be_cached(on_disk: Any) -> None:
    shown = on_disk(DRAFTER).to_dict()
    assert (shown["drafter_cached"], shown["target_cached"], shown["cached"]) == (1, 0, 0)


@pytest.mark.parametrize(
    ("drafter", "target", "why"),
    [
        ("{", None, "num_hidden_layers is missing"),
        ("[]", None, "num_hidden_layers is missing"),
        ({**DRAFTER, "hidden_act": "gelu"}, None, "hidden_act is 'gelu', expected silu"),
        ({"speculators_model_type": "eagle3"}, None, "speculators_model_type is 'eagle3'"),
        (DRAFTER, {**LLAMA, "num_hidden_layers": 3}, "num_target_layers 4, the target has 3"),
        (DRAFTER, {"text_config": {**LLAMA, "hidden_size": 8}}, "hidden_size 64, the target has 8"),
    ],
)
def test_a_drafter_that_cannot_work_says_why(
    on_disk: Any, drafter: Any, target: Any, why: str
) -> None:
    seen = on_disk(drafter, target)
    assert not seen.drafting
    assert why in seen.why


def test_a_family_that_cannot_run_stays_so_with_its_drafter_on_disk(on_disk: Any) -> None:
    seen = on_disk(DRAFTER, None, replace(ENTRY, undraftable="no such model"))
    assert (seen.drafting, seen.why) == (False, "no such model")


def test_every_pair_of_the_catalogue_is_described() -> None:
    assert [seen.entry.name for seen in pairings()] == list(load_catalogue())

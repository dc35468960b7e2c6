"""States on disk survive a restart, or are ignored: what is damaged or foreign harms nobody."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from reusing import KINDS, PLENTY, chat, cold, pair_for, run, same, text

from dflash2_mlx.disk_tier import PARTIAL, DiskTier, checksum
from dflash2_mlx.pair import Pair
from dflash2_mlx.prefix_cache import PrefixCache

TURN, OTHER = chat(text(1, 50), text(2, 20)), chat(text(1, 50), text(3, 20))


def started(folder: Path, kind: str = "dense", budget: int = PLENTY) -> Pair:
    """A pair of a program that has just been started."""
    pair = pair_for(kind)
    pair.prefix_cache = PrefixCache(PLENTY, DiskTier(folder, budget))
    return pair


def disk(pair: Pair) -> DiskTier:
    assert pair.prefix_cache is not None
    assert pair.prefix_cache.disk is not None
    return pair.prefix_cache.disk


def filled(folder: Path, kind: str = "dense") -> Path:
    """A folder with the state of one system message."""
    pair = started(folder, kind)
    run(pair, TURN)
    disk(pair).flush()
    (file,) = disk(pair).files()
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_the_system_message_survives_a_restart(tmp_path: Path, kind: str) -> None:
    """With the drafter's context and our own cache classes (K11, K18)."""
    filled(tmp_path, kind)
    pair = started(tmp_path, kind)
    for known in (50, 70):
        result = run(pair, OTHER)
        assert result.cached_tokens == known
        assert same(result, cold(kind, OTHER))


def test_another_pair_or_drafting_has_states_of_its_own(tmp_path: Path) -> None:
    """(K19)"""
    filled(tmp_path)
    other = started(tmp_path)
    other.revisions = ("tiny of another revision",)
    assert run(other, OTHER).cached_tokens == 0
    plain = pair_for("dense", drafting=False)
    plain.prefix_cache = PrefixCache(PLENTY, DiskTier(tmp_path, PLENTY))
    assert run(plain, OTHER).cached_tokens == 0


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def foreign(file: Path) -> None:
    mx.save_safetensors(str(file), {"x": mx.zeros(3)}, {"format": "another's"})
    file.rename(file.with_name(f"{file.name[:33]}{checksum(file)}.safetensors"))


@pytest.mark.parametrize("damage", [flip, cut, empty, foreign])
def test_a_damaged_or_foreign_file_is_told_and_ignored(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    damage(filled(tmp_path))  # type: ignore[operator]
    pair = started(tmp_path)
    with caplog.at_level(logging.WARNING, "dflash2_mlx.server"):
        result = run(pair, OTHER)
    assert same(result, cold("dense", OTHER))
    assert result.cached_tokens == 0
    assert [record.getMessage().split(" ")[0] for record in caplog.records] == ["ignored"]


def test_a_process_killed_while_it_writes_leaves_nothing_half(tmp_path: Path) -> None:
    code = f"""
import os, signal
import dflash2_mlx.disk_tier as disk_tier
from pathlib import Path
from test_disk_tier import TURN, disk, run, started

def die(file):
    os.kill(os.getpid(), signal.SIGKILL)

disk_tier.checksum = die
pair = started(Path({str(tmp_path)!r}))
run(pair, TURN)
disk(pair).flush()
"""
    here = Path(__file__).parent
    killed = subprocess.run([sys.executable, "-c", code], cwd=here, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [file.suffix for file in tmp_path.iterdir()] == [PARTIAL]
    pair = started(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert same(run(pair, TURN), cold("dense", TURN))
    disk(pair).flush()
    assert run(started(tmp_path), OTHER).cached_tokens == 50


def test_the_files_stay_within_their_bytes(tmp_path: Path) -> None:
    size = filled(tmp_path / "one").stat().st_size
    pair = started(tmp_path / "more", budget=int(2.5 * size))
    for seed in range(5):
        run(pair, chat(text(10 + seed, 50), text(2, 20)), num_tokens=1)
        disk(pair).flush()
        assert sum(file.stat().st_size for file in disk(pair).files()) <= 2.5 * size
    assert len(disk(pair).files()) == 2
    newest = started(tmp_path / "more")
    assert run(newest, chat(text(14, 50), text(3, 20))).cached_tokens == 50
    assert run(newest, chat(text(10, 50), text(3, 20))).cached_tokens == 0


def test_a_state_larger_than_all_of_it_is_not_written(tmp_path: Path) -> None:
    pair = started(tmp_path, budget=100)
    run(pair, TURN)
    disk(pair).flush()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_taken_away_is_a_miss(tmp_path: Path) -> None:
    file = filled(tmp_path)
    pair = started(tmp_path)
    file.unlink()
    assert same(run(pair, OTHER), cold("dense", OTHER))


def test_a_folder_that_cannot_be_written_to_stops_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = started(tmp_path / "folder")
    shutil.rmtree(tmp_path / "folder")
    with caplog.at_level(logging.WARNING, "dflash2_mlx.server"):
        assert same(run(pair, TURN), cold("dense", TURN))
        disk(pair).flush()
    assert "no prompt state written" in caplog.text


def test_others_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("not ours")
    (tmp_path / "notes.txt").write_text("not ours")
    pair = started(tmp_path, budget=10)
    run(pair, TURN)
    disk(pair).flush()
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "notes.txt"]


def test_a_file_tells_what_it_is(tmp_path: Path) -> None:
    _, header = mx.load(str(filled(tmp_path)), return_metadata=True)
    assert header["format"] == "dflash2-mlx prompt state 1"
    assert sum(len(bytes.fromhex(ids)) // 4 for ids in json.loads(header["ids"])) == 50

"""How exact a machine is gets measured once for each machine and target, and kept."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import HIDDEN, LLAMA, build_model, pair_of, tiny_target

from dflash2_mlx import exactness
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.exactness import Exactness, Machine, exactness_of, measure, spans, this_machine
from dflash2_mlx.pair import Pair
from dflash2_mlx.rounding import Deviation, deviation
from dflash2_mlx.target import Caches, Reading, Target
from dflash2_mlx.widths import WIDTHS, LayerKind, LayerWidths, layer_kinds, try_widths

M1_ULTRA = {"device_name": "Apple M1 Ultra", "architecture": "applegpu_g13d"}
M5_MAX = {"device_name": "Apple M5 Max", "architecture": "applegpu_g17s"}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("DFLASH2_MLX_CACHE", str(tmp_path))
    return tmp_path / "exactness"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that were measured; what comes of it is made up."""
    names: list[str] = []
    kind = LayerKind("Linear", 64, 64, "float32")
    layers = (LayerWidths(kind, (1, 2), Deviation(1e-5, 1e-6)),)

    def made_up(pair: Pair) -> Exactness:
        names.append(pair.name)
        here = exactness.this_machine()
        return Exactness(here, pair.name, "float32", layers, Deviation(1e-5, 1e-6))

    monkeypatch.setattr(exactness, "measure", made_up)
    return names


def tiny() -> Pair:
    return pair_of(Target(tiny_target()))


class WideReadsOff(Target):
    """Reads of several rows, but not of a whole prompt, raise the logits of even tokens."""

    off = 0.5

    def read(self, tokens: mx.array, caches: Caches, **options: Any) -> Reading:
        reading = super().read(tokens, caches, **options)
        is_even = mx.arange(reading.logits.shape[-1]) % 2 == 0
        shift = self.off * is_even * (1 < tokens.size <= 16)
        return dataclasses.replace(reading, logits=reading.logits + shift)


def test_it_is_measured_once(measured: list[str]) -> None:
    told: list[str] = []
    first = exactness_of(tiny(), told.append)
    assert told == ["measuring how exact this machine is with tiny; this is done once"]
    assert exactness_of(tiny(), told.append) == first
    assert measured == ["tiny"]
    assert len(told) == 1


def test_what_is_kept_is_what_was_measured() -> None:
    pair = tiny()
    found = measure(pair)
    exactness.save(found, pair)
    assert exactness.load(tiny()) == found


@pytest.mark.parametrize("other", ["chip", "mlx", "blas", "name", "layers", "dtype"])
def test_nothing_is_taken_from_another_machine_or_target(
    monkeypatch: pytest.MonkeyPatch, measured: list[str], other: str
) -> None:
    here = Machine("Apple M4 Max applegpu_g16s", "0.32.2", None)
    monkeypatch.setattr(exactness, "this_machine", lambda: here)
    exactness_of(tiny())
    pair = tiny()
    if other in ("chip", "mlx", "blas"):
        there = dataclasses.replace(here, **{other: "another"})
        monkeypatch.setattr(exactness, "this_machine", lambda: there)
    elif other == "name":
        pair.name = "owner/another"
    elif other == "layers":
        pair = pair_of(Target(tiny_target("grouped-query")))
    else:
        half = build_model("llama", LLAMA)
        half.set_dtype(mx.bfloat16)
        pair = pair_of(Target(half))
    assert exactness.load(pair) is None
    exactness_of(pair)
    assert len(measured) == 2
    assert len(list(exactness.all_known())) == (1 if other in ("chip", "mlx", "blas") else 2)


def test_the_machine_is_what_mlx_and_the_system_say() -> None:
    assert this_machine(M1_ULTRA).chip == "Apple M1 Ultra applegpu_g13d"
    assert this_machine(M1_ULTRA) != this_machine(M5_MAX)
    assert this_machine({}).chip == "unknown"
    assert this_machine().mlx.count(".") == 2


@pytest.mark.parametrize("content", ["", "{}", '{"layers": 3}', '{"layers": [], "machine": {}}'])
def test_a_record_that_cannot_be_read_is_made_anew(
    cache: Path, measured: list[str], content: str
) -> None:
    known = exactness_of(tiny())
    (file,) = cache.glob("*.json")
    file.write_text(content)
    assert exactness_of(tiny()) == known
    assert exactness.load(tiny()) == known
    assert len(measured) == 2


@pytest.mark.usefixtures("measured")
def test_a_cache_that_cannot_be_written_is_told(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    told: list[str] = []
    exactness_of(tiny(), told.append)
    assert told[1].startswith("the measurement cannot be kept in ")


def test_wide_reads_that_are_wrong_are_refused_and_not_kept(cache: Path) -> None:
    pair = pair_of(WideReadsOff(tiny_target()))
    with pytest.raises(DFlashError, match=r"logits of tiny differ by .*%.* use --no-draft"):
        exactness_of(pair)
    assert not cache.exists()


def test_the_tolerance_is_twice_what_wide_reads_deviate_by() -> None:
    target = WideReadsOff(tiny_target())
    target.off = 0.01
    found = measure(pair_of(target))
    assert found.logits.largest == pytest.approx(0.01, rel=0.01)
    assert found.tolerance == 2 * found.logits.largest


def test_each_kind_of_layer_is_tried_once_the_head_included() -> None:
    model = build_model("llama", {**LLAMA, "tie_word_embeddings": True})
    nn.quantize(model, group_size=32, bits=4)
    kinds = [str(kind) for kind in layer_kinds(Target(model))]
    form = "4-bit affine, groups of 32"
    assert sorted(kinds) == [
        f"QuantizedEmbedding 300 x 64, {form}",
        f"QuantizedLinear 64 x 64, {form}",
        f"QuantizedLinear 64 x 96, {form}",
        f"QuantizedLinear 96 x 64, {form}",
    ]


@pytest.mark.parametrize(("bits", "mode", "group_size"), [(8, "mxfp8", 32), (4, "mxfp4", 32)])
def test_formats_are_told_apart(bits: int, mode: str, group_size: int) -> None:
    model = build_model("llama", LLAMA)
    nn.quantize(model, group_size=group_size, bits=bits, mode=mode)
    kinds = layer_kinds(Target(model))
    form = f"{bits}-bit {mode}, groups of 32"
    assert LayerKind("QuantizedLinear", 96, HIDDEN, form) in kinds


class Tiled(nn.Module):
    """A layer whose products of more than three rows round otherwise, from the second row on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.random.normal((8, HIDDEN), key=mx.random.key(1))

    def __call__(self, x: mx.array) -> mx.array:
        rows = mx.concatenate([row[None] @ self.weight.T for row in x[0]])
        late = mx.arange(len(rows))[:, None] > 0
        return mx.where(late & (len(rows) > 3), rows * (1 + 2e-7), rows)[None]


def test_a_width_counts_when_every_row_keeps_its_bits() -> None:
    kind = LayerKind("Tiled", 8, HIDDEN, "float32")
    found = try_widths(Target(tiny_target()), kind, Tiled())
    assert found.equal == (1, 2, 3)
    assert 0 < found.deviation.relative < 1e-6
    assert found.deviation.is_rounding("float32")


def test_one_row_always_has_the_bits_of_one_row() -> None:
    found = measure(tiny())
    assert all(layer.equal[0] == 1 for layer in found.layers)
    assert set(found.equal_widths) <= set(WIDTHS)
    assert found.equal_widths[0] == 1


def test_deviations() -> None:
    theirs = mx.array([[0.0, 2.0, 4.0], [1.0, 1.0, 1.0]])
    assert deviation(theirs, theirs) == Deviation(0.0, 0.0)
    ours = theirs + mx.array([[0.0, 0.0, 0.1], [0.0, 0.0, 0.0]])
    found = deviation(ours, theirs)
    assert found.largest == pytest.approx(0.1, abs=1e-6)
    assert found.relative == pytest.approx(0.1 / math.sqrt(8), rel=1e-4)
    assert not found.is_rounding("float32")
    assert found.is_rounding("bfloat16")


def test_infinities_agree_and_no_number_never_passes() -> None:
    masked = mx.array([[-mx.inf, 1.0, 2.0]])
    assert deviation(masked, masked).largest == 0
    broken = deviation(mx.array([[mx.nan, 1.0, 2.0]]), masked).or_worse(Deviation(1.0, 0.0))
    assert not broken.is_rounding("float32")
    assert broken.to_dict() == {"largest": None, "relative": None}


@pytest.mark.parametrize(
    ("widths", "text"),
    [((1, 2, 3, 5, 8, 9), "1 to 3, 5, 8 to 9"), ((1,), "1"), ((), "none")],
)
def test_widths_in_words(widths: Any, text: str) -> None:
    assert spans(widths) == text

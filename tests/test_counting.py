"""Counts of a graph are exact: what it multiplies, and the bytes it has to move."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from tiny import tiny_pair

from dflash2_mlx.counting import Counts, count, num_nodes

ROOT = Path(__file__).resolve().parent.parent
F32 = 4  # bytes


def counted(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> Counts:
    return count(fun, *[mx.zeros(shape) for shape in shapes])


def test_a_product_reads_both_sides_once() -> None:
    found = counted(lambda a, b: a @ b, (3, 8), (8, 5))
    assert found == Counts(1, 2 * 3 * 8 * 5, F32 * (24 + 40 + 15))


def test_a_quantized_product_reads_packed_weights() -> None:
    packed, scales, biases = mx.quantize(mx.zeros((32, 64)), group_size=32, bits=4)
    found = count(
        lambda x, *w: mx.quantized_matmul(x, *w, group_size=32, bits=4),
        mx.zeros((2, 64)),
        packed,
        scales,
        biases,
    )
    weights = 32 * 64 // 2 + 2 * F32 * 32 * 2
    assert found == Counts(1, 2 * 2 * 64 * 32, weights + F32 * (2 * 64 + 2 * 32))


def test_a_convolution_multiplies_each_output_with_its_taps() -> None:
    found = counted(lambda x, w: mx.conv1d(x, w, groups=6), (1, 7, 6), (6, 4, 1))
    assert found.flops == 2 * (4 * 6) * 4


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[1:3],
        lambda x: x.reshape(2, -1),
        lambda x: x[None],
        lambda x: mx.split(x, 2)[0],
        lambda x: mx.broadcast_to(x, (5, 4, 6)),
        lambda x: x.view(mx.int32),
    ],
)
def test_a_view_moves_nothing(view: Callable[[mx.array], mx.array]) -> None:
    assert counted(view, (4, 6)) == Counts()


def test_what_is_read_through_a_view_is_what_it_shows_and_not_more_than_there_is() -> None:
    assert counted(lambda x: mx.exp(x[1:3]), (4, 6)).nbytes == 2 * F32 * 12
    broadcast = counted(lambda x, y: x + y, (4, 6), (6,))
    assert broadcast == Counts(1, 0, F32 * (24 + 6 + 24))


def test_an_array_used_twice_is_read_once() -> None:
    assert counted(lambda x: x * x, (4, 6)).nbytes == 2 * F32 * 24


def test_a_lookup_reads_the_rows_it_takes() -> None:
    ids = mx.array([7, 8])
    found = count(lambda table, ids: table[ids], mx.zeros((1000, 6)), ids)
    assert found.nbytes == 2 * F32 * 12 + ids.nbytes


def test_an_update_writes_its_rows_alone() -> None:
    at = mx.array([2])
    found = count(
        lambda x, rows, at: mx.slice_update(x, rows, at, axes=(0,)),
        mx.zeros((1000, 6)),
        mx.zeros((3, 6)),
        at,
    )
    assert found.nbytes == 2 * (F32 * 18 + at.nbytes)


def test_only_the_experts_that_are_asked_for_are_read() -> None:
    def moe(rows: mx.array, weights: mx.array, chosen: mx.array) -> mx.array:
        return mx.gather_mm(rows, weights, rhs_indices=chosen)

    rows, weights = mx.zeros((3, 1, 8)), mx.zeros((64, 8, 5))
    few = count(moe, rows, weights, mx.array([0, 1, 1], dtype=mx.uint32))
    assert few.flops == 2 * 3 * 8 * 5
    assert few.nbytes < F32 * 4 * 8 * 5 + 1000 < weights.nbytes
    many = count(moe, mx.zeros((90, 1, 8)), weights, mx.zeros((90,), dtype=mx.uint32))
    assert many.nbytes > weights.nbytes


def test_counts_add_up_and_nothing_is_evaluated() -> None:
    huge = mx.zeros((1_000_000, 1_000_000))
    before = mx.get_active_memory()
    once = count(lambda x: mx.exp(x), huge)
    twice = count(lambda x: mx.exp(mx.exp(x)), huge)
    assert twice - once == once
    assert once + once == twice
    assert mx.get_active_memory() - before < 1_000_000


def test_a_compiled_function_is_one_node_but_all_its_primitives() -> None:
    def work(x: mx.array) -> mx.array:
        return mx.sin(x) * x + x

    x = mx.zeros((4, 6))
    mx.eval(x)
    assert num_nodes(work(x)) == 3
    assert num_nodes(mx.compile(work)(x)) == 1
    assert count(mx.compile(work), x) == count(work, x)


def test_a_forward_multiplies_every_weight_with_every_row() -> None:
    model, rows = tiny_pair().target.model, 3
    weights = tree_flatten(model.parameters())

    def forward(ids: mx.array, *arrays: mx.array) -> mx.array:
        names = [name for name, _ in weights]
        model.update(tree_unflatten(list(zip(names, arrays, strict=True))))
        return model(ids[None])

    found = count(forward, mx.zeros((rows,), dtype=mx.uint32), *[array for _, array in weights])
    model.update(tree_unflatten(weights))
    matrices = sum(a.size for name, a in weights if a.ndim == 2 and "embed" not in name)
    heads, layers, head_dim = 4, 4, 16
    attention = layers * heads * 2 * (2 * rows * rows * head_dim)
    assert found.flops == 2 * rows * matrices + attention


def test_a_copy_is_read_and_written() -> None:
    found = counted(lambda x: mx.contiguous(x.T), (4, 6))
    assert found == Counts(1, 0, 2 * F32 * 24)


def test_selector_and_convolutions_are_a_small_part_of_a_pass_of_the_large_pair() -> None:
    command = [sys.executable, str(ROOT / "scripts/count_shapes"), "--rows", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert 0 < report["share"]["flops"] < report["share"]["nbytes"] <= report["limit"] == 0.013
    # 27 billion weights of 4 bits with a scale and a bias for every 64, and the drafter's.
    assert 15e9 < report["pass"]["nbytes"] < 18e9
    assert 8 * 2 * 25e9 < report["pass"]["flops"] < 8 * 2 * 30e9
    assert report["convolutions"]["flops"] == 10 * 2 * 8 * 5120 * 1280

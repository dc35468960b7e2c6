"""Every option is either handed to the engine as it was given, or refused."""

import dataclasses
import inspect
from typing import Any

import pytest
from fake_engine import FakeEngine
from typer.testing import CliRunner, Result

from dflash2_mlx.cli.app import app
from dflash2_mlx.errors import UnsupportedField
from dflash2_mlx.generation import stream_generate
from dflash2_mlx.pair import load_pair
from dflash2_mlx.sampling import SamplingParams

LOADING = {
    "target": ("--model", "some/model", "some/model"),
    "drafter": ("--drafter", "some/drafter", "some/drafter"),
    "drafter_bits": ("--drafter-bits", "4", 4),
    "draft_block": ("--draft-block", "8", 8),
    "dtype": ("--dtype", "bfloat16", "bfloat16"),
}
SAMPLING = {
    "temperature": ("--temperature", "0.7", 0.7),
    "top_p": ("--top-p", "0.9", 0.9),
    "top_k": ("--top-k", "40", 40),
    "min_p": ("--min-p", "0.05", 0.05),
    "repetition_penalty": ("--repetition-penalty", "1.1", 1.1),
    "presence_penalty": ("--presence-penalty", "-0.5", -0.5),
    "frequency_penalty": ("--frequency-penalty", "0.5", 0.5),
    "penalty_context": ("--penalty-context", "64", 64),
    "logit_bias": ("--logit-bias", "42=-100,7=2.5", {42: -100.0, 7: 2.5}),
    "seed": ("--seed", "0", 0),
    "stop": ("--stop", "END", ("END",)),
}
RUNNING = {
    "max_tokens": ("--max-tokens", "7", 7),
    "block_size": ("--block-size", "4", 4),
}
GREEDY = SamplingParams()


@pytest.fixture(params=["generate", "chat"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    engine = FakeEngine().install(monkeypatch)
    prompt = ["--prompt", "Hi"] if request.param == "generate" else []

    def run(*options: str, engine_default: SamplingParams = GREEDY) -> tuple[FakeEngine, Result]:
        engine.default_sampling = engine_default
        model = [] if "--model" in options else ["--model", "tiny"]
        args = [request.param, *model, *prompt, *options]
        return engine, CliRunner().invoke(app, args, input="Hi\n")

    return run


@pytest.mark.parametrize("name", LOADING)
def test_a_loading_option_reaches_load_pair(run: Any, name: str) -> None:
    option, text, value = LOADING[name]
    engine, result = run(option, text)
    assert result.exit_code == 0, result.output
    assert engine.loads[0][name] == value


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_option_reaches_the_engine(run: Any, name: str) -> None:
    option, text, value = SAMPLING[name]
    engine, result = run(option, text)
    assert result.exit_code == 0, result.output
    sampling = engine.requests[0]["sampling"]
    assert getattr(sampling, name) == value
    assert dataclasses.replace(sampling, **{name: getattr(SamplingParams(), name)}) == (
        SamplingParams()
    )


@pytest.mark.parametrize("name", RUNNING)
def test_a_running_option_reaches_stream_generate(run: Any, name: str) -> None:
    option, text, value = RUNNING[name]
    engine, result = run(option, text)
    assert result.exit_code == 0, result.output
    assert engine.requests[0][name] == value


def test_the_tables_above_name_all_that_the_engine_takes() -> None:
    assert {*LOADING, "progress"} == set(inspect.signature(load_pair).parameters)
    assert {*SAMPLING, "logprobs", "grammar"} == {
        field.name for field in dataclasses.fields(SamplingParams)
    }
    others = {"exact", "pair", "prompt_ids", "sampling", "on_prefill", "marks", "session"}
    assert {*RUNNING, *others} == set(inspect.signature(stream_generate).parameters)


def test_exact_reaches_the_engine_after_this_machine_was_measured(run: Any) -> None:
    engine, _ = run("--exact")
    assert engine.requests[0]["exact"] is True
    assert engine.measured == ["tiny"]
    engine, _ = run()
    assert engine.requests[1]["exact"] is False
    assert engine.measured == ["tiny"]


def test_exact_is_refused_by_name_with_sampling(run: Any) -> None:
    engine, result = run("--exact", "--temperature", "0.7")
    assert isinstance(result.exception, UnsupportedField)
    assert "temperature is 0.7" in str(result.exception)
    assert not engine.loads
    engine, result = run("--exact", engine_default=RECOMMENDED)
    assert "temperature is 1;" in str(result.exception)
    assert not engine.measured
    assert run("--exact", "--temperature", "0", engine_default=RECOMMENDED)[1].exit_code == 0


@pytest.mark.parametrize("size", ["2", "4", "8"])
def test_a_block_size_reaches_the_engine_as_the_number_it_is(run: Any, size: str) -> None:
    engine, _ = run("--block-size", size)
    assert engine.requests[0]["block_size"] == int(size)


RECOMMENDED = SamplingParams(temperature=1.0, top_p=0.9, top_k=20, min_p=0.1)


def test_an_option_left_out_is_the_models_own(run: Any) -> None:
    engine, result = run("--top-k", "5", engine_default=RECOMMENDED)
    assert engine.requests[0]["sampling"] == dataclasses.replace(RECOMMENDED, top_k=5)
    state = next(line for line in result.stderr.splitlines() if line.startswith("tiny with"))
    assert state.endswith("; temperature 1, top_p 0.9, top_k 5, min_p 0.1")


def test_an_explicit_zero_wins_over_the_models_own(run: Any) -> None:
    zeros = {"temperature": 0.0, "top_p": 0.0, "top_k": 0, "min_p": 0.0, "seed": 0}
    options = [f"--{name.replace('_', '-')}=0" for name in zeros]
    engine, _ = run(*options, engine_default=RECOMMENDED)
    assert engine.requests[0]["sampling"] == SamplingParams(**zeros)  # type: ignore[arg-type]


def test_the_values_in_force_are_shown_at_the_start_and_at_the_end(run: Any) -> None:
    _, result = run("--temperature", "0.7", "--top-p", "0.9")
    state, figures = result.stderr.splitlines()[-2:]
    assert state.endswith("; temperature 0.7, top_p 0.9")
    assert figures.endswith(" · temperature 0.7, top_p 0.9, seed 123")


def test_a_filter_without_a_temperature_is_said_to_change_nothing(run: Any) -> None:
    _, result = run("--top-p", "0.9", "--min-p", "0.1")
    assert "min_p, top_p: no effect at temperature 0" in result.stderr
    _, result = run("--temperature", "0", engine_default=RECOMMENDED)
    assert "no effect" not in result.stderr


@pytest.mark.parametrize("count", ["0", "20"])
def test_logprobs_reach_the_engine_of_generate(monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    engine = FakeEngine().install(monkeypatch)
    line = ["generate", "--model", "tiny", "--prompt", "Hi", "--logprobs", count]
    assert CliRunner().invoke(app, [*line, "--json"]).exit_code == 0
    assert engine.requests[0]["sampling"] == SamplingParams(logprobs=int(count))
    refused = CliRunner().invoke(app, line)
    assert refused.exit_code == 2
    assert "--logprobs" in refused.stderr
    assert len(engine.loads) == 1


def test_without_options_the_engine_decides(run: Any) -> None:
    engine, _ = run()
    (load,), (request,) = engine.loads, engine.requests
    assert callable(load.pop("progress"))
    assert load == {"target": "tiny"} | dict.fromkeys(
        ["drafter", "drafter_bits", "draft_block", "dtype"]
    )
    assert request["sampling"] == SamplingParams()
    assert request["max_tokens"] is None
    assert request["block_size"] == "auto"


def test_no_draft_loads_no_drafter(run: Any) -> None:
    engine, _ = run("--no-draft")
    assert engine.loads[0]["drafter"] is False


def test_stop_strings_keep_their_number_and_order(run: Any) -> None:
    engine, _ = run("--stop", "b", "--stop", " a")
    assert engine.requests[0]["sampling"].stop == ("b", " a")


@pytest.mark.parametrize(
    "options",
    [
        ("--drafter", "d", "--no-draft"),
        ("--drafter-bits", "4", "--no-draft"),
        ("--draft-block", "4", "--no-draft"),
        ("--draft-block", "four"),
        ("--block-size", "four"),
        ("--temperature", "warm"),
        ("--max-tokens", "many"),
        ("--max-tokens", "0"),
        ("--dtype", "float12"),
        ("--logit-bias", "1:2"),
        ("--logit-bias", "1=x"),
        ("--logit-bias", ""),
        ("--logit-bias", "1=2,1=3"),
        ("--temprature", "1"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_refused_before_anything_is_loaded(run: Any, options: Any) -> None:
    engine, result = run(*options)
    assert result.exit_code == 2
    assert options[0] in result.stderr
    assert not engine.loads


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--temperature", "-1", "temperature"),
        ("--top-p", "2", "top_p"),
        ("--block-size", "0", "block size is 0, expected auto or a number from 1"),
        ("--block-size", "65", "block size is 65"),
    ],
)
def test_an_impossible_value_is_refused_by_name_before_anything_is_loaded(
    run: Any, option: str, value: str, told: str
) -> None:
    engine, result = run(option, value)
    assert result.exit_code == 1
    assert told in str(result.exception)
    assert not engine.loads

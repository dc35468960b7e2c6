"""What is served, how it is, what it did: and no name that is not served."""

from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import saying_pair, served

from dflash2_mlx.cli.serve import names
from dflash2_mlx.errors import EngineFailed


@pytest.fixture(scope="module")
def http() -> Any:
    with served() as http:
        yield http


def client(http: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url="http://localhost:8080/v1", api_key="none", http_client=http, max_retries=0
    )


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


# V29
def test_the_model_is_listed_with_its_limit_and_state(http: Any) -> None:
    (listed,) = client(http).models.list().data
    assert listed.id == "tiny"
    shown = listed.to_dict()
    assert shown["context_length"] == shown["max_model_len"] == 4096
    state: Any = shown["dflash"]
    assert (state["target"], state["drafter"], state["drafting"]) == ("tiny", "tiny", True)
    assert state["reason"]
    assert client(http).models.retrieve("tiny") == listed


# V31
def test_why_drafting_is_off_is_shown() -> None:
    pair = saying_pair()
    pair.drafter = None
    with served(pair) as http:
        state = http.get("/v1/models").json()["data"][0]["dflash"]
        assert (state["drafter"], state["drafting"]) == (None, False)
        assert state["reason"] == "no drafter was named"
        assert http.post("/v1/chat/completions", json=CHAT).json()["dflash"]["drafting"] is False


# V22
@pytest.mark.parametrize("name", ["tiny", "tiny-folder", "default", "", None])
def test_names_of_the_served_model_are_answered_as_it(http: Any, name: str | None) -> None:
    body = CHAT if name is None else {**CHAT, "model": name}
    for path in ("/v1/chat/completions", "/chat/completions"):
        answer = http.post(path, json=body)
        assert answer.status_code == 200
        assert answer.json()["model"] == "tiny"
    assert http.post("/v1/completions", json={"prompt": "a", "model": name}).status_code == 200


# V22
@pytest.mark.parametrize("name", ["nope", "gpt-4o", "someone/else", "../etc/passwd"])
def test_other_names_are_a_404_that_says_what_is_served(http: Any, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny' is") as missing:
        client(http).chat.completions.create(model=name, **CHAT)  # type: ignore[call-overload]
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.NotFoundError, match="'tiny' is"):
        client(http).models.retrieve(name)


@pytest.mark.parametrize(
    ("model", "served", "expected"),
    [
        ("smollm2-135m", None, ("smollm2-135m",)),
        ("owner/name@main", None, ("owner/name@main", "name")),
        ("owner/name", "mine", ("mine", "owner/name", "name")),
        ("/models/my model/", None, ("my model",)),
        ("./a/b/c", "x", ("x", "c")),
    ],
)
def test_names_come_from_the_command_line_and_no_path_is_one(model, served, expected) -> None:
    assert names(model, served) == expected


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("end", ["", "/"])
def test_every_path_works_without_v1_and_with_a_slash_and_never_redirects(
    http, prefix, end
) -> None:
    for path in ("/models", "/models/tiny", "/health", "/metrics"):
        found = http.get(f"{prefix}{path}{end}", follow_redirects=False)
        assert found.status_code == 200, path
    for path, body in (("/chat/completions", CHAT), ("/completions", {"prompt": "a"})):
        found = http.post(f"{prefix}{path}{end}", json=body, follow_redirects=False)
        assert found.status_code == 200, path


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nope", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
    ],
)
def test_what_is_not_there_is_an_error_object_too(http, method, path, status) -> None:
    found = http.request(method, path)
    assert found.status_code == status
    assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_health_says_what_runs_and_turns_red_with_the_reason(http: Any) -> None:
    healthy = http.get("/health")
    assert healthy.status_code == 200
    shown = healthy.json()
    assert (shown["status"], shown["running"], shown["queued"]) == ("ok", 0, 0)
    assert shown["effective"]["target"] == "tiny"
    assert shown["memory"]["active_bytes"] >= 0


def test_a_worker_that_died_is_red_until_the_next_request() -> None:
    deadly = [True]
    pair = saying_pair()

    def before_read(count: int) -> None:
        if deadly[0]:
            raise SystemExit

    pair.target.before_read = before_read
    with served(pair) as http:
        worker = http.app.state.desk.worker
        failed = http.post("/v1/chat/completions", json=CHAT)
        assert failed.status_code == EngineFailed.status == 503
        assert failed.headers["retry-after"] == "1"
        assert failed.json()["error"]["code"] == "engine_failed"
        assert worker.wait_for_state("failed", timeout_s=10)
        red = http.get("/health")
        assert red.status_code == 503
        assert red.json()["status"] == "error"
        assert "SystemExit" in red.json()["reason"]
        deadly[0] = False
        answer = http.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "hi"
        assert worker.wait_for_state("ready", timeout_s=10)
        assert http.get("/health").status_code == 200
        assert "dflash2_worker_restarts 1" in http.get("/metrics").text


# V30
def test_a_request_that_comes_while_the_model_is_freed_is_answered_whole() -> None:
    with served(idle_unload_s=0.0) as http:
        worker = http.app.state.desk.worker
        for _ in range(5):
            answer = http.post("/v1/chat/completions", json=CHAT)
            assert answer.json()["choices"][0]["message"]["content"] == "hi"
        assert worker.wait_for_state("unloaded", timeout_s=10)
        assert http.get("/health").json()["state"] == "unloaded"
        assert http.get("/v1/models").json()["data"][0]["context_length"] == 4096
        refused = http.post("/v1/chat/completions", json={**CHAT, "temperature": -1})
        assert refused.status_code == 400


def test_metrics_are_prometheus_text_and_count(http: Any) -> None:
    def read() -> dict[str, float]:
        text = http.get("/metrics").text
        return {
            sample.name + "".join(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    before = read()
    usage = http.post("/v1/chat/completions", json=CHAT).json()["usage"]
    after = read()
    assert after["dflash2_requests_totaldone"] == before["dflash2_requests_totaldone"] + 1
    for name in ("prompt_tokens", "completion_tokens"):
        grown = after[f"dflash2_{name}_total"] - before[f"dflash2_{name}_total"]
        assert grown == usage[name]
    assert after["dflash2_worker_ok"] == 1
    assert after["dflash2_decode_seconds_total"] > before["dflash2_decode_seconds_total"]
    assert http.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")

"""OpenAI's own client of a server in process."""

from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk

HELLO = [{"role": "user", "content": "Hello wörld 😀"}]


class Talk:
    """A server and OpenAI's client of it."""

    def __init__(self, http: Any) -> None:
        self.http = http
        self.worker = http.app.state.desk.worker
        self.openai = openai.OpenAI(
            base_url="http://localhost:8080/v1", api_key="none", http_client=http, max_retries=0
        )

    def whole(self, **body: Any) -> ChatCompletion:
        answer = self.openai.chat.completions.create(**filled(body))
        # The raw body too: the client's own parsing is lenient.
        return ChatCompletion.model_validate(answer.to_dict(), strict=True)

    def stream(self, **body: Any) -> list[ChatCompletionChunk]:
        return list(self.openai.chat.completions.create(stream=True, **filled(body)))

    def post(self, **body: Any) -> Any:
        return self.http.post("/v1/chat/completions", json=filled(body))


def filled(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, **body}


def text_of(found: list[ChatCompletionChunk]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices)

"""Requests as nobody should send them, for a server that must not mind."""

import json
from typing import Any

from hypothesis import strategies as st

from dflash2_mlx.server.app import GETS, POSTS
from dflash2_mlx.server.chat import UNSUPPORTED, ChatRequest
from dflash2_mlx.server.completions import CompletionRequest
from dflash2_mlx.server.messages import MessagesRequest
from dflash2_mlx.server.responses import ResponsesRequest

# Names and kinds that mean something inside the fields, so that odd values reach all depths.
WORDS = (
    "role content type text user assistant tool system tool_calls function name arguments id "
    "parameters properties required strict schema json_schema json_object allowed_tools mode tools "
    "auto include_usage image_url reasoning_content enable_thinking chat_template low anyOf $ref "
    "pattern tool_use tool_result input_schema thinking function_call_output message effort any"
)
TEXT = st.sampled_from(WORDS.split(" ")) | st.text(max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)
SHAPES = (ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest)
FIELDS = sorted({*UNSUPPORTED, *(name for shape in SHAPES for name in shape.model_fields)})
MESSAGES = [{"role": "user", "content": "hi"}]
SOUND: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/completions": {"prompt": "a", "max_tokens": 3},
    "/responses": {"input": "a", "max_output_tokens": 3},
    "/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/messages/count_tokens": {"messages": MESSAGES},
}
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """A body for a path: sound but for some fields, or only those, or no JSON at all."""
    kind = draw(st.sampled_from(("sound", "sound", "sound", "odd", "bytes", "value")))
    if kind == "bytes":
        return draw(st.binary(max_size=64))
    if kind == "value":
        return json.dumps(draw(VALUES)).encode()
    sound = SOUND.get(path.removeprefix("/v1"), {})
    odd = draw(BODIES)
    return json.dumps({**sound, **odd} if kind == "sound" else odd).encode()


HEADERS = st.dictionaries(
    st.sampled_from(("content-type", "origin", "x-api-key", "authorization", "x-session-id",
                     "anthropic-version", "anthropic-beta", "accept", "expect", "x-anything")),
    st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=12).map(str.strip),
    max_size=3,
)  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Method, target, headers and body, mostly for a route that is there."""
    prefix = draw(st.sampled_from(("/v1", "")))
    post = st.sampled_from(list(POSTS)).map(lambda path: ("POST", path))
    get = st.sampled_from([path.replace("{name:path}", "tiny") for path in GETS])
    other = st.tuples(
        st.sampled_from(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH")),
        st.sampled_from(["/", "/x", "/models/%ff%00", "/models/..%2f..", *POSTS, *GETS]),
    )
    # Bodies of routes that take one are what can go wrong, so most are those.
    method, path = draw(st.one_of(post, post, post, get.map(lambda path: ("GET", path)), other))
    query = draw(st.sampled_from(("", "", "?beta=true", "?a=%ff&a=", "/")))
    sent = draw(bodies(path)) if method not in ("GET", "HEAD") else b""
    target = prefix + path + query
    return {"method": method, "target": target, "headers": draw(HEADERS), "body": sent}

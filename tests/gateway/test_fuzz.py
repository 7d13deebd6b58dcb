"""Whatever is sent to whichever route, the server answers, with a declared status and in the shape of the route."""

import json

import httpx
import hypothesis
import hypothesis.strategies as st
import pytest

from harnessrl_jax.gateway.dialects import COUNT_PATH, PATHS

ROLLOUT = ("/run/r0/0", "/run/r0/0/central")
ROUTES = [
    *("/", "/health", "/ready", "/metrics", "/nowhere", "/run", "//", "/run/r0/0/v1/embeddings"),
    *ROLLOUT,
    *(f"{start}{end}" for start in (*ROLLOUT, "/run/r9/0", "/run/r0/x") for end in ("/v1/models", COUNT_PATH, *PATHS)),
]
METHODS = ["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"]
DECLARED = {200, 400, 401, 404, 405, 409, 413, 415, 429}

FIELDS = [
    "messages",
    "input",
    "system",
    "instructions",
    "tools",
    "tool_choice",
    "stream",
    "stream_options",
    "n",
    "stop",
    "seed",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "stop_sequences",
    "previous_response_id",
    "store",
    "model",
    "type",
    "role",
    "content",
    "text",
    "thinking",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "id",
    "call_id",
    "output",
    "summary",
    "signature",
    "encrypted_content",
    "tool_use_id",
    "tool_call_id",
    "parameters",
    "input_schema",
    "reasoning_content",
    "response_format",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "include",
]
WORDS = [
    "user",
    "assistant",
    "system",
    "developer",
    "tool",
    "text",
    "message",
    "function",
    "function_call",
    "function_call_output",
    "custom",
    "tool_use",
    "tool_result",
    "thinking",
    "output_text",
    "input_text",
    "image_url",
    "none",
    "auto",
    "required",
    "{}",
    '{"a":1}',
]
numbers = st.integers(-2, 5) | st.sampled_from([2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), -0.0])
# Control tokens in text, halves of surrogate pairs, zero bytes.
texts = st.sampled_from([*WORDS, "<|im_end|>", "<tool_call>", "\ud800", "\0", "x" * 5000]) | st.text(max_size=8)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | texts, inner, max_size=5),
    max_leaves=12,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(WORDS[:5])}, optional={"content": values, "tool_calls": values}),
    max_size=4,
)
objects = st.fixed_dictionaries(
    {}, optional={name: values for name in (*FIELDS[2:12], *FIELDS[-4:])} | {"messages": messages}
)
likely = st.builds(lambda turns, more: more | {"messages": turns, "input": turns}, messages, objects)
bodies = st.one_of(
    (likely | objects | values).map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=30),
    st.sampled_from([b"", b"{", b"[" * 10_000, b"\xff\xfe{}", b'{"messages":[{"role":"user","content":"Hi"}]}']),
)
NAMES = [
    "content-type",
    "content-encoding",
    "x-session-id",
    "x-stainless-retry-count",
    "x-parent-tool-call-id",
    "x-api-key",
    "session-id",
    "anthropic-version",
    "x-claude-code-session-id",
    "x-codex-turn-metadata",
    "x-openai-subagent",
    "x-parent-session-id",
]
headers = st.dictionaries(
    st.sampled_from(NAMES),
    st.sampled_from([b"", b"gzip", b"identity", b"{", b'{"thread_id": 3}', b"a b", b"\xe9", b"9" * 30, b"s" * 300]),
    max_size=3,
)


@pytest.fixture(scope="module")
def client(shared_house):
    with httpx.Client(base_url=shared_house.server.url, trust_env=False) as made:
        yield made


@hypothesis.given(
    method=st.sampled_from(METHODS) | st.just("POST"),
    route=st.sampled_from(ROUTES) | st.sampled_from([ROLLOUT[1] + path for path in (*PATHS, COUNT_PATH)]),
    body=bodies,
    sent=headers,
    known=st.booleans() | st.just(True),
)
@hypothesis.settings(max_examples=200, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
def test_no_route_ever_fails(shared_house, client, method, route, body, sent, known):
    key = {"authorization": f"Bearer {shared_house.endpoint.api_key if known else 'wrong'}"}
    response = client.request(method, route, content=body, headers=sent | key)
    assert response.status_code in DECLARED
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        assert response.text.endswith("\n\n")
        assert "internal_error" not in response.text
    elif response.status_code != 200 and method != "HEAD":
        error = response.json()["error"]
        assert {"type", "message", "code"} <= set(error)
        assert error["message"]
        assert response.json().get("type") == ("error" if "/v1/messages" in route else None)
    elif kind.startswith("application/json") and method != "HEAD":
        assert isinstance(response.json(), dict)

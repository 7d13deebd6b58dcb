"""Every refusal has OpenAI's shape, a stable code, words that help, and a count."""

import http.client
import json
import urllib.parse

import openai
import pytest

from harnessrl_jax.errors import GatewayError, SamplerError
from harnessrl_jax.gateway import Limits, registry

ASK = [{"role": "user", "content": "Hi"}]


def error_of(response):
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "x-should-retry" in response.headers
    return body["error"]


def with_message(**message):
    return {"messages": [{"role": "user", "content": "Hi"} | message]}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", r"The body is not JSON"),
        (b"\xff{}", r"not UTF-8"),
        (b"[" * 100_000, r"The body is not JSON"),
        (b"[]", r"must be a JSON object, got list"),
        ({}, r"messages must hold at least one message"),
        ({"messages": []}, r"messages must hold at least one message"),
        ({"messages": "Hi"}, r"messages must be of type list, got str"),
        ({"messages": ["Hi"]}, r"messages\[0\] must be an object, got str"),
        (with_message(role="robot"), r"messages\[0\]\.role is 'robot'; known roles are system"),
        (with_message(role=["user"]), r"messages\[0\]\.role is \['user'\]"),
        (with_message(content=3), r"messages\[0\]\.content must be text, a list of parts or null"),
        (
            with_message(content=[{"type": "image_url"}]),
            r"content\[0\] is of type 'image_url'; this model reads text only",
        ),
        (with_message(content=["x"]), r"content\[0\] is of type 'str'"),
        (with_message(role="assistant", tool_calls={}), r"messages\[0\]\.tool_calls must be a list"),
        (with_message(role="assistant", tool_calls=[{}]), r"tool_calls\[0\] must hold a function with a name"),
        (
            with_message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": 3}}]),
            r"arguments must be JSON text",
        ),
        ({"messages": ASK, "tools": [{"type": "function"}]}, r"tools\[0\] must hold a function with a name"),
        ({"messages": ASK, "tools": {}}, r"tools must be of type list, got dict"),
        ({"messages": ASK, "n": 0}, r"n must be an integer of at least 1, got 0"),
        ({"messages": ASK, "n": 99}, r"n is 99; this gateway gives at most 16 choices"),
        ({"messages": ASK, "max_tokens": True}, r"max_tokens must be an integer of at least 1, got True"),
        ({"messages": ASK, "max_completion_tokens": "5"}, r"max_completion_tokens must be an integer"),
        ({"messages": ASK, "stream": "yes"}, r"stream must be of type bool"),
    ],
)
def test_a_bad_body_is_refused_with_the_field(shared_house, body, words):
    response = shared_house.post(body)
    error = error_of(response)
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert response.headers["x-should-retry"] == "false"
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(error["message"])


def test_a_session_name_must_be_visible_ascii(shared_house):
    response = shared_house.post({"messages": ASK}, **{"x-session-id": "a b"})
    assert (response.status_code, error_of(response)["param"]) == (400, "x-session-id")


@pytest.mark.parametrize("key", ["Bearer wrong", "Bearer", "", "Basic {key}", "{key}", "Bearer {key}x", "Bearer \xff"])
def test_a_wrong_key_is_refused(shared_house, key):
    key = key.format(key=shared_house.endpoint.api_key)
    response = shared_house.post({"messages": ASK}, authorization=key.encode("latin-1"))
    assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")


def test_the_official_client_understands_a_wrong_key(shared_house):
    to = shared_house.endpoint._replace(api_key="wrong")
    with (
        shared_house.client(endpoint=to) as client,
        pytest.raises(openai.AuthenticationError, match="not this rollout's"),
    ):
        client.chat.completions.create(model="m", messages=ASK)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/run/r9/0/v1/chat/completions", 404, "rollout_not_found"),
        ("/run/r0/1/v1/chat/completions", 404, "rollout_not_found"),
        ("/other/r0/0/v1/chat/completions", 404, "rollout_not_found"),
        ("/run/r0/x/v1/chat/completions", 404, "rollout_not_found"),
        ("/run/r0/0/v1/embeddings", 404, "no_route"),
        ("/", 405, "no_route"),
        ("/run/r0/0/v1/models", 405, "no_route"),
    ],
)
def test_unknown_places(shared_house, path, status, code):
    place = urllib.parse.urlsplit(shared_house.server.url)
    connection = http.client.HTTPConnection(place.hostname, place.port)
    connection.request("POST", path, json.dumps({"messages": ASK}), {"authorization": "Bearer x"})
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (status, code)
    connection.close()


def test_a_long_body_is_refused(shared_house):
    response = shared_house.post({"messages": [{"role": "user", "content": "x" * (1 << 20)}]})
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
    assert "longer than 1048576 bytes" in error_of(response)["message"]


def test_a_rollout_has_only_so_many_calls(house):
    h = house(lambda prompt: "Yes.", limits=Limits(max_calls=3, max_new_tokens=2))
    assert h.post({"messages": ASK}).json()["choices"][0]["finish_reason"] == "length"
    refused = h.post({"messages": ASK, "n": 3})
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rollout_call_limit")
    # No retry can help: the client must not try.
    assert refused.headers["x-should-retry"] == "false"
    assert h.post({"messages": ASK, "n": 2}).status_code == 200
    with h.client() as client, pytest.raises(openai.RateLimitError, match="used all its 3 model calls"):
        client.chat.completions.create(model="m", messages=ASK)
    assert h.rollouts.counts()["refused/rollout_call_limit"] == 2
    assert len(h.calls()) == 3


def test_a_closed_rollout_refuses(house):
    h = house(lambda prompt: "Yes.")
    h.post({"messages": ASK})
    counts = h.rollouts.close("run", "r0", 0)
    assert counts == {"calls": 1, "delivered": 1, "finish/stop": 1, "parse/none": 1}
    response = h.post({"messages": ASK})
    assert (response.status_code, error_of(response)["code"]) == (409, "rollout_closed")
    assert len(h.calls()) == 1
    assert h.rollouts.counts()["late"] == 1


def test_a_failing_sampler_is_an_error_that_may_pass(house):
    def fail_once(prompt):
        if len(h.sampler.requests) == 1:
            raise SamplerError("Slot lost.")
        return "Yes."

    h = house(fail_once)
    response = h.post({"messages": ASK})
    assert (response.status_code, error_of(response)["code"]) == (503, "sampler_failed")
    assert "Slot lost." in error_of(response)["message"]
    assert response.headers["x-should-retry"] == "true"
    with h.client() as client:
        assert client.chat.completions.create(model="m", messages=ASK).choices[0].message.content == "Yes."
    assert len(h.calls()) == 1
    assert h.calls(["failed"]) == []
    assert h.store.counts() == {"calls/delivered": 1, "calls/failed": 1}


def test_a_broken_sampler_is_an_internal_error_with_a_trace_in_the_log(house, caplog):
    def break_down(prompt):
        raise ZeroDivisionError("a bug")

    h = house(break_down)
    response = h.post({"messages": ASK})
    assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
    assert "ZeroDivisionError" in error_of(response)["message"]
    h.server.stop()
    assert "ZeroDivisionError: a bug" in caplog.text
    h.store.flush()
    assert h.store.counts() == {"calls/failed": 1}


def test_one_failing_choice_fails_the_request(house):
    def fail_second(prompt):
        if len(h.sampler.requests) == 2:
            raise SamplerError("Slot lost.")
        return "Yes."

    h = house(fail_second)
    assert h.post({"messages": ASK, "n": 2}).status_code == 503
    h.store.flush()
    assert h.store.counts() == {"calls/failed": 2}


def test_messages_that_the_template_refuses(house, codec, monkeypatch):
    source = "{% if messages | length > 3 %}{{ raise_exception('too many turns') }}{% endif %}"
    monkeypatch.setattr(codec, "_template", type(codec._template)(source + codec._template.source, "template", {}))
    h = house(lambda prompt: "Yes.")
    response = h.post({"messages": ASK * 4})
    assert (response.status_code, error_of(response)["code"]) == (400, "template")
    assert "too many turns" in error_of(response)["message"]
    assert h.rollouts.counts()["refused/template"] == 1


def test_a_rollout_is_opened_once_at_a_time(house):
    h = house(lambda prompt: "Yes.")
    with pytest.raises(GatewayError, match=r"Rollout 'r0', attempt 0, is open already"):
        h.open()
    with pytest.raises(GatewayError, match=r"rollout_id is 'a/b'; it becomes part of a URL"):
        h.open("a/b")
    with pytest.raises(GatewayError, match=r"Rollout 'r7', attempt 0, is not known here: it was never opened"):
        h.rollouts.close("run", "r7", 0)
    h.post({"messages": ASK})
    h.rollouts.close("run", "r0", 0)
    again = h.open()
    assert again.api_key != h.endpoint.api_key
    assert h.calls() == []


def test_rollouts_closed_long_ago_are_forgotten_but_what_they_did_is_not(house, monkeypatch):
    """Memory does not grow with the rollouts of a run."""
    monkeypatch.setattr(registry, "REMEMBERED", 2)
    h = house(lambda prompt: "Yes.")
    names = ["r0", "r1", "r2", "r3"]
    endpoints = [h.endpoint, *map(h.open, names[1:])]
    for h.endpoint in endpoints:
        assert h.post({"messages": ASK}).status_code == 200
    for name in names:
        assert h.rollouts.close("run", name, 0)["calls"] == 1
    late = []
    for h.endpoint in endpoints:
        response = h.post({"messages": ASK})
        late.append((response.status_code, error_of(response)["code"]))
    assert late == [(404, "rollout_not_found")] * 2 + [(409, "rollout_closed")] * 2
    assert {event: h.rollouts.counts()[event] for event in ("calls", "late")} == {"calls": 4, "late": 2}
    assert h.rollouts.sampled_tokens() == sum(
        len(kept.call.output_ids) for name in names for kept in h.store.calls(name, 0)
    )
    assert h.rollouts.open_count() == 0
    assert h.rollouts.close("run", "r3", 0)["late"] == 1
    with pytest.raises(GatewayError, match=r"Rollout 'r0', attempt 0, is not known here: it was never opened, or"):
        h.rollouts.close("run", "r0", 0)


def test_health_needs_no_key(shared_house):
    place = urllib.parse.urlsplit(shared_house.server.url)
    connection = http.client.HTTPConnection(place.hostname, place.port)
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read()) == {"status": "ok"}
    connection.close()

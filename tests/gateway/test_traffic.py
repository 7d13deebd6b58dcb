"""What the service counts, whether it is ready, and how it drains: calls under way end well, new ones are refused."""

import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harnessrl_jax.errors import StoreError

ASK = [{"role": "user", "content": "Hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": ASK, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": ASK},
}


def get(h, path):
    with httpx.Client(trust_env=False) as client:
        return client.get(h.server.url + path)


def measured(h):
    """Every sample of the metrics page, by name and labels."""
    page = get(h, "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(page.text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_requests_tokens_and_the_store_are_counted(house):
    h = house(lambda prompt: "Yes.")
    for path, body in PATHS.items():
        assert h.post(body, path=path).status_code == 200
    h.post({"messages": []})
    h.post({"messages": ASK}, authorization="Bearer wrong")
    h.calls()
    seen = measured(h)
    for path in PATHS:
        assert seen["harnessrl_requests_total", path, "200"] == 1
    assert seen["harnessrl_requests_total", "/v1/chat/completions", "400"] == 1
    assert seen["harnessrl_requests_total", "/v1/chat/completions", "401"] == 1
    assert seen["harnessrl_request_seconds_count", "/v1/chat/completions"] == 3
    assert seen["harnessrl_rollout_events_total", "calls"] == 3
    assert seen["harnessrl_rollout_events_total", "refused/invalid_request"] == 1
    assert seen["harnessrl_sampled_tokens_total",] == sum(len(kept.call.output_ids) for kept in h.calls())
    assert seen["harnessrl_store_operations_total",] >= 9
    assert (seen["harnessrl_requests_under_way",], seen["harnessrl_rollouts_open",]) == (0, 1)
    h.rollouts.close("run", "r0", 0)
    assert measured(h)["harnessrl_rollouts_open",] == 0


def test_ready_until_it_drains_or_the_disk_fails(house):
    h = house(lambda prompt: "Yes.")
    assert (get(h, "/ready").status_code, get(h, "/ready").json()) == (200, {"status": "ready"})
    assert measured(h)["harnessrl_store_failed",] == 0

    def break_down(connection):
        connection.execute("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(StoreError):
        h.store.writer.commit_blocking(break_down)
    assert (get(h, "/ready").status_code, get(h, "/ready").json()) == (503, {"status": "store_failed"})
    assert measured(h)["harnessrl_store_failed",] == 1
    assert get(h, "/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_drain_ends_what_is_under_way_and_refuses_what_is_new(house, stream):
    h = house(lambda prompt: "Yes.")
    h.sampler.hold = "Hi"
    replies, left = [], []

    def ask():
        with h.client(max_retries=0) as client:
            reply = client.chat.completions.create(model="m", messages=ASK, stream=stream)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in reply) if stream else None
            replies.append(said if stream else reply.choices[0].message.content)

    asking = threading.Thread(target=ask)
    asking.start()
    while not h.sampler.requests:
        time.sleep(0.005)
    draining = threading.Thread(target=lambda: left.append(h.traffic.drain(30.0)))
    draining.start()
    while not h.traffic.draining:
        time.sleep(0.005)
    assert get(h, "/ready").json() == {"status": "draining"}
    for path, body in PATHS.items():
        refused = h.post(body, path=path)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "shutting_down")
        assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("5", "true")
        assert error["type"] == ("overloaded_error" if "messages" in path else "server_error")
    assert draining.is_alive()
    assert len(h.sampler.requests) == 1
    h.sampler.hold = ""
    asking.join()
    draining.join()
    assert (replies, left) == (["Yes."], [0])
    assert [kept.state for kept in h.calls()] == ["delivered"]


def test_a_drain_says_what_it_could_not_wait_for(house):
    h = house(lambda prompt: "Yes.", delay_s=60)
    asking = threading.Thread(target=lambda: h.post({"messages": ASK}))
    asking.start()
    while not h.sampler.requests:
        time.sleep(0.005)
    assert h.traffic.drain(0.05) == 1
    h.server.stop()
    asking.join()

"""What a rollout may use up: used calls and tokens are refused, concurrency waits, and all of it is counted."""

import asyncio

import anthropic
import openai
import pytest

from harnessrl_jax.gateway import Limits
from harnessrl_jax.gateway.budget import Budget
from harnessrl_jax.gateway.refusal import Refusal

ASK = [{"role": "user", "content": "Hi"}]
PATHS = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": ASK, "max_tokens": 100},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("limits", "code", "words"),
    [
        (Limits(max_calls=1), "rollout_call_limit", "all its 1 model calls"),
        (Limits(max_tokens=2), "rollout_token_limit", "all its 2 sampled tokens"),
    ],
)
def test_what_is_used_up_is_refused_in_every_dialect(house, path, limits, code, words):
    h = house(lambda prompt: "Yes, certainly.", limits=limits)
    assert h.post(PATHS[path], path=path).status_code == 200
    for stream in (False, True):
        refused = h.post(PATHS[path] | {"stream": stream}, path=path)
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["code"]) == (429, "rate_limit_error", code)
        assert words in error["message"]
        # No repetition helps: the clients are told not to try again.
        assert refused.headers["x-should-retry"] == "false"
    assert h.rollouts.counts()[f"refused/{code}"] == 2
    assert len(h.calls()) == 1


def test_the_official_clients_do_not_try_again(house):
    h = house(lambda prompt: "Yes.", limits=Limits(max_calls=1))
    h.post({"messages": ASK})
    with h.client(max_retries=5) as client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="m", messages=ASK)
    with h.anthropic(max_retries=5) as client, pytest.raises(anthropic.RateLimitError):
        client.messages.create(model="m", messages=ASK, max_tokens=9)
    assert h.rollouts.counts()["refused/rollout_call_limit"] == 2


def test_the_last_call_gets_what_is_left_and_choices_share_it(house):
    h = house(lambda prompt: "a b c d e f g h i j k l m n", limits=Limits(max_tokens=11, max_new_tokens=4))
    assert [h.post({"messages": ASK}).json()["usage"]["completion_tokens"] for _ in range(2)] == [4, 4]
    assert h.post({"messages": ASK, "n": 3}).json()["usage"]["completion_tokens"] == 3
    assert h.post({"messages": ASK}).status_code == 429
    calls = h.calls()
    assert [(kept.call.finish, kept.notes["max_new_tokens"]) for kept in calls[1:3]] == [("length", 4), ("length", 1)]


def test_too_many_at_once_wait_and_none_is_lost(house):
    h = house(lambda prompt: "Yes.", limits=Limits(max_concurrent=3, max_calls=40), delay_s=0.005)
    now, most = 0, 0
    real = h.sampler.complete

    async def watched(request):
        nonlocal now, most
        now += 1
        most = max(most, now)
        try:
            return await real(request)
        finally:
            now -= 1

    h.sampler.complete = watched

    async def ask():
        async with openai.AsyncOpenAI(
            base_url=f"{h.endpoint.base_url}/central/v1", api_key=h.endpoint.api_key, max_retries=0
        ) as client:
            create = client.chat.completions.create
            return await asyncio.gather(*(create(model="m", messages=ASK) for _ in range(20)))

    assert len(asyncio.run(ask())) == 20
    assert most == 3
    counts = h.rollouts.counts()
    assert (counts["calls"], counts["delivered"]) == (20, 20)
    assert 0 < counts["waited"] <= 17
    assert len({kept.call.call_id for kept in h.calls()}) == 20


def test_who_waits_when_the_rollout_is_closed_is_refused(house):
    h = house(lambda prompt: "Yes.", limits=Limits(max_concurrent=1))
    h.sampler.hold = "Hi"

    async def ask():
        async with openai.AsyncOpenAI(
            base_url=f"{h.endpoint.base_url}/central/v1", api_key=h.endpoint.api_key, max_retries=0
        ) as client:
            create = client.chat.completions.create
            asking = [asyncio.ensure_future(create(model="m", messages=ASK)) for _ in range(3)]
            while h.rollouts.counts()["waited"] < 2:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(h.rollouts.close, "run", "r0", 0)
            h.sampler.hold = ""
            return await asyncio.gather(*asking, return_exceptions=True)

    assert [error.status_code for error in asyncio.run(ask())] == [409, 409, 409]
    # Only the one that was being sampled is in the store, as late.
    assert len(h.sampler.requests) == 1
    assert h.store.counts() == {"calls/late": 1}
    assert h.rollouts.counts()["late"] == 3


def test_a_budget_by_hand():
    budget = Budget(Limits(max_calls=5, max_tokens=10))
    assert (budget.take(1), budget.take(2)) == (0, 1)
    assert (budget.calls, budget.requests, budget.room(1), budget.room(3)) == (3, 2, 10, 3)
    with pytest.raises(Refusal, match="all its 5 model calls"):
        budget.take(3)
    assert (budget.take(2), budget.calls) == (2, 5)
    budget.tokens = 8
    with pytest.raises(Refusal, match="all its 10 sampled tokens"):
        budget.room(3)
    assert (budget.room(2), Budget(Limits(max_new_tokens=4)).room(9)) == (1, 4)
    assert Budget(Limits(max_tokens=9, max_new_tokens=4)).room(1) == 4

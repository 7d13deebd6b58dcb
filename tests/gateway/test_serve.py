"""`serve` as a process: signals, drains, restarts; and what it refuses before it listens where others can reach it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from harnessrl_jax.errors import ConfigError
from harnessrl_jax.gateway import Store
from harnessrl_jax.launch.doctor import audit
from harnessrl_jax.launch.serve import address_of

STRONG = "Zk3-q8Lw0xTn5Rv7Ya1Bc9Ud"
PROGRAM = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import conftest
from harnessrl_jax import config
from harnessrl_jax.gateway import TextCodec
from harnessrl_jax.launch.serve import Serving, address_of, serve
model, run = map(pathlib.Path, sys.argv[2:])
def sampler(config):
    made = conftest.Scripted(TextCodec(model), lambda prompt: "Yes, certainly.")
    async def pace():
        while (model / "hold").exists():
            await conftest.asyncio.sleep(0.01)
    made.pace = pace
    return made
given = config.Config.model_validate({"name": "mine", "steps": 1, "model": {"path": str(model)}})
sys.exit(serve(given, run, Serving(address_of("127.0.0.1", 0, None), 30.0), sampler))
"""


@pytest.fixture
def model(train, tmp_path):
    folder = train(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    return folder


class Process:
    """`serve` in a process of its own, once it says how to reach it."""

    def __init__(self, model, run, **variables):
        arguments = [sys.executable, "-c", PROGRAM, os.path.dirname(__file__), str(model), str(run)]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | variables
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment)
        said = ""
        for line in self.process.stdout:
            said += line
            if "inspect" in line:
                break
        values = dict(re.findall(r"OPENAI_(BASE_URL|API_KEY)=(\S+)", said))
        self.url, self.key = values["BASE_URL"], values["API_KEY"]
        self.replies = []

    def ask(self):
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with httpx.Client(trust_env=False, headers={"authorization": f"Bearer {self.key}"}) as client:
            reply = client.post(f"{self.url}/chat/completions", json=body, timeout=60)
        self.replies.append(reply)
        return reply

    def asking(self, number):
        threads = [threading.Thread(target=self.ask) for _ in range(number)]
        for thread in threads:
            thread.start()
        while self.metric("harnessrl_requests_under_way") < number:
            time.sleep(0.01)
        return threads

    def metric(self, name):
        root = re.match(r"http://[^/]+", self.url)[0]
        page = httpx.get(f"{root}/metrics", trust_env=False).text
        return float(re.search(rf"^{name} (\S+)", page, re.MULTILINE)[1])

    def end(self):
        self.process.communicate(timeout=60)
        return self.process.returncode


def test_told_to_stop_it_finishes_what_it_has_begun_and_a_restart_keeps_it(model, tmp_path):
    run = tmp_path / "run"
    (model / "hold").touch()
    first = Process(model, run, HARNESSRL_API_KEY=STRONG)
    assert first.key == STRONG
    threads = first.asking(3)
    first.process.send_signal(signal.SIGTERM)
    while not first.metric("harnessrl_draining"):
        time.sleep(0.01)
    refused = first.ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    (model / "hold").unlink()
    for thread in threads:
        thread.join()
    assert first.end() == 0
    assert sorted(reply.status_code for reply in first.replies) == [200, 200, 200, 503]
    assert all(reply.text.endswith("data: [DONE]\n\n") for reply in first.replies if reply.status_code == 200)

    second = Process(model, run)
    assert second.url.endswith("/mine/served/1/v1")
    assert second.ask().status_code == 200
    # Nobody lets this one finish: the second signal cuts it off, and it is told so.
    (model / "hold").touch()
    threads = second.asking(1)
    second.process.send_signal(signal.SIGTERM)
    while not second.metric("harnessrl_draining"):
        time.sleep(0.01)
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 1
    for thread in threads:
        thread.join()
    assert "shutting_down" in second.replies[-1].text
    assert "[DONE]" not in second.replies[-1].text
    with Store(run / "calls.sqlite") as store:
        assert [kept.state for kept in store.calls("served", 0)] == ["delivered"] * 3
        assert [kept.state for kept in store.calls("served", 1)] == ["delivered"]
        assert store.counts() == {"calls/delivered": 4, "calls/failed": 1}
        assert store.lost == 0
    assert audit(run).findings == ()


@pytest.mark.parametrize(
    ("host", "url", "key", "words"),
    [
        ("0.0.0.0", "https://policy.example.org", None, "no key was given. Set HARNESSRL_API_KEY"),
        ("::", "https://policy.example.org", None, "no key was given"),
        ("policy.example.org", "https://policy.example.org", None, "no key was given"),
        ("0.0.0.0", None, STRONG, "proxy that terminates TLS"),
        ("10.0.0.1", "http://policy.example.org", STRONG, "unencrypted"),
        ("0.0.0.0", "https://policy.example.org", "changeme", "too easy to guess: 8 characters"),
        ("127.0.0.1", None, "k" * 40, "too easy to guess: 40 characters, 1 of them different"),
    ],
)
def test_what_others_can_reach_needs_a_key_and_tls(host, url, key, words):
    environment = {} if key is None else {"HARNESSRL_API_KEY": key}
    with pytest.raises(ConfigError, match=re.escape(words)):
        address_of(host, 0, url, environment)


def test_a_public_place_with_both_and_a_private_one_with_neither():
    public = address_of("0.0.0.0", 443, "https://policy.example.org", {"HARNESSRL_API_KEY": STRONG})
    assert (public.host, public.public_url, public.make_key()) == ("0.0.0.0", "https://policy.example.org", STRONG)
    private = address_of("127.0.0.1", 0, None, {})
    assert private.public_url is None
    assert private.make_key() != private.make_key()
    assert len(json.dumps(private.make_key())) >= 34

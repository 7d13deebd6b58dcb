"""Remote engines, against small servers that answer in their documented form.

vLLM: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html (completions, `return_token_ids`),
https://docs.vllm.ai/en/latest/features/sleep_mode.html (`/collective_rpc` with `reload_weights`) and
https://docs.vllm.ai/en/latest/usage/security.html (the endpoints of the development mode).
SGLang: https://docs.sglang.io/basic_usage/native_api.html, https://docs.sglang.io/basic_usage/sampling_params.html and
https://docs.sglang.io/advanced_features/sglang_for_rl.html (`/update_weights_from_disk`).
"""

import asyncio
import contextlib
import dataclasses
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler import SampleRequest, remote
from harnessrl_jax.sampler.remote import RemoteSampler
from harnessrl_jax.sampler.sglang import SGLang
from harnessrl_jax.sampler.vllm import VLLM

STOP = 7
ASK = SampleRequest(
    prompt_ids=(5, 6),
    max_new_tokens=4,
    temperature=0.5,
    top_p=0.9,
    top_k=3,
    min_p=0.1,
    seed=2**63 + 9,
    stop_ids=(STOP,),
    stop=("END",),
    request_id="call-1",
)


def sampled(prompt, limit):
    """The ids that the servers sample, and their log-probabilities: they count on from the prompt to the stop id."""
    ids = list(range(prompt[-1] + 1, prompt[-1] + 1 + limit))
    ids = ids[: ids.index(STOP) + 1] if STOP in ids else ids
    return ids, [-0.25 * (1 + at) for at in range(len(ids))], "stop" if STOP in ids else "length"


def vllm_reply(body):
    ids, logps, finish = sampled(body["prompt"], body["max_tokens"])
    logprobs = {
        "tokens": ["x"] * len(ids),
        "token_logprobs": logps,
        "top_logprobs": None,
        "text_offset": [0] * len(ids),
    }
    choice = {"index": 0, "text": "x" * len(ids), "logprobs": logprobs, "finish_reason": finish, "stop_reason": None}
    choice |= {"token_ids": ids, "prompt_token_ids": body["prompt"]}
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
    return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}


def sglang_reply(body):
    ids, logps, finish = sampled(body["input_ids"], body["sampling_params"]["max_new_tokens"])
    meta = {"id": body["rid"], "prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids)}
    meta |= {"finish_reason": {"type": finish}, "output_token_logprobs": [[p, i, None] for p, i in zip(logps, ids)]}
    return {"text": "x" * len(ids), "output_ids": ids, "meta_info": meta | {"weight_version": "default"}}


class Served:
    """A server of one engine: what it was asked, and how it should answer."""

    def __init__(self, path, reply):
        self.asked, self.path, self.reply = [], path, reply
        self.answer = None  # status and body instead of the usual
        self.cut = False  # whether the connection breaks in the middle of an answer
        self.rude = False  # whether it is closed after the answer, without a word of it
        self.opened, self.closed = 0, 0  # connections
        self.hold, self.held = threading.Event(), threading.Event()
        self.hold.set()
        served = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self):
                served.opened += 1
                super().setup()

            def finish(self):
                super().finish()
                served.closed += 1

            def do_GET(self):
                self.send(200, {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                served.asked.append((self.path, body))
                if self.path == served.path:
                    served.held.set()
                    served.hold.wait(30)
                status, said = served.answer or (200, served.reply(body) if self.path == served.path else {})
                with contextlib.suppress(ConnectionError):
                    self.send(status, said)

            def send(self, status, said):
                data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if served.cut else data)
                self.close_connection |= served.rude

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self):
        self.hold.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture(params=["vllm", "sglang"])
def served(request):
    made = Served("/v1/completions", vllm_reply) if request.param == "vllm" else Served("/generate", sglang_reply)
    made.kind = request.param
    yield made
    made.close()


def using(served, tmp_path, test, **options):
    saved = []

    def save(folder, params):
        folder.mkdir()
        saved.append((folder.name, params))

    async def run():
        wire = VLLM("tiny") if served.kind == "vllm" else SGLang()
        sampler = RemoteSampler(served.url, wire, folder=tmp_path, save=save, **options)
        await sampler.start()
        try:
            return await test(sampler, saved)
        finally:
            await sampler.close()

    return asyncio.run(run())


def test_ids_and_log_probabilities_come_back(served, tmp_path):
    async def test(sampler, _):
        return await sampler.complete(dataclasses.replace(ASK, prompt_ids=(1, 10))), await sampler.complete(ASK)

    long, short = using(served, tmp_path, test, version=3)
    assert (long.output_ids.tolist(), long.finish) == ([11, 12, 13, 14], "length")
    assert (short.output_ids.tolist(), short.finish) == ([7], "stop")
    assert long.logps.tolist() == [-0.25, -0.5, -0.75, -1.0]
    assert (long.logps.dtype, long.output_ids.dtype, long.versions.tolist()) == (np.float32, np.int32, [3] * 4)
    # vLLM's are those of what was left; SGLang's of the whole vocabulary at that temperature.
    cut = (0.9, 3, 0.1) if served.kind == "vllm" else (1.0, 0, 0.0)
    kind = long.logp_kind
    assert (kind.mode, kind.temperature, kind.top_p, kind.top_k, kind.min_p) == ("processed", 0.5, *cut)


def test_every_wish_is_sent(served, tmp_path):
    async def test(sampler, _):
        await sampler.complete(dataclasses.replace(ASK, grammar="start: /a/"))
        await sampler.complete(dataclasses.replace(ASK, top_k=0))

    using(served, tmp_path, test)
    (_, body), (_, free) = served.asked
    wishes = body if served.kind == "vllm" else body["sampling_params"]
    want = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "stop": ["END"], "stop_token_ids": [STOP]}
    want |= {"skip_special_tokens": False, "repetition_penalty": 1.0}
    assert {name: wishes[name] for name in want} == want
    if served.kind == "vllm":
        assert (body["prompt"], body["max_tokens"], body["seed"], body["model"]) == ([5, 6], 4, 9, "tiny")
        assert (body["return_token_ids"], body["logprobs"], body["include_stop_str_in_output"]) == (True, 0, True)
        assert body["structured_outputs"] == {"grammar": "start: /a/"}
        assert (free["top_k"], "structured_outputs" in free) == (0, False)
    else:
        assert (body["input_ids"], body["rid"], body["return_logprob"]) == ([5, 6], "call-1", True)
        assert (wishes["ebnf"], wishes["no_stop_trim"], wishes["max_new_tokens"]) == ("start: /a/", True, 4)
        assert (free["sampling_params"]["top_k"], "ebnf" in free["sampling_params"]) == (-1, False)
        assert 0 <= wishes["sampling_seed"] < 2**31


def test_a_swap_waits_for_what_is_under_way_and_holds_back_the_rest(served, tmp_path):
    async def test(sampler, saved):
        served.hold.clear()
        old = asyncio.create_task(sampler.complete(ASK))
        assert await asyncio.to_thread(served.held.wait, 30)
        swap = asyncio.create_task(asyncio.to_thread(sampler.load_weights, {"w": 1}, 4))
        while not sampler._swapping:
            await asyncio.sleep(0.005)
        new = asyncio.create_task(sampler.complete(dataclasses.replace(ASK, request_id="call-2")))
        await asyncio.sleep(0.05)
        assert len(served.asked) == 1  # neither the weights nor the new request have gone out
        served.hold.set()
        samples = [await old, await new]
        await swap
        return samples, saved

    (old, new), saved = using(served, tmp_path, test, version=3)
    assert (old.versions.tolist(), new.versions.tolist()) == ([3], [4])
    assert saved == [("version-000004", {"w": 1})]
    folder = str(tmp_path / "version-000004")
    loads = {
        "vllm": [
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
            ("/reset_prefix_cache", {}),
        ],
        "sglang": [
            ("/update_weights_from_disk", {"model_path": folder, "flush_cache": True, "weight_version": "4"}),
        ],
    }[served.kind]
    assert served.asked[1:-1] == loads


def test_weights_that_are_refused_leave_the_version(served, tmp_path):
    async def test(sampler, _):
        served.answer = (200, {"success": False, "message": "no such folder"})
        with pytest.raises(SamplerError, match=r"weights of version 4: the server refuses .*no such folder"):
            await asyncio.to_thread(sampler.load_weights, {}, 4)
        served.answer = None
        return await sampler.complete(ASK)

    assert using(served, tmp_path, test, version=3).versions.tolist() == [3]


def test_only_the_weights_that_are_served_stay_on_disk(served, tmp_path):
    async def test(sampler, _):
        await asyncio.to_thread(sampler.load_weights, {}, 4)
        await asyncio.to_thread(sampler.load_weights, {}, 5)
        served.answer = (500, {})
        with pytest.raises(SamplerError, match=r"weights of version 6"):
            await asyncio.to_thread(sampler.load_weights, {}, 6)

    (tmp_path / "somebody's").mkdir()
    using(served, tmp_path, test)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["somebody's", "version-000005", "version-000006"]


def test_a_server_without_a_way_to_load_weights_is_told_how_to_get_one(served, tmp_path):
    async def test(sampler, _):
        served.answer = (404, {"detail": "Not Found"})
        how = {"vllm": "Start vLLM with VLLM_SERVER_DEV_MODE=1", "sglang": "Use a version of SGLang"}[served.kind]
        with pytest.raises(SamplerError, match=rf"weights of version 4: the server has no such address\. {how}"):
            await asyncio.to_thread(sampler.load_weights, {}, 4)

    using(served, tmp_path, test)


def test_a_swap_that_waits_for_itself_ends(served, tmp_path):
    async def test(sampler, _):
        served.hold.clear()
        task = asyncio.create_task(sampler.complete(ASK))
        assert await asyncio.to_thread(served.held.wait, 30)
        with pytest.raises(SamplerError, match=r"1 requests did not end within 0\.3 s\. Load weights from another"):
            sampler.load_weights({}, 4)
        served.hold.set()
        with contextlib.suppress(SamplerError):
            await task

    using(served, tmp_path, test, weights_timeout_s=0.3)


def test_cancelling_reaches_the_server(served, tmp_path):
    async def test(sampler, _):
        served.hold.clear()
        task = asyncio.create_task(sampler.complete(ASK))
        assert await asyncio.to_thread(served.held.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        served.hold.set()
        return sampler._under_way

    assert using(served, tmp_path, test) == 0
    aborts = [] if served.kind == "vllm" else [("/abort_request", {"rid": "call-1"})]
    assert served.asked[1:] == aborts


def test_cancelling_one_request_leaves_the_others(served, tmp_path):
    async def test(sampler, _):
        served.hold.clear()
        names = ("call-1", "", "call-2")
        tasks = [asyncio.create_task(sampler.complete(dataclasses.replace(ASK, request_id=name))) for name in names]
        while len(served.asked) < 3:
            await asyncio.sleep(0.005)
        for task in tasks[:2]:
            task.cancel()
        ended = await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert [type(end) for end in ended] == [asyncio.CancelledError] * 2
        served.hold.set()
        return await tasks[2]

    assert using(served, tmp_path, test).output_ids.tolist() == [7]
    # An empty name would not say which one to end.
    aborts = [] if served.kind == "vllm" else [("/abort_request", {"rid": "call-1"})]
    assert [asked for asked in served.asked if asked[0] != served.path] == aborts


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"object": "error", "message": "too long"}), r"refuses with status 400: .*too long"),
        ((500, "<html>"), r"refuses with status 500: <html>"),
        ((200, "<html>"), r"answered in an unknown form"),
        ((200, {}), r"answered in an unknown form \(KeyError"),
    ],
)
def test_answers_that_are_none_are_errors_of_the_request(served, tmp_path, answer, message):
    async def test(sampler, _):
        served.answer = answer
        with pytest.raises(SamplerError, match=rf"^Request 'call-1': {re.escape(served.url)}.*{message}"):
            await sampler.complete(ASK)

    using(served, tmp_path, test)


@pytest.mark.parametrize("fault", ["short", "missing", "lost", "abort", "empty"])
def test_half_an_answer_is_none(served, tmp_path, fault):
    """One log-probability too few would shift all others; an aborted request is no sample."""
    reply = served.reply(ASK_LONG)
    if served.kind == "vllm":
        choice = reply["choices"][0]
        logps = choice["logprobs"]["token_logprobs"]
    else:
        meta = reply["meta_info"]
        logps = meta["output_token_logprobs"]
    match fault:
        case "short" if served.kind == "vllm":
            logps.pop()
        case "short":
            logps[1] = [logps[1][0]]
        case "missing" if served.kind == "vllm":
            logps[1] = None
        case "missing":
            logps[1][0] = None
        case "lost":
            logps.pop()
            if served.kind == "vllm":
                choice["token_ids"].pop()
        case "abort" if served.kind == "vllm":
            choice["finish_reason"] = "abort"
        case "abort":
            meta["finish_reason"] = {"type": "abort", "message": "aborted"}
        case _ if served.kind == "vllm":
            choice["token_ids"], choice["logprobs"]["token_logprobs"] = [], []
        case _:
            meta["output_token_logprobs"] = []

    async def test(sampler, _):
        served.answer = (200, reply)
        with pytest.raises(SamplerError, match=r"answered in an unknown form"):
            await sampler.complete(ASK)

    using(served, tmp_path, test)


def test_an_answer_that_is_cut_is_none_and_is_not_asked_for_again(served, tmp_path):
    """What was sent may be under way: another request would sample it twice."""

    async def test(sampler, _):
        served.cut = True
        with pytest.raises(SamplerError, match=r"^http.*: request 'call-1': RemoteProtocolError: peer closed"):
            await sampler.complete(ASK)
        assert len(served.asked) == 1
        served.cut = False
        return await sampler.complete(ASK)

    assert using(served, tmp_path, test).output_ids.tolist() == [7]
    assert len(served.asked) == 2


def test_a_connection_that_was_idle_is_not_used(served, tmp_path, monkeypatch):
    """The server may close it while the request is under way, and then nobody knows whether it was read."""
    monkeypatch.setattr(remote, "IDLE_S", 0.1)
    served.server.RequestHandlerClass.protocol_version = "HTTP/1.1"

    async def test(sampler, _):
        for _ in range(3):
            before = served.opened
            await asyncio.sleep(0.15)
            await sampler.complete(ASK)
            assert served.opened == before + 1

    using(served, tmp_path, test)
    assert len(served.asked) == 3


def test_a_connection_that_the_server_closed_is_not_used(served, tmp_path):
    served.server.RequestHandlerClass.protocol_version = "HTTP/1.1"
    served.rude = True

    async def test(sampler, _):
        for _ in range(3):
            while served.closed < served.opened:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            await sampler.complete(ASK)

    using(served, tmp_path, test)
    assert (served.opened, len(served.asked)) == (4, 3)


ASK_LONG = {"model": "tiny", "prompt": [1, 10], "max_tokens": 4, "rid": "call-1", "input_ids": [1, 10]}
ASK_LONG["sampling_params"] = {"max_new_tokens": 4}


def test_a_server_that_is_not_there_is_named(tmp_path):
    sampler = RemoteSampler("http://127.0.0.1:9", SGLang(), folder=tmp_path, save=lambda folder, params: None)
    with pytest.raises(SamplerError, match=r"^http://127\.0\.0\.1:9: start: ConnectError: .*Is the server running"):
        asyncio.run(sampler.start())


def test_what_an_engine_cannot_do_is_refused_before_it_is_asked(served, tmp_path):
    async def test(sampler, _):
        with pytest.raises(SamplerError, match=r"Request 'call-1': \w+ cannot ban token ids"):
            await sampler.complete(dataclasses.replace(ASK, banned_ids=(1,)))
        await sampler.close()
        with pytest.raises(SamplerError, match=r"the sampler was closed; make a new one"):
            await sampler.complete(ASK)

    using(served, tmp_path, test)
    assert served.asked == []


@pytest.mark.parametrize(
    ("mode", "wishes", "kind"),
    [
        ("processed", {"temperature": 0.7, "top_k": 5}, ("processed", 0.7, 5)),
        ("processed", {"temperature": 0.0}, None),
        ("raw", {"temperature": 1.0}, ("processed", 1.0, 0)),
        ("raw", {"temperature": 0.7}, None),
        ("raw", {"top_k": 5}, None),
        ("raw", {"grammar": "start: /a/"}, None),
        ("raw", {"temperature": 0.0}, ("raw", 1.0, 0)),
    ],
)
def test_log_probabilities_of_another_distribution_are_left_out(mode, wishes, kind):
    request = SampleRequest(prompt_ids=(1, 10), max_new_tokens=4, stop_ids=(STOP,), **wishes)
    wire = VLLM("tiny", logprobs=mode)
    sample = wire.sample(vllm_reply(wire.body(request)), request, 0)
    found = sample.logp_kind and (sample.logp_kind.mode, sample.logp_kind.temperature, sample.logp_kind.top_k)
    assert found == kind
    assert (sample.logps is None) == (kind is None)
    assert (sample.raw_logps is None) == (mode == "processed")

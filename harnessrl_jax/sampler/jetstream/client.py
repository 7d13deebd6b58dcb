"""The Sampler that asks a JetStream server with our engine, and starts it where none runs yet."""

import asyncio
import contextlib
import importlib.util
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

from harnessrl_jax.errors import SamplerError
from harnessrl_jax.sampler.batching import Job, result_of, tell
from harnessrl_jax.sampler.jetstream.wire import END, LOAD, SERVICE, encode, json_answer, json_bytes, rows
from harnessrl_jax.sampler.protocol import Sample, SampleRequest
from harnessrl_jax.sampler.vocabulary import Vocabulary


class JetStreamSampler:
    """The Sampler that asks a JetStream server on this machine, or at this end of a tunnel.

    Weights are taken up while requests are under way; every token has the version that sampled it.

    Args:
      address: of a server that runs, as in `localhost:9000`; None: `start` starts one with the first weights.
      folder: where weights are written, one folder a version, which is removed when the next one is served; the server
        must see it under the same path.
      save: writes parameters as a model folder with the tokenizer.
      vocabulary: what tokens mean; for requests with stop texts.
      options: of a server that is started, as in `--slots 16`.
      log: where a server that is started writes its errors.
      timeout_s: for a server to start, and to load weights.

    Raises:
      SamplerError: the extra `[jetstream]` is not installed.
    """

    def __init__(
        self,
        address: str | None,
        *,
        folder: Path,
        save: Callable[[Path, Any], None],
        vocabulary: Vocabulary,
        options: Sequence[str] = (),
        log: Path,
        timeout_s: float = 600.0,
    ) -> None:
        if importlib.util.find_spec("jetstream") is None:
            raise SamplerError(
                "The package jetstream is missing: install it with `pip install 'harnessrl-jax[jetstream]'`."
            )
        self._address = address or ""  # empty until there is a server
        self._folder, self._save, self._vocabulary = folder, save, vocabulary
        self._options, self._log, self._timeout_s = list(options), log, timeout_s
        self._latest: tuple[Path, int] | None = None  # weights that are written, and served as soon as somebody serves
        self._process: subprocess.Popen[str] | None = None
        self._closed = False
        self._channels: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    async def start(self) -> None:
        """Starts the server where it is to be started, and waits until it answers. Raises SamplerError."""
        if not self._address:
            self._address = await asyncio.to_thread(self._launch)
        try:
            await asyncio.wait_for(self._channel().channel_ready(), self._timeout_s)
        except TimeoutError as error:
            raise SamplerError(f"{self._address}: no JetStream server answers. Is it running?") from error

    async def complete(self, request: SampleRequest) -> Sample:
        """Samples until a stop id, a stop text or the length limit. Cancelling the call frees its slot.

        Raises:
          SamplerError: the server refuses the request, lacks what it asks for, or has ended.
        """
        import grpc

        name = f"Request {request.request_id!r}: "
        if self._closed:
            raise SamplerError(f"{name}the sampler was closed; make a new one.")
        number = secrets.randbits(62)
        job = Job(request, end_of=self._vocabulary.end_of(request.stop) if request.stop else None)
        try:
            await self._stream(encode(request, number), job)
        except grpc.RpcError as error:
            raise SamplerError(f"{name}{self._address}: {_reason(error)}. Is the server still running?") from error
        finally:
            if not job.ended or request.stop:
                await asyncio.shield(self._end(number))
        if not job.ended:
            raise SamplerError(
                f"{name}{self._address} gave it up after {len(job.ids)} tokens: its prompt and max_new_tokens do not "
                "fit the server's --length, or ids are not of its vocabulary. The server's log says which."
            )
        result = result_of(job)
        if isinstance(result, SamplerError):
            raise result
        return result

    def load_weights(self, params: Any, version: int) -> None:
        """Writes the weights and waits until the server has them; every later token is sampled with them.

        Raises:
          SamplerError: the server refuses them, does not answer, or has ended.
        """
        if self._process is not None and self._process.poll() is not None:  # nobody will ever answer
            raise self._ended(self._process)
        folder, before = self._folder / f"version-{version:06d}", self._latest
        self._save(folder, params)
        if self._address:
            self._swap(folder, version)
        self._latest = folder, version
        if before is not None and before[0] != folder:
            shutil.rmtree(before[0])

    async def close(self) -> None:
        """Closes this event loop's connection, and ends the server if it was started here. Idempotent."""
        self._closed = True
        channel = self._channels.pop(asyncio.get_running_loop(), None)
        if channel is not None:
            await channel.close()
        if self._process is not None:
            await asyncio.to_thread(_end, self._process)

    async def _stream(self, numbers: list[int], job: Job) -> None:
        """Adds the tokens of the reply as they come, and tells of them."""
        from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

        messages: Any = jetstream_pb2  # its classes are made at import, unseen by type checkers
        content = messages.DecodeRequest.TokenContent(token_ids=numbers)
        question = messages.DecodeRequest(token_content=content, max_tokens=job.request.max_new_tokens)
        replies = jetstream_pb2_grpc.OrchestratorStub(self._channel()).Decode(question)
        async for reply in replies:
            for row, version in rows(reply.stream_content.samples[0].token_ids):
                job.add(row, version)
                tell(job.request, job.blocks[-1:])
                if job.stopped:  # by a text, of which the server knows nothing, or by an id, after which nothing comes
                    replies.cancel()
                    return

    async def _end(self, number: int) -> None:
        """Ends a request on the server; whoever gave it up does not wait for an error of that."""
        import grpc

        method = self._channel().unary_unary(f"/{SERVICE}/{END}", json_bytes, json_answer)
        with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
            await method({"number": number})

    def _swap(self, folder: Path, version: int) -> None:
        import grpc

        message = {"folder": str(folder.resolve()), "version": version}
        with grpc.secure_channel(self._address, grpc.local_channel_credentials()) as channel:
            method = channel.unary_unary(f"/{SERVICE}/{LOAD}", json_bytes, json_answer)
            try:
                method(message, timeout=self._timeout_s, wait_for_ready=True)
            except grpc.RpcError as error:
                raise SamplerError(f"{self._address}: weights of version {version}: {_reason(error)}.") from error

    def _launch(self) -> str:
        """Starts a server on the latest weights; its address."""
        if self._latest is None:
            raise SamplerError("JetStreamSampler.start: no weights. Call load_weights(params, version) first.")
        folder, version = self._latest
        command = [sys.executable, "-m", "harnessrl_jax.sampler.jetstream", "serve", str(folder)]
        command += ["--version", str(version), "--port", "0", "--with-stdin", *self._options]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            # A session of its own: Ctrl-C is not for it, calls under way are finished first.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise self._ended(self._process)
        return line.split()[-1]

    def _ended(self, process: "subprocess.Popen[str]") -> SamplerError:
        return SamplerError(f"The sampler process ended with status {process.wait()}; {self._log} says why.")

    def _channel(self) -> Any:
        """This event loop's connection."""
        import grpc

        loop = asyncio.get_running_loop()
        if loop not in self._channels:
            self._channels[loop] = grpc.aio.secure_channel(self._address, grpc.local_channel_credentials())
        return self._channels[loop]


def _end(process: "subprocess.Popen[str]") -> None:
    """A server ends with its standard input."""
    _pipe(process.stdin).close()
    process.wait()
    _pipe(process.stdout).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # asked for at the start
    return pipe


def _reason(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"

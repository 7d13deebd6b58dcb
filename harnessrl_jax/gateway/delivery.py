"""A reply that is on disk, or that becomes one while it is sent -> the client. Afterwards it is known who took it."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from harnessrl_jax.gateway.exchange import Events, Head, Kind, TokenLogp
from harnessrl_jax.gateway.refusal import Refusal, stopping
from harnessrl_jax.gateway.service import Answer


class Delta(NamedTuple):
    """Text of one choice that can be sent before the reply is whole."""

    head: Head
    choice: int
    kind: Kind
    text: str
    logps: tuple[TokenLogp, ...] = ()


Item = Delta | Answer | Refusal
"""What a reply under way gives: any number of deltas, then its end."""


class Whole(Response):
    """A reply in one piece, its calls on disk.

    Args:
      body: the JSON.
      settle: told whether the client was there to take it.
    """

    def __init__(self, body: bytes, settle: Callable[[bool], None]) -> None:
        super().__init__(body, media_type="application/json")
        self._settle = settle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the reply."""
        delivered = False
        try:
            gone = await HttpRequest(scope, receive).is_disconnected()
            await super().__call__(scope, receive, send)
            delivered = not gone
        finally:
            self._settle(delivered)


class Stream(Response):
    """A reply as events: text while it is sampled; the rest, with the terminal event, once the calls are on disk.

    A client that leaves does not stop the sampling: the call is kept, as undelivered.

    Args:
      events: writes them.
      first: what came first.
      items: what comes.
      work: the task that makes them; it is cancelled if the server ends the request.
      settle: told the answer, and whether the client was there to take all of it.
    """

    def __init__(
        self,
        events: Events,
        first: Item,
        items: "asyncio.Queue[Item]",
        work: "asyncio.Task[None]",
        settle: Callable[[Answer, bool], None],
    ) -> None:
        super().__init__(media_type="text/event-stream; charset=utf-8", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._first = first
        self._items = items
        self._work = work
        self._settle = settle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        item, delivered = self._first, False
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while isinstance(item, Delta):
                text, after = self._written(item)
                # Kept before anything can fail: an answer that was taken must be settled.
                item = item if after is None else after
                await send({"type": "http.response.body", "body": text, "more_body": True})
                item = await self._items.get() if after is None else after
            last = self._events.fail(item) if isinstance(item, Refusal) else self._events.end(item.reply)
            gone = await HttpRequest(scope, receive).is_disconnected()
            await send({"type": "http.response.body", "body": last})
            delivered = not gone
        except asyncio.CancelledError:
            # The server stops. An end without an error would look like a whole reply to some clients.
            await send({"type": "http.response.body", "body": self._events.fail(stopping())})
        finally:
            self._work.cancel()
            left = [item, *(self._items.get_nowait() for _ in range(self._items.qsize()))]
            for answer in left:
                if isinstance(answer, Answer):
                    self._settle(answer, delivered)

    def _written(self, delta: Delta) -> tuple[bytes, Item | None]:
        """Everything that can be sent at once, as one piece; and what came after it, if that is no text."""
        pieces: list[bytes] = []
        after: Item | None = None
        while after is None and not self._items.empty():
            item = self._items.get_nowait()
            if not isinstance(item, Delta):
                after = item
            elif (item.choice, item.kind) == (delta.choice, delta.kind):
                delta = delta._replace(text=delta.text + item.text, logps=delta.logps + item.logps)
            else:
                pieces.append(self._events.text(*delta[1:]))
                delta = item
        return b"".join([*pieces, self._events.text(*delta[1:])]), after

"""Rollouts that may call the model: opened with a secret, counted while they run, frozen when they are closed."""

import hmac
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from harnessrl_jax.errors import GatewayError
from harnessrl_jax.gateway.budget import Budget, Limits
from harnessrl_jax.gateway.identity import check_name
from harnessrl_jax.gateway.refusal import Refusal
from harnessrl_jax.gateway.store import Store
from harnessrl_jax.gateway.turns import Turns

_DEFAULT_LIMITS = Limits()
REMEMBERED = 1024  # closed rollouts that are still known, so that a harness that goes on is told why it may not


class Endpoint(NamedTuple):
    """Where a harness sends its calls: `{base_url}/v1` or `{base_url}/{agent}/v1`, with the key as bearer token."""

    base_url: str
    api_key: str


@dataclass(slots=True)
class Totals:
    """What happened in all rollouts together, those that are forgotten included."""

    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    """Sampled ones."""


class OpenRollout:
    """One attempt of a rollout, while its harness runs. Its mutable fields belong to the gateway's event loop.

    Attributes:
      counts: what happened: `calls`, `waited`, `finish/...`, `parse/...`, `rewrite/...`, `refused/CODE`,
        `late`, `delivered`, `undelivered`, `failed`; `count` adds to them.
      budget: what it has used; `spend` adds sampled tokens.
    """

    def __init__(
        self,
        *,
        run_id: str,
        task_id: str,
        group_id: str,
        rollout_id: str,
        attempt: int,
        harness: str,
        trainable_agents: Collection[str],
        limits: Limits,
        life: int,
        secret: str,
        totals: Totals,
    ) -> None:
        self.run_id = run_id
        self.task_id = task_id
        self.group_id = group_id
        self.rollout_id = rollout_id
        self.attempt = attempt
        self.harness = harness
        self.trainable_agents = frozenset(trainable_agents)
        self.budget = Budget(limits)
        self.life = life
        self.turns = Turns()
        self.counts: Counter[str] = Counter()
        self.repetitions: Counter[tuple[str, bytes]] = Counter()
        self._totals = totals
        self._secret = secret.encode()
        self._gate = threading.Condition()
        self._closed = False
        self._replying = 0

    def admits(self, secret: str) -> bool:
        """Whether a bearer token is this rollout's."""
        return hmac.compare_digest(self._secret, secret.encode("utf-8", "surrogateescape"))

    @property
    def closed(self) -> bool:
        """Whether the rollout's calls are frozen."""
        return self._closed

    def count(self, event: str, number: int = 1) -> None:
        """Notes that something happened `number` times."""
        self.counts[event] += number
        self._totals.counts[event] += number

    def spend(self, tokens: int) -> None:
        """Notes sampled tokens."""
        self.budget.tokens += tokens
        self._totals.tokens += tokens

    def begin_reply(self) -> bool:
        """Asks to store and send a sampled reply; False if the rollout was closed meanwhile. Pair with `end_reply`."""
        with self._gate:
            if self._closed:
                return False
            self._replying += 1
            return True

    def end_reply(self) -> None:
        """The reply was sent, or could not be."""
        with self._gate:
            self._replying -= 1
            self._gate.notify_all()

    def forget(self) -> None:
        """Drops what only an open rollout needs."""
        self.turns = Turns()
        self.repetitions.clear()

    def freeze(self, timeout_s: float) -> None:
        """Refuses what comes from now on, and waits for replies that are on their way."""
        with self._gate:
            self._closed = True
            if not self._gate.wait_for(lambda: self._replying == 0, timeout_s):
                raise GatewayError(
                    f"Rollout {self.rollout_id!r}, attempt {self.attempt}: {self._replying} replies were still being "
                    f"sent after {timeout_s} s. Stop the harness before closing its rollout."
                )


def random_key() -> str:
    """A key that nobody can guess: 192 random bits as 32 characters."""
    return secrets.token_urlsafe(24)


class Rollouts:
    """Every rollout that this gateway knows. Safe to use from any thread except the gateway's own event loop.

    Args:
      store: where calls go.
      base_url: address of the gateway, such as `http://127.0.0.1:8000`.
      make_secret: draws the key of a rollout.
    """

    def __init__(self, store: Store, base_url: str, make_secret: Callable[[], str] = random_key) -> None:
        self._store = store
        self._base_url = base_url.rstrip("/")
        self._make_secret = make_secret
        self._totals = Totals()
        self._open: dict[tuple[str, str, int], OpenRollout] = {}
        self._closed: dict[tuple[str, str, int], OpenRollout] = {}  # the latest ones, oldest first
        self._opening: set[tuple[str, str, int]] = set()
        self._gate = threading.Lock()

    def open(
        self,
        *,
        run_id: str,
        task_id: str,
        group_id: str,
        rollout_id: str,
        attempt: int,
        harness: str,
        trainable_agents: Collection[str],
        limits: Limits = _DEFAULT_LIMITS,
    ) -> Endpoint:
        """Lets a harness call the model for one attempt of a rollout.

        Calls that a killed process stored for the same attempt are hidden, so that they are not trained twice.

        Raises:
          GatewayError: a name cannot stand in a URL, or the attempt is open already.
          StoreError: the store cannot be written.
        """
        key = (check_name("run_id", run_id), check_name("rollout_id", rollout_id), attempt)
        with self._gate:
            if key in self._opening or key in self._open:
                raise GatewayError(f"Rollout {rollout_id!r}, attempt {attempt}, is open already; close it first.")
            self._opening.add(key)
        secret = self._make_secret()
        try:
            # Outside the gate: rollouts that are opened together share one flush to disk.
            opened = OpenRollout(
                run_id=run_id,
                task_id=task_id,
                group_id=group_id,
                rollout_id=rollout_id,
                attempt=attempt,
                harness=harness,
                trainable_agents=trainable_agents,
                limits=limits,
                life=self._store.open_attempt(rollout_id, attempt),
                secret=secret,
                totals=self._totals,
            )
            with self._gate:
                self._open[key] = opened
                self._closed.pop(key, None)
        finally:
            with self._gate:
                self._opening.discard(key)
        return Endpoint(f"{self._base_url}/{run_id}/{rollout_id}/{attempt}", secret)

    def close(self, run_id: str, rollout_id: str, attempt: int, *, timeout_s: float = 60.0) -> Counter[str]:
        """Freezes an attempt; when this returns, everything its harness received is on disk.

        Args:
          run_id: as opened.
          rollout_id: as opened.
          attempt: as opened.
          timeout_s: how long to wait for replies that are on their way.

        Returns:
          What happened, counted; see `OpenRollout.counts`. Later calls of the harness get 409 and count as `late`, as
          long as the rollout is among the last `REMEMBERED` that were closed, and 404 after that.

        Raises:
          GatewayError: no such rollout, or replies are stuck.
          StoreError: the store cannot be written.
        """
        key = run_id, rollout_id, attempt
        rollout = self._get(key)
        if rollout is None:
            raise GatewayError(
                f"Rollout {rollout_id!r}, attempt {attempt}, is not known here: it was never opened, or it was closed "
                f"before the last {REMEMBERED} that were. Close a rollout once, with the names it was opened with."
            )
        rollout.freeze(timeout_s)
        self._store.flush()
        rollout.forget()
        with self._gate:
            if self._open.get(key) is rollout:
                self._closed[key] = self._open.pop(key)
                while len(self._closed) > REMEMBERED:
                    del self._closed[next(iter(self._closed))]
        return Counter(rollout.counts)

    def find(self, run_id: str, rollout_id: str, attempt: str, secret: str | None) -> OpenRollout:
        """The rollout that a request names and has the key of.

        Raises:
          Refusal: 404 for an unknown rollout, 401 for a wrong key.
        """
        number = int(attempt) if attempt.isascii() and attempt.isdigit() and len(attempt) < 10 else -1
        rollout = self._get((run_id, rollout_id, number))
        if rollout is None:
            raise Refusal(
                f"No rollout {rollout_id!r}, attempt {attempt!r}, of run {run_id!r} is known here. Use the base URL "
                "that the harness was given.",
                status=404,
                code="rollout_not_found",
            )
        if secret is None or not rollout.admits(secret):
            raise Refusal(
                "The API key is not this rollout's. Send the key the harness was given as `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )
        return rollout

    def counts(self) -> Counter[str]:
        """What happened in all rollouts together."""
        return Counter(self._totals.counts)

    def sampled_tokens(self) -> int:
        """Tokens sampled in all rollouts together."""
        return self._totals.tokens

    def open_count(self) -> int:
        """How many rollouts may call the model."""
        with self._gate:  # one whose replies are stuck is frozen already
            return sum(not rollout.closed for rollout in self._open.values())

    def _get(self, key: tuple[str, str, int]) -> OpenRollout | None:
        with self._gate:
            return self._open.get(key) or self._closed.get(key)

"""The upstreams: who is up, by their lists of models, and who gets a request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence

import anyio
import httpx
import msgspec
from msgspec import Struct
from uhashring import HashRing

from engine.api import UpstreamHealth
from engine.upstream.circuit import Circuit

logger = logging.getLogger("chorus.upstream")

BALANCE, SLACK = 1.25, 8
"""A prompt goes where its beginning leads as long as that upstream has no more than BALANCE times the mean of choices,
and SLACK: a few more in one batch cost less than a prompt that is computed again."""

POLL_TIMEOUT = 5.0
DOWN_POLL_SECONDS = 0.5
OUTCOMES = ("ok", "refused", "failed", "cancelled")


class _Model(Struct):
    id: str
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model]


class Upstream:
    """One server. reason: why it is not up, None when it is."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = url.partition("://")[2]
        self.reason: str | None = "not asked yet"
        self.model = ""
        self.max_model_len = 0
        self.num_choices = 0
        self.circuit = Circuit()
        self.requests = Counter(dict.fromkeys(OUTCOMES, 0))

    @property
    def is_available(self) -> bool:
        return self.reason is None and self.circuit.lets_through

    def take(self) -> None:
        """A choice is its from now on, until `release`."""
        self.num_choices += 1
        self.circuit.begin()

    def release(self) -> None:
        self.num_choices -= 1
        self.circuit.give_up()

    def set_down(self, reason: str) -> None:
        if self.reason is None:
            logger.warning("upstream %s is down: %s", self.name, reason)
        self.reason = reason

    def set_up(self, models: Sequence[_Model], wanted: str | None) -> None:
        """wanted: None for whatever it has."""
        model = next((model for model in models if wanted in (None, model.id)), None)
        if model is None:
            self.set_down(f"it has no model {wanted}" if wanted else "it has no model")
            return
        if self.reason is not None:
            logger.info("upstream %s is up", self.name)
        self.reason, self.model, self.max_model_len = None, model.id, model.max_model_len or 0

    def health(self) -> UpstreamHealth:
        return UpstreamHealth(self.name, self.reason is None, self.circuit.is_open, self.num_choices, self.requests)


class Fleet:
    """model: the name that it must have; None for the first that any of them has."""

    def __init__(self, urls: Sequence[str], model: str | None) -> None:
        self.upstreams = [Upstream(url) for url in urls]
        self._by_url = {upstream.url: upstream for upstream in self.upstreams}
        self._ring = HashRing(list(self._by_url))
        self._model = model
        self.changed = anyio.Event()

    @property
    def model(self) -> str | None:
        return self._model

    @property
    def max_model_len(self) -> int:
        """The least of those that say; 0 where none does."""
        return min((upstream.max_model_len for upstream in self.upstreams if upstream.max_model_len), default=0)

    @property
    def reason(self) -> str | None:
        """Why nothing can be asked, None when something can."""
        if any(upstream.reason is None for upstream in self.upstreams):
            return None
        return "no upstream is up: " + "; ".join(f"{one.name}: {one.reason}" for one in self.upstreams)

    def choose(self, key: str, tried: Collection[Upstream] = ()) -> Upstream | None:
        """The first on the key's way round the ring that has not more than its share; None where none is available."""
        order = [self._by_url[url] for url in self._ring.iterate_nodes(key)]
        usable = [upstream for upstream in order if upstream.is_available and upstream not in tried]
        if not usable:
            return None
        share = BALANCE * sum(upstream.num_choices for upstream in usable) / len(usable) + SLACK
        return next(upstream for upstream in usable if upstream.num_choices <= share)

    async def poll(self, upstream: Upstream, http: httpx.AsyncClient, seconds: float) -> None:
        """Ask it for its models now and again, for ever."""
        is_slow = False
        while True:
            try:
                with anyio.fail_after(POLL_TIMEOUT):
                    models = await http.get(f"{upstream.url}/v1/models")
                    health = await http.get(f"{upstream.url}/health")
                self._note(upstream, models, health)
                is_slow = False
            except (TimeoutError, httpx.TimeoutException):
                # once may be a garbage collection or a long prefill, with answers on their way all the same
                if is_slow or upstream.reason is not None:
                    upstream.set_down(f"it does not answer within {POLL_TIMEOUT:g} s")
                is_slow = True
            except httpx.HTTPError as error:
                upstream.set_down(str(error) or type(error).__name__)
            self.changed.set()
            self.changed = anyio.Event()
            await anyio.sleep(seconds if upstream.reason is None else min(seconds, DOWN_POLL_SECONDS))

    def _note(self, upstream: Upstream, listed: httpx.Response, health: httpx.Response) -> None:
        """health: many servers list a model that is still loading, and say so there; others know no such path."""
        if listed.status_code != 200:
            upstream.set_down(f"GET /v1/models answers with status {listed.status_code}")
            return
        if health.status_code == 503:
            upstream.set_down("GET /health answers with status 503")
            return
        try:
            models = msgspec.json.decode(listed.content, type=_Models).data
        except msgspec.DecodeError:
            upstream.set_down("GET /v1/models answers with no list of models")
            return
        upstream.set_up(models, self._model)
        if self._model is None and upstream.reason is None:
            self._model = upstream.model

"""Calls of scorers that speak JSON, with the patience of a RewardService's client.

Owns the bound on calls under way, and what a failed call means for the next. How a call is carried, over HTTP or gRPC,
is a carrier's; what is asked, and how an answer is read, is the caller's.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from rolecall.errors import DeadlineError, RateLimitedError, RoleCallError, UnauthenticatedError, UnavailableError
from rolecall.rpc.tls import token_of
from rolecall.scoring.http import HttpCarrier
from rolecall.scoring.open_inference import InferenceCarrier
from rolecall.scoring.peer import Peer
from rolecall.settings import ExternalScorer, RpcSection, ScorerServer, token_given


class Carrier(Protocol):
    """The way to a server that takes and answers JSON."""

    def encoded(self, body: Any) -> Any:
        """Returns the JSON `body` as calls take it: encoded once, however often it is sent."""
        ...

    async def call(self, path: str, body: Any, timeout_s: float) -> Any:
        """Returns what the server answers to the `encoded` body at `path` below its URL; to None, what it says of
        itself. Raises what a RewardService's answer of that kind would.
        """
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


class JsonServer:
    """A server that speaks JSON. Used from one event loop; `close` at the end."""

    def __init__(self, name: str, scorer: ScorerServer, rpc: RpcSection, *, timeout_s: float) -> None:
        """The server of the component `name`, with `timeout_s` for each of scorer.max_calls at a time; further ones
        wait, within their caller's deadline. ConfigError when its answers, or the token, would be seen on the way, and
        for an unreadable token or roots.
        """
        given = token_given(name)
        token = token_of(scorer.bearer_token_file) or (None if given is None else lambda: given)
        self._carrier: Carrier = (
            InferenceCarrier(scorer, rpc, token) if scorer.over_grpc else HttpCarrier(scorer, rpc, token)
        )
        self._timeout_s = timeout_s
        self.peer = Peer(
            name=name,
            address=scorer.address,
            timeout_s=timeout_s,
            hedge_after_s=scorer.hedge_after_s,
            loads=isinstance(scorer, ExternalScorer) and scorer.server is not None,
        )
        self._calls = asyncio.Semaphore(scorer.max_calls)

    async def post(self, path: str, body: object | Callable[[], object]) -> Any:
        """Returns the JSON that the server answers to the JSON `body` at `path` below its URL; a function makes a large
        one when its turn comes, in a thread. Raises what a RewardService's answer of that kind would.
        """
        away = self.peer.away()
        if away is not None:
            raise away
        async with self._calls:  # bounded: what is inside has timeout_s, and admission bounds how many wait
            encoded = self._carrier.encoded
            made = await asyncio.to_thread(lambda: encoded(body())) if callable(body) else encoded(body)
            try:
                answer, _ = await self.peer.within_limit(
                    lambda: self.peer.hedged(lambda: self._carrier.call(path, made, self._timeout_s))
                )
            except RoleCallError as error:
                self.peer.is_silent(self.peer.has_failed(error))
                raise
        self.peer.has_answered()
        return answer

    async def look(self) -> Any:
        """Returns the JSON that the server says of itself; None where it is there and says none. Raises when it is
        away, wants another token or takes no calls.
        """
        try:
            answer, _ = await self.peer.within_limit(lambda: self._carrier.call("", None, self._timeout_s))
        except (UnavailableError, DeadlineError, UnauthenticatedError, RateLimitedError) as error:
            self.peer.is_unknown(error)
            raise
        except RoleCallError:
            answer = None
        self.peer.is_known()
        return answer

    async def close(self) -> None:
        """Closes the connections."""
        await self._carrier.close()

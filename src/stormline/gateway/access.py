"""Who may do what by the business API: bearer keys, scopes, rates; and a note of everything in the audit."""

import hmac
import math
from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from stormline.core import limits_platform as limits
from stormline.core.clock import Clock
from stormline.core.errors import RequestRefused
from stormline.core.values import Secret
from stormline.gateway.apikeys import ApiKeys
from stormline.gateway.audit import Audit
from stormline.policy.ratelimit import RateLimiter

OPERATOR = "operator"
"""Who holds the platform's own business key: every app, every scope, no rate."""
KEYS = "keys"
"""The one scope that no key but the operator's has: making and revoking keys, reading the audit."""


class Caller:
    """Who asks, for the time of one request.

    Attributes:
        who: id of the key, or `operator`.
        target: what the request is about, for the audit; set by the endpoint.
    """

    def __init__(self, who: str, apps: tuple[str, ...]) -> None:
        self.who = who
        self._apps = apps
        self.app = ""
        self.target = ""

    def app_of(self, app: str | None) -> str:
        """Give the app that is meant.

        Raises:
            RequestRefused: `bad-request`: several may be meant; `not-found`: this one is not the caller's.
        """
        if app is None:
            if len(self._apps) != 1:
                raise RequestRefused("bad-request", "app: this node serves several, name one")
            app = self._apps[0]
        elif app not in self._apps:
            raise RequestRefused("not-found", f"app {app[:64]!r} is not served here")
        self.app = app
        return app


class Access:
    """Checks every request.

    Args:
        key: the platform's own business key.
        apps: the apps served here.
        keys: the businesses' keys.
        audit: takes the notes.
        clock: for the rates.
    """

    def __init__(self, key: Secret, apps: tuple[str, ...], keys: ApiKeys, audit: Audit, clock: Clock) -> None:
        self._key = key
        self._apps = apps
        self._keys = keys
        self._audit = audit
        self._clock = clock
        self._rates = RateLimiter(
            rate_per_s=limits.API_KEY_RATE_PER_S, burst=limits.API_KEY_BURST, keys_max=limits.API_KEYS_MAX
        )

    def allow(self, scope: str) -> Callable[..., AsyncIterator[Caller]]:
        """Give the dependency of an endpoint: it gives the `Caller`."""
        bearer = HTTPBearer(auto_error=False, description="the business key, or a key made by `stormline apikey`")

        async def check(
            given: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
        ) -> AsyncIterator[Caller]:
            caller = self._caller(given.credentials if given is not None else "", scope)
            result = "internal"
            try:
                yield caller
                result = "ok"
            except RequestRefused as error:
                result = error.code
                raise
            finally:
                self._audit.note(caller.who, caller.app, scope, caller.target, result)

        return check

    def _caller(self, text: str, scope: str) -> Caller:
        if hmac.compare_digest(text.encode("utf-8", "replace"), self._key.reveal().encode()):
            return Caller(OPERATOR, self._apps)
        key = self._keys.check(text)
        if key is None:
            raise RequestRefused("unauthorized", "expected Authorization: Bearer <business key>")
        wait_s = self._rates.take(key.id, self._clock.monotonic())
        if wait_s > 0:
            raise RequestRefused("too-many", "this key asks too often", retry_after_s=math.ceil(wait_s))
        if scope not in key.scopes:
            raise RequestRefused("forbidden", f"this key has no scope {scope!r}")
        return Caller(key.id, tuple(app for app in self._apps if app == key.app))

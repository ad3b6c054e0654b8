"""
Tokens by which the executor of one instance reports, for a while, and no other.

A token names its instance and its end, and is signed with the database's secret: every replica can
make and check them, and none is stored. It is no API key, and an API key is none.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from atoll.errors import Unauthenticated

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.clock import Clock

PREFIX = "atollinst"


class ExecutorTokens:
    def __init__(self, secret: str, clock: Clock, life: timedelta) -> None:
        self._secret = secret.encode()
        self._clock = clock
        self._life = life

    def make(self, instance_id: str) -> str:
        expiry = str(int((self._clock.now() + self._life).timestamp()))
        return f"{PREFIX}.{instance_id}.{expiry}.{self._signature(instance_id, expiry)}"

    def instance(self, token: str) -> str:
        """The instance that a token is of; `Unauthenticated` when it is of none, or no more."""
        kind, _, rest = token.partition(".")
        instance_id, _, rest = rest.partition(".")
        expiry, _, signature = rest.partition(".")
        if kind != PREFIX or not token.isascii():
            raise _unknown()
        if not hmac.compare_digest(self._signature(instance_id, expiry), signature):
            raise _unknown()
        # Nobody else signed it: it is a number.
        if self._clock.now() >= datetime.fromtimestamp(int(expiry), UTC):
            raise Unauthenticated("This instance's token has expired.", code="token_expired")
        return instance_id

    def _signature(self, instance_id: str, expiry: str) -> str:
        text = f"{instance_id}\n{expiry}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()


def _unknown() -> Unauthenticated:
    return Unauthenticated("This is no token of an instance.", code="token_unknown")

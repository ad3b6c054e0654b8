"""
Tokens with which the executor of one instance reports results to the control plane.

A token names its instance and its expiry. It is not an API key, and an API key is not accepted in
its place.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from atoll.errors import Unauthenticated
from atoll.service.auth.signing import Signer

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.clock import Clock

PREFIX = "atollinst"


class ExecutorTokens:
    def __init__(self, secret: str, clock: Clock, lifetime: timedelta) -> None:
        # Not a derived key: tokens of instances that are running were signed with the secret.
        self._signer = Signer(secret.encode(), hexadecimal=True)
        self._clock = clock
        self._lifetime = lifetime

    def make(self, instance_id: str) -> str:
        expiry = str(int((self._clock.now() + self._lifetime).timestamp()))
        signature = self._signer.sign(f"{instance_id}\n{expiry}".encode())
        return f"{PREFIX}.{instance_id}.{expiry}.{signature}"

    def verify(self, token: str) -> str:
        """The id of the token's instance; `Unauthenticated` if it is invalid or has expired."""
        prefix, _, rest = token.partition(".")
        instance_id, _, rest = rest.partition(".")
        expiry, _, signature = rest.partition(".")
        signed = f"{instance_id}\n{expiry}".encode("utf-8", "surrogatepass")
        if prefix != PREFIX or not self._signer.verifies(signature, signed):
            raise Unauthenticated("Invalid instance token.", code="token_unknown")
        if self._clock.now() >= datetime.fromtimestamp(int(expiry), UTC):
            raise Unauthenticated("This instance token has expired.", code="token_expired")
        return instance_id

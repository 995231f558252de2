"""The signed gateway header: a trusted proxy says which tenant a request belongs to.

Three headers: the tenant, a Unix timestamp in seconds (fractions allowed), and
`v1=<hex HMAC-SHA256(secret, frame(version, method, target, tenant, timestamp, SHA-256 of the body))>`, where
target is the raw path with its query string. A signature is accepted once, and only within the replay window.
The idea is that of AWS Signature Version 4 and Stripe's webhook signatures; the framing is ours.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from vllm_ext.tenancy.framing import frame

TENANT_HEADER = "x-vllm-ext-tenant"
TIMESTAMP_HEADER = "x-vllm-ext-timestamp"
SIGNATURE_HEADER = "x-vllm-ext-signature"

_VERSION = "vllm_ext/gateway/1"
_TENANT_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TIMESTAMP = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")
_SIGNATURE = re.compile(r"v1=([0-9a-f]{64})")
_MAX_REMEMBERED = 1_000_000


class GatewayError(ValueError):
    """A signed header that cannot be believed. `reason` is one of a few fixed words; the text says how to
    mend it.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def sign(secret: bytes, *, method: str, target: str, tenant: str, timestamp: str, body: bytes) -> str:
    """The value of the signature header: what a gateway written in Python calls, and what `verify` expects.

    Args:
        secret: the secret behind `tenancy.gateway.secret`.
        method: HTTP method in capitals. `WEBSOCKET` for a WebSocket handshake.
        target: the raw request target as the server sees it, e.g. `/v1/chat/completions` or `/v1/x?y=1`.
        timestamp: the exact text of the timestamp header.
        body: the exact bytes of the body.
    """
    message = frame(_VERSION, method, target, tenant, timestamp, hashlib.sha256(body).digest())
    return "v1=" + hmac.digest(secret, message, "sha256").hex()


class GatewayVerifier:
    """Verifies signed headers and remembers accepted signatures until they would be too old anyway.
    Thread-safe.

    The memory is per process: with several API server processes a replay inside the window can pass once in
    each.

    Args:
        secret: shared with the gateway.
        replay_window: how far, in seconds, a timestamp may lie from now, either way.
        clock: Unix time in seconds (a test moves it).
    """

    def __init__(self, secret: bytes, replay_window: float, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self.replay_window = replay_window
        self._clock = clock
        self._seen: OrderedDict[bytes, float] = OrderedDict()  # signature -> its timestamp
        self._not_before = -math.inf
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"GatewayVerifier(secret=***, replay_window={self.replay_window})"

    def set_window(self, replay_window: float) -> None:
        """Take over a reloaded policy's window.

        Used signatures stay used: a wider window reaches no further back than what is still remembered.
        """
        with self._lock:
            self._not_before = max(self._not_before, self._clock() - self.replay_window)
            self.replay_window = replay_window

    def check_form(self, *, tenant: str, timestamp: str, signature: str) -> bytes:
        """Whether the headers could be genuine, before a body is read for them. Returns the bare signature.

        Raises:
            GatewayError: malformed header, too old or too new.
        """
        match = _SIGNATURE.fullmatch(signature)
        if match is None or _TIMESTAMP.fullmatch(timestamp) is None:
            raise GatewayError(
                "malformed_header",
                f"{SIGNATURE_HEADER} is v1=<64 hex digits>, {TIMESTAMP_HEADER} Unix seconds",
            )
        if _TENANT_NAME.fullmatch(tenant) is None:
            raise GatewayError(
                "malformed_header", f"{TENANT_HEADER} is 1 to 128 of the characters A-Z a-z 0-9 . _ : -"
            )
        age = self._clock() - float(timestamp)
        if not math.isfinite(age) or abs(age) > self.replay_window or float(timestamp) < self._not_before:
            raise GatewayError(
                "outside_window",
                f"{TIMESTAMP_HEADER} is {abs(age):.0f} s {'old' if age > 0 else 'ahead'}; "
                f"{self.replay_window:g} s are allowed (check the clocks)",
            )
        return bytes.fromhex(match[1])

    def verify(
        self, *, method: str, target: str, tenant: str, timestamp: str, signature: str, body: bytes
    ) -> str:
        """Return the tenant's name.

        Raises:
            GatewayError: malformed header, false signature, too old or too new, or seen before.
        """
        used = self.check_form(tenant=tenant, timestamp=timestamp, signature=signature)
        expected = sign(
            self._secret, method=method, target=target, tenant=tenant, timestamp=timestamp, body=body
        )
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise GatewayError(
                "bad_signature",
                f"{SIGNATURE_HEADER} does not match method, path, tenant, timestamp and body",
            )
        self._remember(used, float(timestamp), self._clock())
        return tenant

    def _remember(self, signature: bytes, timestamp: float, now: float) -> None:
        with self._lock:
            # Order of arrival is nearly order of expiry: stop at the first that could still be replayed.
            while self._seen and next(iter(self._seen.values())) + self.replay_window < now:
                self._seen.popitem(last=False)
            if signature in self._seen:
                raise GatewayError("replayed", "this signature was used already: sign every request anew")
            if len(self._seen) >= _MAX_REMEMBERED:
                raise GatewayError(
                    "replay_memory_full", "too many signed requests within the replay window: shorten it"
                )
            self._seen[signature] = timestamp

"""
Blobs in a bucket of S3 or of a compatible server.

obstore gets the credentials through a callback, so that no object that may be printed contains
them. An error names its kind and the server's error code only: the rest of the answer, and
addresses, may contain secrets.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from atoll.blobs.base import check_expiry, check_key
from atoll.blobs.obstore_blobs import ObstoreBlobs

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Store

    from atoll.blobs.base import Method
    from atoll.settings import BlobSettings

CONCURRENCY = 32
"""Calls in progress at the same time; each has a connection."""
_RETRIES = 2
_BACKOFF = timedelta(seconds=0.1)
_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z-]*)*)")
_CODE = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_NOT_DELETED = re.compile(r"DeleteObjects request failed for .*\(code: ([A-Za-z]{1,64})\)$", re.M)
"""The server failed to delete one object of a batch."""
_TEMPORARY = frozenset(
    {"InternalError", "OperationAborted", "RequestTimeout", "ServiceUnavailable", "SlowDown"}
)
"""Codes of such answers that mean: retry later."""


class S3Blobs(ObstoreBlobs):
    """
    Bounded in time: a call fails at once if the server refuses connections, after
    `connect_timeout` if it does not accept them, and after `timeout` if it does not answer; with at
    most two retries.
    """

    def __init__(self, settings: BlobSettings) -> None:
        super().__init__(self._s3_store, concurrency=CONCURRENCY)
        self._settings = settings

    async def presign(self, method: Method, key: str, expires: timedelta) -> str | None:
        if not self._settings.direct_links:
            return await super().presign(method, key, expires)
        from obstore import sign_async

        check_key(key)
        check_expiry(expires)
        with self._translated(f"sign for {key}"):
            store: Any = await self._ready()
            address: str = await sign_async(store, method, key, expires)
            return address

    def _s3_store(self) -> ObjectStore:
        return connect(self._settings)

    def _reason(self, error: Exception) -> str:
        text = str(error)
        if "169.254.16" in text or "169.254.17" in text or "sts." in text:
            return (
                "no credentials were found. Set blob.access_key_id and blob.secret_access_key, "
                "or give this machine a role"
            )
        if refused := _NOT_DELETED.search(text):
            return refused[1]
        if status := _STATUS.search(text):
            code = _CODE.search(text)
            return status[1] + (f", {code[1]}" if code else "")
        if "kind: Timeout" in text:
            return "no answer in time"
        if "kind: Connect" in text:
            return "no connection"
        if isinstance(error, OSError) and error.errno is not None:
            return f"{error.filename}: {error.strerror}"
        if "HTTP error" in text or "error sending request" in text:
            return "no answer"
        return type(error).__name__

    def _is_refusal(self, error: Exception) -> bool:
        # 408 and 429 come from an overloaded server.
        text = str(error)
        if refused := _NOT_DELETED.search(text):
            return refused[1] not in _TEMPORARY
        status = _STATUS.search(text)
        return status is not None and status[1][0] == "4" and status[1][:3] not in ("408", "429")

    def _cause(self, error: Exception) -> Exception | None:
        return None

    def _check_absent(self, error: FileNotFoundError) -> None:
        if "<Code>NoSuchBucket</Code>" in str(error):
            raise error


def connect(settings: BlobSettings) -> S3Store:
    """The bucket and prefix that `url` names; nothing is sent yet."""
    from obstore.store import S3Store

    bucket, prefix = settings.bucket_and_prefix
    options: dict[str, Any] = {}
    if settings.region is not None:
        options["region"] = settings.region
    path_style = settings.path_style
    if path_style is None:
        path_style = settings.endpoint is not None
    options["virtual_hosted_style_request"] = not path_style
    if settings.endpoint is not None:
        scheme, host = settings.endpoint.rstrip("/").split("://")
        # obstore expects the host with the bucket's name already in it.
        address = f"{scheme}://{host if path_style else f'{bucket}.{host}'}"
        # Both options, lest an environment variable overrides ours.
        options |= {"endpoint": address, "aws_endpoint_url_s3": address}
    if settings.encryption is not None:
        options["server_side_encryption"] = settings.encryption
    if settings.kms_key_id is not None:
        options["sse_kms_key_id"] = settings.kms_key_id
    if settings.access_key_id is not None and settings.secret_access_key is not None:
        credential = {
            "access_key_id": settings.access_key_id.get_secret_value(),
            "secret_access_key": settings.secret_access_key.get_secret_value(),
            "token": None,
            "expires_at": None,
        }
        # As options they could be mixed with credentials of the environment.
        options["credential_provider"] = lambda: credential
    client: dict[str, Any] = {
        "allow_http": settings.endpoint is not None and settings.endpoint.startswith("http://"),
        "timeout": settings.timeout,
        "connect_timeout": settings.connect_timeout,
    }
    if settings.proxy_url is not None:
        client["proxy_url"] = settings.proxy_url.get_secret_value()
    if settings.ca_file is not None:
        client["root_certificate"] = settings.ca_file.read_bytes()
    return S3Store(
        bucket,
        prefix=prefix or None,
        client_options=client,  # type: ignore[arg-type]
        retry_config={
            "max_retries": _RETRIES,
            "retry_timeout": settings.timeout,
            "backoff": {
                "init_backoff": _BACKOFF,
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
        },
        **options,
    )

"""Opens the driver that the settings name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.local.driver import LocalDriver
from atoll.drivers.shared.volumes.bucket_mounts import Bucket

if TYPE_CHECKING:
    from atoll.drivers.base import Driver
    from atoll.settings import BlobSettings, Settings


log = structlog.get_logger(__name__)


def _bucket(settings: BlobSettings) -> Bucket | None:
    """The bucket as the node mounts it; none when blobs are on its disk."""
    if settings.url is None:
        return None
    name, prefix = settings.bucket_and_prefix
    region = settings.region or os.environ.get("AWS_REGION") or "us-east-1"
    path_style = settings.path_style
    given = {
        field: None if secret is None else secret.get_secret_value()
        for field, secret in (
            ("access_key_id", settings.access_key_id),
            ("secret_access_key", settings.secret_access_key),
            ("proxy_url", settings.proxy_url),
        )
    }
    return Bucket(
        name=name,
        prefix=prefix,
        endpoint=settings.endpoint or f"https://s3.{region}.amazonaws.com",
        path_style=settings.endpoint is not None if path_style is None else path_style,
        connect_timeout=settings.connect_timeout,
        timeout=settings.timeout,
        region=region,
        encryption=settings.encryption,
        kms_key_id=settings.kms_key_id,
        ca_file=settings.ca_file,
        **given,
    )


def open_driver(settings: Settings) -> Driver:
    """The driver that the settings name, which is still to be opened."""
    bucket = _bucket(settings.blob)
    if settings.driver == "docker":
        # Imported here, because the Docker client takes time to import.
        from atoll.drivers.docker.driver import DockerDriver

        return DockerDriver(
            settings.data_dir, settings.docker, settings.link, settings.local, bucket
        )
    return LocalDriver(
        settings.data_dir, settings.local, settings.link, bucket, packages=settings.packages
    )

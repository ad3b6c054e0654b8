"""Invalidates cached templates that another replica changed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.errors import TemporaryError
from atoll.service.templates.service import CHANGED

if TYPE_CHECKING:
    from atoll.coordination.base import Coordination
    from atoll.service.templates.service import Templates

log = structlog.get_logger(__name__)

RETRY_DELAY = 1.0
LISTEN_TIMEOUT = 60.0


class TemplateNotifications:
    def __init__(self, coordination: Coordination, templates: Templates) -> None:
        self._coordination = coordination
        self._templates = templates

    async def run(self) -> None:
        while True:
            try:
                async with self._coordination.listen(CHANGED) as subscription:
                    # Changes before this subscription were missed.
                    self._templates.invalidate()
                    while True:
                        if await subscription.wait(LISTEN_TIMEOUT):
                            self._templates.invalidate()
            except Exception as error:
                known = isinstance(error, TemporaryError)
                log.warning("templates.outage", error=str(error), exc_info=None if known else error)
                self._templates.invalidate()
                await asyncio.sleep(RETRY_DELAY)

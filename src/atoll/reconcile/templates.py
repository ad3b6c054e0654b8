"""Templates that another replica changed are read anew."""

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

AGAIN_SECONDS = 1.0
LOOK_SECONDS = 60.0


class TemplateNotifications:
    def __init__(self, coordination: Coordination, templates: Templates) -> None:
        self._coordination = coordination
        self._templates = templates

    async def run(self) -> None:
        while True:
            try:
                async with self._coordination.listen(CHANGED) as heard:
                    # What was told before anybody listened here.
                    self._templates.invalidate()
                    while True:
                        if await heard.wait(LOOK_SECONDS):
                            self._templates.invalidate()
            except Exception as error:
                known = isinstance(error, TemporaryError)
                log.warning(
                    "templates.not_heard", error=str(error), exc_info=None if known else error
                )
                self._templates.invalidate()
                await asyncio.sleep(AGAIN_SECONDS)

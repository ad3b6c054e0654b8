"""What sessions and contexts share: a `with` block deletes them at its end."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from atoll.errors import NotFound
from atoll.sdk.retry import best_effort

if TYPE_CHECKING:
    from types import TracebackType


class AsyncDeletable:
    _deleted = False
    _warns_if_unclosed = False
    """True for objects that were created for a `with` block."""

    async def delete(self) -> object:
        raise NotImplementedError

    @property
    def _is_open(self) -> bool:
        """Whether it still exists on the server, as far as this object knows."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # A failure to delete must not hide the error of the block.
            await best_effort(self.delete())
            return
        with suppress(NotFound):
            await self.delete()

    def __del__(self) -> None:
        if self._warns_if_unclosed and self._is_open:
            message = f"{self!r} was not closed: use `with`, or call delete()."
            warnings.warn(message, ResourceWarning, stacklevel=1, source=self)

"""Query parameters that several routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

Cursor = Annotated[str | None, Query(description="`next_cursor` of the previous page.")]

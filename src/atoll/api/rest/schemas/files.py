"""Files of a session's workspace."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from atoll.api.rest import conditional_requests, path_encoding
from atoll.api.rest.schemas.base import From, Page, RequestBody, ResponseBody, encoder_of
from atoll.api.rest.schemas.types import PathIn


class Mkdir(RequestBody):
    path: PathIn
    parents: bool = True


class Move(RequestBody):
    source: PathIn
    target: PathIn
    overwrite: bool = False


class Copy(Move):
    pass


class Chmod(RequestBody):
    path: PathIn
    mode: Annotated[str, StringConstraints(pattern=r"^0?[0-7]{3}$")] = Field(
        description="Octal.", examples=["0755"]
    )


class Presign(RequestBody):
    path: PathIn
    method: Literal["GET", "PUT"] = "GET"
    expires_in: int = Field(3600, ge=1, le=7 * 24 * 3600, description="Seconds.")
    filename: Annotated[str, StringConstraints(min_length=1, max_length=255)] | None = Field(
        None, description="File name of a download; the file's own name if omitted."
    )
    direct: bool = Field(
        False,
        description="Let the client PUT straight to the blob store if that is possible. It must "
        "POST to `complete_url` afterwards.",
    )


class PathFields(ResponseBody):
    path: Annotated[str, From(lambda item: path_encoding.readable(item.path))] = Field(
        description="Bytes that are not UTF-8 are shown as U+FFFD."
    )
    encoded_path: Annotated[str, From(lambda item: path_encoding.percent_encoded(item.path))] = (
        Field(description="The exact path, percent-encoded for a URL.")
    )


class EntryOut(PathFields):
    """A file or directory of a workspace; `path` is relative to /workspace."""

    name: Annotated[str, From(lambda entry: path_encoding.readable(entry.path).rpartition("/")[2])]
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: Annotated[str, From(lambda entry: f"{entry.mode:04o}")] = Field(examples=["0644"])
    modified_at: datetime
    etag: Annotated[str | None, From(conditional_requests.etag)] = Field(
        description="Of a file, as in its `ETag` header."
    )


class EntryPage(Page[EntryOut]):
    pass


entry_out = encoder_of(EntryOut)


class MatchOut(PathFields):
    line: int = Field(description="Counted from 1.")
    column: int = Field(description="In characters, counted from 1.")
    text: str = Field(description="The line, or 400 characters of it around the match.")


match_out = encoder_of(MatchOut)


class MatchPage(Page[MatchOut]):
    next_cursor: str | None = Field(
        description="There may be more matches even if this page is not full: a page takes limited "
        "time."
    )


class Unpacked(ResponseBody):
    path: str
    entries: int


class LinkOut(ResponseBody):
    url: str
    method: Literal["GET", "PUT"]
    expires_at: datetime
    native: bool = Field(description="Whether it leads straight to the blob store.")
    complete_url: str | None = Field(description="POST to it after a native PUT.")


class Uploaded(ResponseBody):
    items: list[EntryOut]

"""
Displayed results of a context, each in one or more MIME types.

They come from code in a sandbox, so a notebook must not execute anything in them: text is escaped,
images including SVG become image elements, and HTML is shown in a frame without scripts or network.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    import os

PNG, JPEG, SVG = "image/png", "image/jpeg", "image/svg+xml"
HTML, JSON, TEXT = "text/html", "application/json", "text/plain"
MARKDOWN, LATEX = "text/markdown", "text/latex"

_HARMLESS = (TEXT, PNG, JPEG, JSON)
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_FRAME = '<iframe sandbox="" srcdoc="{}" style="width:100%;height:20em;resize:vertical;border:0">'
_SUFFIXES = {
    ".png": PNG,
    ".jpg": JPEG,
    ".jpeg": JPEG,
    ".svg": SVG,
    ".html": HTML,
    ".json": JSON,
    ".md": MARKDOWN,
    ".tex": LATEX,
    ".txt": TEXT,
}
"""MIME types by file suffix, in the order of preference for names without a suffix."""


@dataclass(frozen=True, slots=True, repr=False)
class Display:
    """Output of `display()`, or the value of the last expression (`type` "result")."""

    type: str
    data: dict[str, Any] = field(default_factory=dict)
    """Content by MIME type. Images are base64."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str | None:
        return self._str(TEXT)

    @property
    def html(self) -> str | None:
        return self._str(HTML)

    @property
    def markdown(self) -> str | None:
        return self._str(MARKDOWN)

    @property
    def latex(self) -> str | None:
        return self._str(LATEX)

    @property
    def svg(self) -> str | None:
        return self._str(SVG)

    @property
    def png(self) -> bytes | None:
        return self._bytes(PNG)

    @property
    def jpeg(self) -> bytes | None:
        return self._bytes(JPEG)

    @property
    def json(self) -> Any:
        return self.data.get(JSON)

    def __repr__(self) -> str:
        # Untrusted content must not reach a terminal unescaped.
        forms = [f"{mime!r} ({len(str(value)):,})" for mime, value in self.data.items()]
        return f"<Display {self.type!r}: {', '.join(forms) or 'nothing'}>"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """
        Write the display to a file and return its path. The suffix chooses the MIME type (`.png`,
        `.svg`, `.html`, …). A name without a suffix gets that of the best available type.
        """
        target = Path(path)
        mime = _SUFFIXES.get(target.suffix.lower())
        if not target.suffix:
            found = [suffix for suffix, kind in _SUFFIXES.items() if kind in self.data]
            if found:
                mime, target = _SUFFIXES[found[0]], target.with_name(target.name + found[0])
        content = None if mime is None else self._content(mime)
        if content is None:
            raise InvalidRequest(
                f"Cannot save this display as {target.name}. "
                f"Available: {', '.join(self.data) or 'nothing'}.",
                code="no_such_form",
            )
        target.write_bytes(content)
        return target

    def _content(self, mime: str) -> bytes | None:
        if mime in (PNG, JPEG):
            return self._bytes(mime)
        if mime == JSON:
            return json.dumps(self.json, indent=2).encode() if JSON in self.data else None
        text = self._str(mime)
        return None if text is None else text.encode("utf-8", "replace")

    def _str(self, mime: str) -> str | None:
        value = self.data.get(mime)
        return value if isinstance(value, str) else None

    def _bytes(self, mime: str) -> bytes | None:
        try:
            return base64.b64decode(self._str(mime) or "") or None
        except (binascii.Error, ValueError):
            return None

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        forms: dict[str, Any] = {TEXT: self.text, JSON: self.json}
        for mime in (PNG, JPEG):
            # Encoded again, because invalid base64 could inject markup into the page.
            image = self._bytes(mime)
            forms[mime] = None if image is None else base64.b64encode(image).decode()
        return {mime: forms[mime] for mime in _HARMLESS if forms[mime] is not None}

    def _repr_html_(self) -> str:
        """The best available type as HTML that is safe to embed."""
        for mime in (PNG, JPEG):
            if (image := self._bytes(mime)) is not None:
                return _image(mime, image)
        if self.html is not None:
            policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            return _FRAME.format(html.escape(policy + self.html)) + "</iframe>"
        if self.svg is not None:
            return _image(SVG, self.svg.encode("utf-8", "replace"))
        for text in (self.text, self.markdown, self.latex):
            if text is not None:
                return preformatted(text)
        return preformatted(json.dumps(self.json, indent=2))


def preformatted(text: str, style: str = "") -> str:
    return f'<pre style="{style}">{html.escape(text)}</pre>' if text else ""


def _image(mime: str, content: bytes) -> str:
    return f'<img src="data:{mime};base64,{base64.b64encode(content).decode()}">'

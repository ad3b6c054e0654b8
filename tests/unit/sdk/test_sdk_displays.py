"""Displayed results: their types, files and representation in notebooks."""

from __future__ import annotations

import base64
import json
import string
from pathlib import Path

import pytest

from atoll import Display, InvalidRequest, Result
from atoll.sdk.values import ErrorInfo

PIXEL = b"\x89PNG pixel"
RICH = Display(
    "result",
    {
        "text/plain": "plain",
        "text/html": "<script>",
        "image/svg+xml": "<svg/>",
        "image/png": base64.b64encode(PIXEL).decode(),
        "application/json": {"a": 1},
        "text/latex": "$x$",
        "text/markdown": "*x*",
    },
)


def test_every_mime_type_has_an_attribute() -> None:
    assert (RICH.text, RICH.html, RICH.svg) == ("plain", "<script>", "<svg/>")
    assert (RICH.png, RICH.jpeg, RICH.json) == (PIXEL, None, {"a": 1})
    assert (RICH.latex, RICH.markdown) == ("$x$", "*x*")
    empty = Display("display")
    assert (empty.text, empty.html, empty.png, empty.json) == (None, None, None, None)


def test_invalid_content_is_none() -> None:
    odd = Display("display", {"text/plain": 5, "image/png": "=", "image/jpeg": {"a": 1}})
    assert (odd.text, odd.png, odd.jpeg) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.png", PIXEL),
        ("a.svg", b"<svg/>"),
        ("a.html", b"<script>"),
        ("a.txt", b"plain"),
        ("a.tex", b"$x$"),
        ("a.md", b"*x*"),
    ],
)
def test_the_suffix_chooses_the_saved_type(tmp_path: Path, name: str, content: bytes) -> None:
    assert RICH.save(tmp_path / name) == tmp_path / name
    assert (tmp_path / name).read_bytes() == content


def test_a_name_without_a_suffix_gets_that_of_the_best_type(tmp_path: Path) -> None:
    assert RICH.save(str(tmp_path / "a")).name == "a.png"
    assert Display("result", {"text/plain": "x"}).save(tmp_path / "b").name == "b.txt"
    saved = Display("result", {"application/json": [1]}).save(tmp_path / "c")
    assert json.loads(saved.read_text()) == [1]


@pytest.mark.parametrize("name", ["a.jpg", "a.pdf"])
def test_a_missing_type_cannot_be_saved(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="image/png") as caught:
        RICH.save(tmp_path / name)
    assert caught.value.code == "no_such_form"
    assert list(tmp_path.iterdir()) == []


def test_a_notebook_receives_only_harmless_types() -> None:
    assert set(RICH._repr_mimebundle_()) == {"text/plain", "image/png", "application/json"}


def test_a_notebook_receives_no_invalid_image() -> None:
    made_up = {"image/png": 'iVBORw=="><script>', "image/jpeg": {"a": 1}, "text/plain": ["x"]}
    shown = Display("display", made_up)._repr_mimebundle_()
    assert set(shown) == {"image/png"}
    assert set(shown["image/png"]) <= set(string.ascii_letters + string.digits + "+/=")


def test_a_result_is_shown_like_the_output_of_a_cell() -> None:
    table = Display("display", {"text/html": "<table></table><script>x</script>"})
    result = Result(
        "exec_1", "success", stdout="a <b>\n", stderr="warning\n", results=(RICH, table)
    )
    page = result._repr_html_()
    places = [page.index(text) for text in ("a &lt;b&gt;", "warning", "<img src", "<iframe")]
    assert places == sorted(places)


def test_html_is_shown_in_a_frame_without_scripts_or_network() -> None:
    page = Display("display", {"text/html": '"><script>alert(1)</script>'})._repr_html_()
    assert page.startswith('<iframe sandbox="" srcdoc="')
    assert "<script>" not in page
    assert "default-src &#x27;none&#x27;" in page


def test_an_svg_is_shown_as_an_image() -> None:
    page = Display("display", {"image/svg+xml": "<svg onload='alert(1)'/>"})._repr_html_()
    assert page.startswith('<img src="data:image/svg+xml;base64,')
    assert "alert" not in page


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (Result("e", "success", stdout="1\n"), r"<Result success in 0 s, stdout='1\n'>"),
        (
            Result("e", "failed", exit_code=1, error=ErrorInfo("exception", "no", "ValueError")),
            "<Result failed in 0 s, exit code 1, error='ValueError: no'>",
        ),
        (
            Result("e", "success", return_value={"a": 1}),
            "<Result success in 0 s, return_value={'a': 1}>",
        ),
    ],
)
def test_a_result_is_described_in_a_line(result: Result, line: str) -> None:
    assert repr(result) == line


def test_a_large_figure_is_not_in_the_description() -> None:
    figure = Display("display", {"image/png": "A" * 24_000, "text/plain": "<Figure>"})
    assert repr(figure) == "<Display 'display': 'image/png' (24,000), 'text/plain' (8)>"
    assert len(repr(Result("e", "success", stdout="x" * 5000, results=(figure,) * 50))) < 500


def test_text_from_the_sandbox_is_escaped_in_a_description() -> None:
    error = ErrorInfo("exception", "\x1b]0;title\x07", "Name\nlog line")
    for thing in (Display("\x1b[2J", {"\x1b[2J": "x"}), Result("e", "failed", error=error)):
        assert repr(thing).isprintable()

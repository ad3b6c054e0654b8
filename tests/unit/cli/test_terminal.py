"""Keys on their way to a program, and what is seen of the screen on the way back."""

from __future__ import annotations

import pytest

from atoll.cli.terminal import Detached, DetachKeys, Screen


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        ([b"ls\r"], [b"ls\r"]),
        ([b"\x03"], [b"\x03"]),
        ([b"\x10"], [b""]),
        ([b"\x10", b"x"], [b"", b"\x10x"]),
        ([b"\x10\x10", b"x"], [b"\x10", b"\x10x"]),
        ([b"\x11"], [b"\x11"]),
        ([b"a\x10b\x11c"], [b"a\x10b\x11c"]),
        ([b"\x1b[A\x00\xff"], [b"\x1b[A\x00\xff"]),
    ],
    ids=["text", "interrupt", "held", "released", "twice", "alone", "between", "any byte"],
)
def test_keys_pass_as_they_are(typed: list[bytes], passed: list[bytes]) -> None:
    keys = DetachKeys()
    assert [keys.pass_on(data) for data in typed] == passed


@pytest.mark.parametrize(
    "typed",
    [[b"\x10\x11"], [b"\x10", b"\x11"], [b"ls\x10\x11"], [b"\x10\x10\x11"], [b"\x10", b"\x11ls"]],
)
def test_the_keys_to_leave_are_heard_however_they_come(typed: list[bytes]) -> None:
    keys = DetachKeys()

    def pass_all() -> None:
        for data in typed:
            keys.pass_on(data)

    with pytest.raises(Detached):
        pass_all()


@pytest.mark.parametrize(
    ("seen", "alternate"),
    [
        ([b"plain"], False),
        ([b"\x1b[?1049h vi"], True),
        ([b"\x1b[?10", b"49h", b" vi"], True),
        ([b"\x1b[?1049h", b"vi", b"\x1b[?1049l"], False),
        ([b"\x1b[?1049l\x1b[?1049h"], True),
        ([b"\x1b[?1049", b"h", b"x" * 100, b"\x1b[?104", b"9l"], False),
    ],
)
def test_a_screen_that_was_left_behind_is_known(seen: list[bytes], alternate: bool) -> None:
    screen = Screen()
    for data in seen:
        screen.see(data)
    assert screen.alternate is alternate
    assert (b"\x1b[?1049l" in screen.restoration()) is alternate

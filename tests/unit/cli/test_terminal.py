"""Detach keys, the alternate screen, and the filter for terminal replies."""

from __future__ import annotations

import pytest

from atoll.cli.terminal import Detached, DetachKeys, ReplyFilter, Screen


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
def test_keys_pass_unchanged(typed: list[bytes], passed: list[bytes]) -> None:
    keys = DetachKeys()
    assert [keys.filter(data) for data in typed] == passed


@pytest.mark.parametrize(
    "typed",
    [[b"\x10\x11"], [b"\x10", b"\x11"], [b"ls\x10\x11"], [b"\x10\x10\x11"], [b"\x10", b"\x11ls"]],
)
def test_detach_keys_are_recognized_in_any_chunks(typed: list[bytes]) -> None:
    keys = DetachKeys()

    def pass_all() -> None:
        for data in typed:
            keys.filter(data)

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
def test_the_alternate_screen_is_tracked(seen: list[bytes], alternate: bool) -> None:
    screen = Screen()
    for data in seen:
        screen.feed(data)
    assert screen.alternate is alternate
    assert (b"\x1b[?1049l" in screen.restoration()) is alternate


@pytest.mark.parametrize(
    "reply",
    [
        b"\x1b[24;80R",
        b"\x1b[?24;80R",
        b"\x1b[?1;2c",
        b"\x1b[?64;1;2;6;22c",
        b"\x1b[>0;276;0c",
        b"\x1b]10;rgb:ffff/ffff/ffff\x1b\\",
        b"\x1b]11;rgb:0000/0000/0000\x07",
        b"\x1b]4;1;rgb:cdcd/0000/0000\x07",
        b"\x1b[?2026;2$y",
        b"\x1b[4;2$y",
        b"\x1b[0n",
        b"\x1b[8;24;80t",
        b"\x1b[?0u",
        b"\x1bP>|XTerm(370)\x1b\\",
        b"\x1bP1$r0m\x1b\\",
    ],
)
def test_a_terminal_reply_is_filtered(reply: bytes) -> None:
    assert ReplyFilter().filter(b"l" + reply + reply + b"s\r") == b"ls\r"
    for cut in range(3, len(reply)):
        replies = ReplyFilter()
        assert replies.filter(b"l" + reply[:cut]) + replies.filter(reply[cut:] + b"s") == b"ls"
    assert ReplyFilter().filter(reply, active=False) == reply


@pytest.mark.parametrize(
    "key",
    [
        b"\x1b", b"\x1b[A", b"\x1bOA", b"\x1bOP", b"\x1b[15~", b"\x1b[3~", b"\x1b[1;5C",
        b"\x1b[Z", b"\x1bx", b"\x1b[", b"\x1b]", b"\x1bP", b"\x1b\x1b[A", b"\x1b[<0;10;20M",
        b"\x1b[<0;10;20m", b"\x1b[I", b"\x1b[97;5u", b"\x1b[200~ls; echo 1;2R\r\x1b[201~",
        b"plain 1;2R\r", b"\x03", b"\xc3\xa9",
    ],
)  # fmt: skip
def test_a_key_is_never_held_back(key: bytes) -> None:
    assert ReplyFilter().filter(key) == key


def test_held_back_input_is_released_when_the_filter_ends() -> None:
    replies = ReplyFilter()
    assert replies.filter(b"\x1b[1;5") == b""
    assert replies.filter(b"C", active=False) == b"\x1b[1;5C"

"""The event loop survives exceptions of its callbacks."""

from __future__ import annotations

import os

import pytest

from atoll.executor.event_loop import MAX_TRACEBACKS, READ, Loop


def fail(*arguments: int) -> None:
    raise PermissionError("of a callback")


def test_an_exception_in_a_callback_ends_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    read, write = os.pipe()
    seen: list[str] = []

    def ready(mask: int) -> None:
        os.read(read, 1)
        seen.append("descriptor")
        loop.at_end_of_turn(fail)
        loop.at_end_of_turn(end_of_turn)
        fail()

    def end_of_turn() -> None:
        seen.append("end of turn")
        loop.after(0, fail)
        loop.after(0, lambda: seen.append("timer"))
        loop.after(0, stop)

    def stop() -> None:
        loop.running = False

    loop.add(read, READ, ready)
    os.write(write, b"x")
    loop.run()
    loop.close()
    os.close(read)
    os.close(write)
    assert seen == ["descriptor", "end of turn", "timer"]
    assert capsys.readouterr().err.count("PermissionError: of a callback") == 3


def test_repeated_exceptions_do_not_fill_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop = Loop()
    turns = 0

    def ready(mask: int) -> None:
        nonlocal turns
        turns += 1
        loop.running = turns < 3 * MAX_TRACEBACKS
        fail()

    read, write = os.pipe()
    os.write(write, b"x")
    loop.add(read, READ, ready)
    loop.run()
    loop.close()
    os.close(read)
    os.close(write)
    assert capsys.readouterr().err.count("PermissionError:") == MAX_TRACEBACKS


def test_a_system_exit_ends_the_loop() -> None:
    loop = Loop()

    def leave() -> None:
        raise SystemExit(3)

    loop.after(0, leave)
    with pytest.raises(SystemExit):
        loop.run()
    loop.close()

"""Arguments of a wrong type are refused with their name, before anything is sent."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll import AsyncAtoll, Atoll, InvalidRequest
from atoll.sdk.options import CreateOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.component.sdk.fake_server import FakeServer

WRONG: list[tuple[str, Callable[[Any, Any], object]]] = [
    ("code", lambda a, s: s.run(5)),
    ("code", lambda a, s: s.run(b"print(1)")),
    ("code", lambda a, s: s.run(print)),
    ("code", lambda a, s: list(s.stream(5))),
    ("code", lambda a, s: s.submit(5)),
    ("code", lambda a, s: s.invoke("f", code=5)),
    ("function", lambda a, s: s.invoke(len)),
    ("metadata", lambda a, s: s.invoke("f", metadata=["a"])),
    ("language", lambda a, s: s.run("x", language=3)),
    ("command", lambda a, s: s.run(command="ls")),
    ("command", lambda a, s: s.run(command=b"ls")),
    ("command", lambda a, s: s.interactive("ls")),
    ("command[1]", lambda a, s: s.run(command=["ls", 5])),
    ("args", lambda a, s: s.run("x", args="-v")),
    ("timeout", lambda a, s: s.run("x", timeout="5")),
    ("timeout", lambda a, s: s.invoke("f", timeout="5")),
    ("timeout", lambda a, s: s.run("x", timeout=timedelta(seconds=5))),
    ("wait", lambda a, s: s.run("x", wait="5")),
    ("stdin", lambda a, s: s.run("x", stdin=b"y")),
    ("env.A", lambda a, s: s.run("x", env={"A": 1})),
    ("env", lambda a, s: s.run("x", env={1: "A"})),
    ("env", lambda a, s: s.run("x", env="A=1")),
    ("on_stdout", lambda a, s: s.run("x", on_stdout="print")),
    ("cwd", lambda a, s: s.context(cwd=5)),
    ("dependencies", lambda a, s: s.install(5)),
    ("dependencies[0]", lambda a, s: s.install([5])),
    ("timeout", lambda a, s: s.install("requests", timeout="5")),
    ("timeout", lambda a, s: s.extend("5")),
    ("labels.a", lambda a, s: s.update(labels={"a": 1})),
    ("cpu", lambda a, s: s.update(cpu=[1])),
    ("wait", lambda a, s: s.execution("exec_1").wait("5")),
    ("message", lambda a, s: s.execution("exec_1").send(5)),
    ("data", lambda a, s: s.execution("exec_1").write(5)),
    ("data", lambda a, s: s.files.write("a", 5)),
    ("path", lambda a, s: s.files.write(5, "a")),
    ("path", lambda a, s: s.files.read(None)),
    ("mode", lambda a, s: s.files.chmod("a", "755")),
    ("source", lambda a, s: s.files.upload(5, "a")),
    ("value", lambda a, s: s.secrets.set("A", 1)),
    ("timeout", lambda a, s: a.sessions.create(timeout="5")),
    ("template", lambda a, s: a.sessions.create(template=5)),
    ("memory", lambda a, s: a.session(memory=[1])),
    ("secrets.A", lambda a, s: a.sessions.create(secrets={"A": 1})),
    ("volumes[0]", lambda a, s: a.sessions.create(volumes=["data"])),
    ("dependencies[0]", lambda a, s: a.sessions.create(dependencies=[5])),
    ("id", lambda a, s: a.sessions.get(5)),
    ("python_packages", lambda a, s: a.templates.create("t", python_packages="numpy")),
    ("pool_size", lambda a, s: a.templates.create("t", pool_size="2")),
    ("timeout", lambda a, s: Atoll(a.url, timeout="5")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(
    ("field", "call"), WRONG, ids=[f"{number}-{field}" for number, (field, _) in enumerate(WRONG)]
)
def test_a_wrong_type_is_refused_with_its_name(
    atoll: Atoll, fake_server: FakeServer, field: str, call: Callable[[Any, Any], object]
) -> None:
    with atoll.session() as session:
        sent = len(fake_server.requests)
        with pytest.raises(InvalidRequest, match="must be") as raised:
            call(atoll, session)
        assert raised.value.details == {"field": field}
        assert raised.value.message.startswith(field)
        assert len(fake_server.requests) == sent


@pytest.mark.parametrize(
    "given",
    [
        "git+https://example.org/a/b.git",
        "https://example.org/a-1.0-py3-none-any.whl",
        "a @ https://example.org/a.zip",
        "./package",
        "/opt/package",
        "a-1.0-py3-none-any.whl",
        "-r requirements.txt",
    ],
)
def test_a_dependency_that_is_not_a_package_name_is_refused(atoll: Atoll, given: str) -> None:
    with pytest.raises(InvalidRequest, match="come from the server's index") as raised:
        atoll.sessions.create(dependencies=["numpy", given])
    assert raised.value.details == {"field": "dependencies[1]"}
    assert given not in raised.value.message


def test_one_dependency_may_be_a_string(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session(dependencies="numpy>=2"):
        assert fake_server.bodies[0]["dependencies"] == [{"name": "numpy", "version": ">=2"}]


@pytest.mark.parametrize(
    "call",
    [
        lambda a, s: a.session(memori="1Gi"),
        lambda a, s: a.sessions.create(memori="1Gi"),
        lambda a, s: s.update(memori="1Gi"),
        lambda a, s: s.run("x", memori="1Gi"),
        lambda a, s: s.invoke("f", memori="1Gi"),
        lambda a, s: a.templates.create("t", memori="1Gi"),
    ],
    ids=["session", "create", "update", "run", "invoke", "template"],
)
def test_an_unknown_option_is_refused_with_its_name(
    atoll: Atoll, fake_server: FakeServer, call: Callable[[Any, Any], object]
) -> None:
    with atoll.session() as session:
        sent = len(fake_server.requests)
        with pytest.raises(TypeError, match="unexpected keyword argument 'memori'"):
            call(atoll, session)
        assert len(fake_server.requests) == sent


def test_help_and_notebooks_show_every_option() -> None:
    for kind in (Atoll, AsyncAtoll):
        shown = inspect.signature(kind.session).parameters
        assert str(shown["memory"]) == "memory: 'str | int | None' = None"
        assert set(CreateOptions.__annotations__) < set(shown)

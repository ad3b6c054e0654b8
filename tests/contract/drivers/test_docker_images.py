"""Images of a real engine and a real registry."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import tarfile
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from atoll.drivers.base import BuildFiles, ImageInputs, RegistryAuth
from atoll.drivers.docker.engine import Engine
from atoll.drivers.docker.image_build import ImageBuild
from atoll.drivers.docker.images import DockerImages
from atoll.errors import AtollError, InvalidRequest, PermanentError, TemporaryError
from atoll.model.template import Build, Layer
from atoll.settings import DockerSettings
from tests.contract.stores.store_entities import make_template
from tests.servers.images import PYTHON, SHELL
from tests.servers.registry import PASSWORD, USER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from atoll.drivers.docker.engine_images import EngineImages
    from atoll.drivers.docker.image_pull import ImagePuller
    from atoll.model.template import Template
    from tests.servers.docker import Dockerd
    from tests.servers.registry import Registry

pytestmark = pytest.mark.anyio
LONG = timedelta(seconds=120)
NODE = "n0de"
SIZE = 3_000_000


class Environment(NamedTuple):
    templates: DockerImages
    output: list[bytes]

    @property
    def images(self) -> EngineImages:
        return self.templates.images

    @property
    def puller(self) -> ImagePuller:
        return self.templates.puller

    @property
    def text(self) -> str:
        return b"".join(self.output).decode()


@pytest.fixture
async def environment(dockerd: Dockerd, tmp_path: Path) -> AsyncIterator[Environment]:
    settings = DockerSettings(url=dockerd.url, image=PYTHON, build_args={"WORD": "something"})
    engine = Engine(settings)
    await engine.open()
    templates = DockerImages(engine, settings, NODE, tmp_path)
    yield Environment(templates, [])
    for name in await templates.images.own_names():
        await templates.images.remove(name)
    await engine.close()


@pytest.fixture
def tiny(dockerd: Dockerd, tmp_path: Path) -> str:
    """The name of an image with a layer that no other image has."""
    archive, name = tmp_path / "tiny.tar", f"tiny:{os.urandom(4).hex()}"
    archive.write_bytes(tar_of({"data": os.urandom(SIZE), "bin/tool": b"#!"}))
    dockerd.import_image(archive, name, 'ENTRYPOINT ["/bin/tool"]', 'CMD ["--help"]')
    return name


@pytest.fixture
def pulled(dockerd: Dockerd, registry: Registry, tiny: str) -> str:
    """The name of an image that only the registry has."""
    reference = registry.put(dockerd, tiny, "team/tiny:1")
    dockerd.ask("DELETE", f"/images/{tiny}")
    return reference


def tar_of(files: dict[str, bytes], *links: tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
        for link in links:
            tar.addfile(link)
    return made.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def head(kind: bytes, size: int) -> bytes:
    """Header of an extension that precedes an entry."""
    info = tarfile.TarInfo("h")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def context_of(data: bytes) -> BuildFiles:
    async def pieces() -> AsyncIterator[bytes]:
        yield data

    async def opened() -> AsyncIterator[bytes]:
        return pieces()

    return BuildFiles(hashlib.sha256(data).hexdigest(), opened)


def right(registry: Registry, password: str = PASSWORD) -> RegistryAuth:
    return RegistryAuth(registry.server, USER, password)


def images_of(dockerd: Dockerd) -> list[str]:
    found = dockerd.ask("GET", "/images/json").json()
    return sorted(tag for image in found for tag in image["RepoTags"] or ())


@contextlib.contextmanager
def refused(kind: type[AtollError], code: str) -> Any:
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.code == code


# Existing images


async def test_the_configuration_of_an_image_is_read(environment: Environment, tiny: str) -> None:
    found = await environment.images.find(tiny)

    assert found is not None
    assert found.id.startswith("sha256:")
    assert (found.entrypoint, found.cmd) == (("/bin/tool",), ("--help",))
    assert found.size >= SIZE
    assert await environment.images.find("nobody/nothing:1") is None


async def test_the_interpreter_is_found_without_running_the_image(
    environment: Environment, dockerd: Dockerd
) -> None:
    python, shell = await environment.images.find(PYTHON), await environment.images.find(SHELL)
    assert python is not None
    assert shell is not None

    assert (await environment.templates.pythons.find(python) or "").rpartition("/")[2] in (
        "python3",
        "python",
    )
    assert await environment.templates.pythons.find(python, "/no/python") is None
    assert await environment.templates.pythons.find(python, "/usr") is None
    assert await environment.templates.pythons.find(shell) is None
    assert dockerd.containers(label=["atoll.probe"]) == []


async def test_a_search_that_is_cancelled_leaves_no_container(
    environment: Environment, dockerd: Dockerd
) -> None:
    image = await environment.images.find(PYTHON)
    assert image is not None
    for turns in range(0, 40, 4):
        looking = asyncio.ensure_future(
            environment.templates.pythons.find(image, f"/not/there/{turns}")
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        looking.cancel()
        await asyncio.wait([looking])

    await environment.templates.pythons.remove_probes()
    assert dockerd.containers(label=["atoll.probe"]) == []


# Pulls


async def test_a_pulled_image_has_only_the_name_that_atoll_keeps(
    environment: Environment, dockerd: Dockerd, registry: Registry, pulled: str
) -> None:
    found = await environment.puller.pull_and_tag(
        pulled, "abc", right(registry), timeout=LONG, on_output=environment.output.append
    )

    assert found.entrypoint == ("/bin/tool",)
    assert await environment.images.own_names() == ["abc"]
    assert pulled not in images_of(dockerd)
    assert 3 <= environment.text.count("\n") <= 20, environment.text
    assert "Pull complete" in environment.text
    assert PASSWORD not in environment.text
    assert await environment.images.remove("abc")
    assert await environment.images.find(found.id) is None


@pytest.mark.parametrize(
    ("name", "password", "code"),
    [
        ("team/tiny:1", "wrong", "image_denied"),
        ("team/tiny:1", None, "image_denied"),
        ("team/tiny:2", PASSWORD, "image_not_found"),
        ("team/nothing:1", PASSWORD, "image_not_found"),
    ],
)
async def test_a_failed_pull_reports_its_cause(
    environment: Environment,
    registry: Registry,
    pulled: str,
    name: str,
    password: str | None,
    code: str,
) -> None:
    auth = None if password is None else right(registry, password)
    with refused(PermanentError, code) as caught:
        await environment.puller.pull(
            f"{registry.server}/{name}", auth, timeout=LONG, on_output=environment.output.append
        )
    assert PASSWORD not in str(caught.value)


async def test_credentials_are_only_sent_to_their_own_server(
    environment: Environment, registry: Registry, pulled: str
) -> None:
    """The credentials are correct, and the registry would accept them."""
    with refused(PermanentError, "image_denied"):
        await environment.puller.pull(
            pulled,
            RegistryAuth("elsewhere.example.com", USER, PASSWORD),
            timeout=LONG,
            on_output=environment.output.append,
        )


async def test_an_unreachable_registry_is_a_temporary_error(
    environment: Environment, registry: Registry, pulled: str
) -> None:
    registry.stop()
    with refused(TemporaryError, "registry_unavailable"):
        await environment.puller.pull(
            pulled, right(registry), timeout=LONG, on_output=environment.output.append
        )
    registry.start()
    await environment.puller.pull_and_tag(
        pulled, "a", right(registry), timeout=LONG, on_output=environment.output.append
    )


async def test_a_pull_ends_when_it_is_cancelled_or_times_out(
    environment: Environment, dockerd: Dockerd, registry: Registry, pulled: str
) -> None:
    registry.pause()
    short = timedelta(milliseconds=200)
    with refused(PermanentError, "build_failed"):
        await environment.puller.pull(
            pulled, right(registry), timeout=short, on_output=environment.output.append
        )
    pulling = asyncio.ensure_future(
        environment.puller.pull(
            pulled, right(registry), timeout=LONG, on_output=environment.output.append
        )
    )
    await asyncio.sleep(0.2)
    pulling.cancel()
    await asyncio.wait([pulling])
    assert pulling.cancelled()
    registry.resume()
    assert pulled not in images_of(dockerd)


# Builds


def building(
    environment: Environment, dockerfile: str, context: BuildFiles | None = None, **fields: Any
) -> Any:
    build = ImageBuild(dockerfile, "built", ImageInputs(files=context), fresh=False)
    options: dict[str, Any] = {"timeout": LONG, "on_output": environment.output.append}
    return environment.templates.builder.build(build, **options | fields)


async def test_a_dockerfile_is_built_with_its_build_files(environment: Environment) -> None:
    name = "ä" * 100 + ".txt"
    data = tar_of(
        {"./a/b": b"1", "Dockerfile": b"FROM nothing", name: b"2"},
        link("l", "a/b"),
        link("h", "a/b", tarfile.LNKTYPE),
    )
    look = f"cat /x/l /x/h /x/{name} && echo said-$WORD"

    await building(
        environment,
        f"FROM {SHELL}\nARG WORD\nCOPY . /x/\nRUN {look}\nENTRYPOINT []\nCMD ls\n",
        context_of(data),
    )

    found = await environment.images.find_own("built")
    assert found is not None
    assert found.cmd == ("/bin/sh", "-c", "ls")
    assert "112said-something" in "".join(environment.text.split())


async def test_the_error_of_a_failed_build_contains_its_last_output(
    environment: Environment, dockerd: Dockerd
) -> None:
    with refused(PermanentError, "build_failed") as caught:
        await building(environment, f"FROM {SHELL}\nRUN echo so far; exit 7\n")

    assert "so far" in caught.value.message
    assert "7" in caught.value.message
    assert await environment.images.find_own("built") is None
    assert dockerd.containers() == []


async def test_commands_of_a_build_have_no_network(environment: Environment) -> None:
    with refused(PermanentError, "build_failed"):
        await building(environment, f"FROM {SHELL}\nRUN exec 3<>/dev/tcp/127.0.0.1/9\n")


@pytest.mark.parametrize("timeout", [timedelta(seconds=10), None], ids=["late", "cancelled"])
async def test_a_build_ends_when_it_is_cancelled_or_times_out(
    environment: Environment, dockerd: Dockerd, timeout: timedelta | None
) -> None:
    begun = asyncio.Event()

    def on_output(data: bytes) -> None:
        if b"Running in" in data:
            begun.set()

    made = asyncio.ensure_future(
        building(
            environment,
            f"FROM {SHELL}\nRUN sleep 600\n",
            on_output=on_output,
            timeout=timeout or LONG,
        )
    )
    first = asyncio.ensure_future(begun.wait())
    await asyncio.wait([made, first], return_when=asyncio.FIRST_COMPLETED)
    first.cancel()
    assert begun.is_set(), made
    if timeout is None:
        made.cancel()
    await asyncio.wait([made])
    assert made.cancelled() if timeout is None else made.exception().code == "build_failed"
    async with asyncio.timeout(30):
        while await asyncio.to_thread(dockerd.containers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def pax(kind: bytes, **records: str) -> bytes:
    """An extended header, for the next entry or for all following entries."""
    body = b""
    for key, value in records.items():
        text = f" {key.replace('__', '.')}={value}\n".encode()
        length = len(text) + 2
        body += b"%d%b" % (length + (length > 99), text)
    return head(kind, len(body)) + body + bytes(-len(body) % 512)


SMUGGLED = tar_of({"Dockerfile": f"FROM {SHELL}\nRUN echo smuggled\n".encode()})
"""Content of a file for a reader that uses the pax header; entries for a reader that does not."""
NOTHING = tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT)

HOSTILE: dict[str, Callable[[], bytes]] = {
    "smuggles_by_all_sizes": lambda: (
        pax(tarfile.XGLTYPE, size=str(len(SMUGGLED))) + NOTHING + SMUGGLED + tar_of({})
    ),
    "smuggles_by_one_size": lambda: (
        pax(tarfile.XHDTYPE, size=str(len(SMUGGLED))) + NOTHING + SMUGGLED + tar_of({})
    ),
    "head_of_all": lambda: pax(tarfile.XGLTYPE, comment="x") + tar_of({"a": b""}),
    "sparse": lambda: head(tarfile.GNUTYPE_SPARSE, 0) + tar_of({"a": b""}),
    "sparse_by_head": lambda: (
        pax(tarfile.XHDTYPE, GNU__sparse__major="1", GNU__sparse__minor="0") + tar_of({"a": b"1\n"})
    ),
    "two_dockerfiles": lambda: tar_of({"Dockerfile": b"", "./Dockerfile": b""}),
    "beneath_the_dockerfile": lambda: tar_of({"Dockerfile/x": b""}),
    "hard_link_to_a_link": lambda: tar_of(
        {}, link("a", "/etc"), link("b", "a", tarfile.LNKTYPE), tarfile.TarInfo("b/passwd")
    ),
    "very_deep": lambda: tar_of({"d/" * 1000 + "x": b""}),
    "above": lambda: tar_of({"../x": b""}),
    "above_later": lambda: tar_of({"a/../../x": b""}),
    "absolute": lambda: tar_of({"/etc/x": b""}),
    "beneath_a_link": lambda: tar_of({}, link("a", "/etc"), tarfile.TarInfo("a/passwd")),
    "hard_link_out": lambda: tar_of({}, link("a", "../../etc/passwd", tarfile.LNKTYPE)),
    "device": lambda: tar_of({}, link("a", "", tarfile.CHRTYPE)),
    "longer_than_it_is": lambda: tar_of({"a": bytes(4096)})[:1024],
    "no_tar": lambda: b"hello" * 1000,
    "empty": lambda: b"",
    "compressed": lambda: __import__("gzip").compress(tar_of({"a": b""})),
    "damaged_in_the_middle": lambda: tar_of({"a": b""})[:512] + b"x" * 512 + tar_of({"b": b""}),
    "says_it_has_a_long_head": lambda: head(tarfile.XHDTYPE, 2**50),
    "has_a_long_head": lambda: head(tarfile.GNUTYPE_LONGNAME, 10**7) + b"a" * 10**7,
    "heads_of_heads": lambda: (head(tarfile.XHDTYPE, 11) + b"11 path=a\n".ljust(512, b"\0")) * 2000,
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
async def test_malicious_build_files_are_refused(
    environment: Environment, hostile: Callable[[], bytes]
) -> None:
    with refused(PermanentError, "build_context_invalid"):
        await building(environment, f"FROM {SHELL}\nCOPY . /x\n", context_of(hostile()))


async def test_build_files_with_the_wrong_digest_are_not_built(environment: Environment) -> None:
    given = context_of(tar_of({"a": b""}))
    wrong = BuildFiles("0" * 64, given.open)
    with refused(TemporaryError, "blobs_unavailable"):
        await building(environment, f"FROM {SHELL}\n", wrong)


# Templates


def settled(environment: Environment, template: Template, fresh: str = "") -> Template:
    from dataclasses import replace

    layer = environment.templates.image_layer(template, fresh=fresh)
    return replace(template, build=Build(layers=(layer,), anew=bool(fresh)))


async def build(
    environment: Environment, template: Template, inputs: ImageInputs | None = None
) -> None:
    await environment.templates.build(
        template, timeout=LONG, on_output=environment.output.append, inputs=inputs or ImageInputs()
    )


async def test_an_image_loaded_by_another_client_is_used(
    environment: Environment, tiny: str
) -> None:
    template = settled(environment, make_template(image=tiny))

    assert await environment.templates.is_built(template)
    assert await environment.templates.names() == [template.layers[-1].name]
    found = await environment.templates.inspect(template)
    assert (found.digest, found.entrypoint, found.command) == (None, ("/bin/tool",), ("--help",))


async def test_a_template_keeps_its_image_when_its_name_is_removed(
    environment: Environment, dockerd: Dockerd, tiny: str
) -> None:
    template = settled(environment, make_template(image=tiny))
    before = await environment.templates.find(template)
    dockerd.ask("DELETE", f"/images/{tiny}")
    environment.images._cache.clear()

    assert (await environment.templates.find(template)).id == before.id


async def test_another_node_pulls_the_image_by_its_digest(
    environment: Environment, dockerd: Dockerd, registry: Registry, pulled: str, tmp_path: Path
) -> None:
    from dataclasses import replace

    template = settled(environment, make_template(image=pulled))
    assert not await environment.templates.is_built(template)
    await build(environment, template, ImageInputs(right(registry)))
    info = await environment.templates.inspect(template)
    assert info.digest is not None
    first = await environment.templates.find(template)
    await environment.templates.remove(template.layers[-1].name)
    # The tag moves.
    archive = tmp_path / "other.tar"
    archive.write_bytes(tar_of({"other": b""}))
    dockerd.import_image(archive, "other:1")
    registry.put(dockerd, "other:1", "team/tiny:1")

    assert template.build is not None
    elsewhere = replace(template, build=replace(template.build, image=info))
    await build(environment, elsewhere, ImageInputs(right(registry)))
    assert (await environment.templates.find(elsewhere)).id == first.id
    again = settled(environment, make_template(image=pulled), fresh="2")
    await build(environment, again, ImageInputs(right(registry)))
    assert (await environment.templates.find(again)).id != first.id


async def test_two_templates_of_a_moved_tag_keep_different_images(
    environment: Environment, dockerd: Dockerd, registry: Registry, pulled: str, tmp_path: Path
) -> None:
    from dataclasses import replace

    one = settled(environment, make_template(image=pulled))
    await build(environment, one, ImageInputs(right(registry)))
    info = await environment.templates.inspect(one)
    first = await environment.templates.find(one)
    assert one.build is not None
    one = replace(one, build=replace(one.build, image=info))
    await environment.templates.remove(one.layers[-1].name)
    archive = tmp_path / "other.tar"
    archive.write_bytes(tar_of({"other": b""}))
    dockerd.import_image(archive, "other:1")
    registry.put(dockerd, "other:1", "team/tiny:1")

    # As on another node, which needs the second template first.
    two = settled(environment, make_template(image=pulled))
    await build(environment, two, ImageInputs(right(registry)))
    assert two.layers == one.layers
    assert not await environment.templates.is_built(one)
    await build(environment, one, ImageInputs(right(registry)))
    assert (await environment.templates.find(one)).id == first.id
    other = await environment.templates.find(two)
    assert other.id != first.id
    assert (await environment.templates.inspect(one)).digest == info.digest
    # The digest is known after a restart, too, although the engine forgot it with the name.
    anew = DockerImages(environment.templates._engine, DockerSettings(), NODE, tmp_path)
    digest = (await anew.inspect(two)).digest
    assert digest not in (None, info.digest)
    assert await anew.names() == [one.layers[-1].name]
    await anew.remove(one.layers[-1].name)
    assert await anew.names() == []


async def test_the_same_dockerfile_is_built_once(environment: Environment) -> None:
    text = f"FROM {SHELL}\nRUN echo once-{os.urandom(4).hex()}\n"
    one, two = (settled(environment, make_template(dockerfile=text)) for _ in range(2))
    await build(environment, one)
    printed = len(environment.output)
    await build(environment, two)

    assert one.layers == two.layers
    assert len(environment.output) == printed
    other = settled(environment, make_template(dockerfile=text, build_context="0" * 64))
    assert other.layers != one.layers


async def test_concurrent_builds_both_succeed(environment: Environment) -> None:
    texts = [f"FROM {SHELL}\nRUN echo {number} {os.urandom(4).hex()}\n" for number in range(2)]
    templates = [
        settled(environment, make_template(dockerfile=text)) for text in (*texts, texts[0])
    ]
    await asyncio.gather(*(build(environment, template) for template in templates))

    found = [await environment.templates.find(template) for template in templates]
    assert found[0].id == found[2].id != found[1].id


async def test_an_image_is_removed_when_no_container_uses_it(
    environment: Environment, dockerd: Dockerd, tiny: str
) -> None:
    template = settled(environment, make_template(image=tiny))
    assert await environment.templates.is_built(template)
    name = template.layers[-1].name
    container = dockerd.create(environment.images.own_reference(name), "x")
    dockerd.ask("DELETE", f"/images/{tiny}")

    await environment.templates.remove(name)
    assert name in await environment.templates.names()
    dockerd.remove(container)
    await environment.templates.remove(name)
    await environment.templates.remove(name)
    assert await environment.templates.names() == []


async def test_a_missing_image_is_a_temporary_error(environment: Environment) -> None:
    with refused(TemporaryError, "image_missing"):
        await environment.templates.find(make_template(image="nobody/nothing:1"))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"image": "/srv/rootfs"}, "invalid_request"),
        ({"image": "Not An Image"}, "invalid_request"),
        ({"image": "a:1", "dockerfile": "FROM a"}, "invalid_request"),
        ({"image": "a:1", "build_context": "0" * 64}, "invalid_request"),
        ({"dockerfile": "RUN x"}, "dockerfile_invalid"),
        ({"dockerfile": "FROM a\nADD http://169.254.169.254/ /x"}, "dockerfile_invalid"),
        ({"dockerfile": "FROM a\nADD \\\n# x\n ftp://h/ /x"}, "dockerfile_invalid"),
        ({"dockerfile": "FROM a\nONBUILD add $URL /x"}, "dockerfile_invalid"),
        ({"dockerfile": "FROM a\nAD\\\nD http://h/x /x"}, "dockerfile_invalid"),
        ({"dockerfile": "FROM a\nAD\\ \n\n  \nD http://h/x /x"}, "dockerfile_invalid"),
        ({"dockerfile": "FROM a\nADD http:\\\n//h/x /x"}, "dockerfile_invalid"),
        ({"dockerfile": "FROM a\nLABEL a=b`\nADD http://h/x /x"}, "dockerfile_invalid"),
        ({"dockerfile": "# escape=`\nFROM a\nAD`\nD http://h/x /x"}, "dockerfile_invalid"),
        ({"dockerfile": 'FROM a\nADD ["http:\\/\\/h/x", "/x"]'}, "dockerfile_invalid"),
        ({"dockerfile": 'FROM a\nADD "http:"//h/x /x'}, "dockerfile_invalid"),
        ({"image": "a:1", "runtime": "none-such"}, "runtime_unsupported"),
        (
            {"image": "a:1", "build": Build(debian_packages=("curl",), layers=(Layer("x"),))},
            "debian_packages_unsupported",
        ),
    ],
    ids=lambda value: json.dumps(value, default=str)[:40],
)
async def test_invalid_templates_are_refused(
    environment: Environment, given: dict[str, Any], code: str
) -> None:
    with refused(InvalidRequest, code):
        await environment.templates.check(make_template(**{"image": "", **given}))


async def test_valid_templates_are_accepted(environment: Environment) -> None:
    for given in (
        {"image": "registry.example.com:5000/a/b:1@sha256:" + "0" * 64},
        {"image": ""},
        {"image": "", "dockerfile": "FROM a\nADD --chown=1:1 x /y\nRUN curl http://x"},
        {"image": "python:3.12", "runtime": "runc"},
    ):
        await environment.templates.check(make_template(**given))

"""
Compares deploy/compose.yaml and its files with the settings, without an engine.

Values are substituted as by Compose, with the passwords that deploy/env generates.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from atoll.api.rest.health import router
from atoll.api.rest.server.uvicorn_server import check_exposure
from atoll.settings import DockerSettings, Settings, parse_key

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
DOCKERFILE = DEPLOY / "Dockerfile"
SECRET_NAME = re.compile(r"PASSWORD|SECRET|AUTH|KEY$|_URL$|MC_HOST")
NO_SECRETS = {"ATOLL_PUBLIC_URL", "ATOLL_NODE__URL", "ATOLL_DOCKER__URL", "ATOLL_BLOB__URL"}
VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:[-?])([^}]*))?\}|(.?))")
PINNED = re.compile(r"[^:@]+:(RELEASE\.\d{4}-[\dTZ-]+|\d+\.\d+\.\d+(-[\w-]+)?)")

Service = dict[str, Any]
Stack = dict[str, Service]


def generated(place: Path) -> dict[str, str]:
    """What deploy/env leaves in `place`."""
    subprocess.run([str(DEPLOY / "env"), str(place)], check=True, timeout=30)
    return dict(line.split("=", 1) for line in place.read_text().splitlines())


def filled(value: Any, env: dict[str, str]) -> Any:
    """`value` with its variables replaced as Compose replaces them."""
    if isinstance(value, dict):
        return {name: filled(inner, env) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner, env) for inner in value]
    if not isinstance(value, str):
        return value

    def replacement(match: re.Match[str]) -> str:
        dollar, name, operator, rest, other = match.groups()
        if dollar:
            return "$"
        assert other is None, f"{value!r}: write ${{NAME}}, or $$ for a dollar"
        found = env.get(name, "")
        if not found:
            assert operator == ":-", f"{name} has no default, and deploy/env does not make it"
            found = rest
        return found

    return VARIABLE.sub(replacement, value)


def services(env: dict[str, str]) -> Stack:
    made: Stack = filled(yaml.safe_load(COMPOSE.read_text())["services"], env)
    return made


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return generated(tmp_path / ".env")


@pytest.fixture
def stack(env: dict[str, str]) -> Stack:
    return services(env)


def settings_of(service: Service, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """What Atoll reads of the environment of a service."""
    for name in os.environ:
        if name.startswith("ATOLL_"):
            monkeypatch.delenv(name)
    for name, value in service["environment"].items():
        assert isinstance(value, str), f"{name}: quote it, or YAML makes something else of it"
        monkeypatch.setenv(name, value)
    return Settings.read()


@pytest.fixture
def settings(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Settings:
    return settings_of(stack["atoll"], monkeypatch)


def is_one_shot(service: Service) -> bool:
    return bool(service["restart"] == "no")


def binds(service: Service) -> dict[str, str]:
    return {mount["target"]: mount["source"] for mount in service["volumes"]}


def test_passwords_are_generated_once_and_readable_by_the_owner_only(tmp_path: Path) -> None:
    directory = tmp_path / ".env"
    first = generated(directory)

    assert directory.stat().st_mode & 0o777 == 0o600
    assert generated(directory) == first
    assert len(set(first.values())) == len(first)
    for value in first.values():
        assert re.fullmatch("[0-9a-f]{64}", value)


def test_values_set_by_hand_are_kept(tmp_path: Path) -> None:
    directory = tmp_path / ".env"
    directory.write_text("ATOLL_PORT=9000\nREDIS_PASSWORD=mine")
    directory.chmod(0o644)
    made = generated(directory)

    assert directory.stat().st_mode & 0o777 == 0o600
    assert (made["ATOLL_PORT"], made["REDIS_PASSWORD"]) == ("9000", "mine")
    assert len(made["MARIADB_PASSWORD"]) == 64


def test_git_ignores_the_passwords() -> None:
    assert "deploy/.env" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_compose_file_contains_no_password(tmp_path: Path) -> None:
    one, two = (services(generated(tmp_path / name)) for name in ("one", "two"))
    seen = set()
    for name, service in one.items():
        for variable, value in service.get("environment", {}).items():
            if SECRET_NAME.search(variable) and variable not in NO_SECRETS:
                seen.add(variable)
                assert value != two[name]["environment"][variable], (name, variable)

    assert {"ATOLL_API_KEY", "ATOLL_DATABASE_URL", "MARIADB_ROOT_PASSWORD", "MC_HOST_store"} <= seen


def test_every_generated_password_is_required(env: dict[str, str]) -> None:
    text = COMPOSE.read_text()

    assert {name for name in env if f"${{{name}:?run deploy/up}}" not in text} == set()
    # No other value is generated, and no other is required.
    assert set(re.findall(r"\$\{(\w+):\?", text)) == set(env)


def test_no_command_contains_a_password(stack: Stack, env: dict[str, str]) -> None:
    for service in stack.values():
        shown = json.dumps([service.get("command"), service.get("healthcheck")])
        assert not [name for name, value in env.items() if value in shown]


def test_atoll_accepts_its_settings(settings: Settings, env: dict[str, str]) -> None:
    check_exposure(settings)

    assert settings.driver == "docker"
    assert settings.api_key == env["ATOLL_API_KEY"]
    assert settings.secrets.key is not None
    assert parse_key(settings.secrets.key.get_secret_value())


def test_unset_values_have_the_defaults_of_the_settings(settings: Settings) -> None:
    assert settings.docker.image == DockerSettings().image
    assert settings.docker.runtime == DockerSettings().runtime
    assert str(settings.data_dir) == "/var/lib/atoll"


def test_data_directory_port_image_and_runtime_can_be_set(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    atoll = services(
        env
        | {
            "ATOLL_DATA_DIR": "/srv/atoll",
            "ATOLL_PORT": "9000",
            "ATOLL_DOCKER__IMAGE": "python:3.13-slim",
            "ATOLL_DOCKER__RUNTIME": "runsc",
        }
    )["atoll"]
    settings = settings_of(atoll, monkeypatch)

    assert binds(atoll)["/srv/atoll"] == "/srv/atoll" == str(settings.data_dir)
    assert atoll["ports"] == ["127.0.0.1:9000:8000"]
    assert (settings.docker.image, settings.docker.runtime) == ("python:3.13-slim", "runsc")


def test_engine_and_atoll_use_the_same_path_of_the_data_directory(
    stack: Stack, settings: Settings
) -> None:
    directory = str(settings.data_dir)

    assert binds(stack["atoll"])[directory] == directory
    assert settings.docker.storage == "directories"


def test_atoll_shares_processes_and_control_groups_with_the_engine(stack: Stack) -> None:
    assert (stack["atoll"]["pid"], stack["atoll"]["cgroup"]) == ("host", "host")


def test_the_socket_of_the_engine_is_mounted_at_the_configured_path(
    stack: Stack, settings: Settings
) -> None:
    assert settings.docker.url is not None
    socket = settings.docker.url.removeprefix("unix://")

    assert binds(stack["atoll"])[socket] == "/var/run/docker.sock"
    for name in stack.keys() - {"atoll"}:
        assert "docker.sock" not in json.dumps(stack[name]), name


def test_only_atoll_is_published_and_only_on_loopback(stack: Stack, settings: Settings) -> None:
    assert stack["atoll"]["ports"] == [f"127.0.0.1:8000:{settings.port}"]
    assert settings.node.url == f"http://atoll:{settings.port}"
    assert not [name for name in stack if name != "atoll" and "ports" in stack[name]]


def test_atoll_and_its_upgrade_use_the_same_database(
    stack: Stack, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    mariadb = stack["mariadb"]["environment"]
    assert settings.database_url is not None
    url = urlsplit(settings.database_url)

    assert (url.scheme, url.hostname, url.port) == ("mysql", "mariadb", 3306)
    assert url.username == mariadb["MARIADB_USER"]
    assert url.password == mariadb["MARIADB_PASSWORD"]
    assert url.path == f"/{mariadb['MARIADB_DATABASE']}"
    assert settings_of(stack["schema"], monkeypatch).database_url == settings.database_url


def test_redis_has_the_configured_address(stack: Stack, settings: Settings) -> None:
    redis = stack["redis"]
    assert settings.redis_url is not None
    url = urlsplit(settings.redis_url)

    assert (url.scheme, url.hostname, url.port) == ("redis", "redis", 6379)
    assert url.password == redis["environment"]["REDISCLI_AUTH"]
    assert "requirepass $REDISCLI_AUTH\n" in redis["command"][-1]


def test_the_bucket_is_created_at_the_configured_address(stack: Stack, settings: Settings) -> None:
    minio, bucket = stack["minio"]["environment"], stack["bucket"]
    blob = settings.blob
    assert blob.access_key_id is not None
    assert blob.secret_access_key is not None
    name, _ = blob.bucket_and_prefix
    maker = urlsplit(bucket["environment"]["MC_HOST_store"])

    assert blob.endpoint == "http://minio:9000"
    assert blob.access_key_id.get_secret_value() == minio["MINIO_ROOT_USER"]
    assert blob.secret_access_key.get_secret_value() == minio["MINIO_ROOT_PASSWORD"]
    assert f"{maker.scheme}://{maker.hostname}:{maker.port}" == blob.endpoint
    assert (maker.username, maker.password) == (
        minio["MINIO_ROOT_USER"],
        minio["MINIO_ROOT_PASSWORD"],
    )
    assert bucket["command"] == ["mb", "--ignore-existing", f"store/{name}"]
    # Links to an address that only containers know would be of no use.
    assert blob.direct_links is False


@pytest.mark.parametrize("name", ["atoll", "schema"])
def test_every_service_command_is_a_command_of_atoll(stack: Stack, name: str) -> None:
    command = [sys.executable, "-m", "atoll.cli", *stack[name]["command"], "--help"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert "--data-dir" in done.stdout


def test_the_health_check_calls_a_probe(stack: Stack, settings: Settings) -> None:
    kind, program, option, code = stack["atoll"]["healthcheck"]["test"]
    compile(code, "healthcheck", "exec")
    address = re.search(r'"(http://[^"]+)"', code)

    assert (kind, program, option) == ("CMD", "python", "-c")
    assert address is not None
    url = urlsplit(address[1])
    assert (url.hostname, url.port) == ("127.0.0.1", settings.port)
    assert url.path in {getattr(route, "path", None) for route in router.routes}


def test_services_depend_on_each_other_in_this_order(stack: Stack) -> None:
    for name, service in stack.items():
        for other, how in service.get("depends_on", {}).items():
            once = is_one_shot(stack[other])
            wanted = "service_completed_successfully" if once else "service_healthy"
            assert how == {"condition": wanted}, (name, other)
            assert set(service["networks"]) & set(stack[other]["networks"]), (name, other)

    assert set(stack["atoll"]["depends_on"]) == stack.keys() - {"atoll"}


def test_services_have_a_health_check_and_are_restarted(
    stack: Stack,
) -> None:
    staying = {name: service for name, service in stack.items() if not is_one_shot(service)}

    assert set(staying) == {"atoll", "mariadb", "redis", "minio"}
    for name, service in staying.items():
        assert service["restart"] == "unless-stopped", name
        check = service["healthcheck"]
        assert check["test"][0] in ("CMD", "CMD-SHELL"), name
        assert {"interval", "timeout", "retries", "start_period"} <= check.keys(), name


def test_stores_are_in_an_internal_network(stack: Stack) -> None:
    networks = yaml.safe_load(COMPOSE.read_text())["networks"]

    assert networks["stores"] == {"internal": True}
    for name, service in stack.items():
        assert set(service["networks"]) <= networks.keys(), name
        if name != "atoll":
            assert service["networks"] == ["stores"], name


@pytest.mark.parametrize(("name", "place"), [("mariadb", "/var/lib/mysql"), ("minio", "/data")])
def test_data_is_in_a_named_volume(stack: Stack, name: str, place: str) -> None:
    named = yaml.safe_load(COMPOSE.read_text())["volumes"]
    (mount,) = stack[name]["volumes"]
    volume, _, target = mount.partition(":")

    assert volume in named
    assert target == place


def test_images_are_pinned(stack: Stack) -> None:
    foreign = {service["image"] for service in stack.values() if "build" not in service}

    assert len(foreign) == 3
    for image in foreign:
        assert PINNED.fullmatch(image), image
    for service in stack.values():
        if "build" in service:
            assert service["pull_policy"] == "build"


def instructions() -> list[tuple[str, str]]:
    """Those of the Dockerfile, each as one line."""
    text = "\n".join(
        line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")
    ).replace("\\\n", " ")
    split = (line.split(None, 1) for line in text.splitlines() if line.strip())
    return [(word, rest) for word, rest in split]


def test_the_files_of_the_image_build_exist(stack: Stack) -> None:
    build = stack["atoll"]["build"]
    context = (DEPLOY / build["context"]).resolve()
    assert context / build["dockerfile"] == DOCKERFILE
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        source
        for word, rest in instructions()
        if word in ("COPY", "ADD")
        for source in rest.split()[:-1]
    ]

    assert {"pyproject.toml", "requirements.lock", "src"} <= set(copied)
    assert allowed[0] == "*"
    for source in copied:
        assert (context / source).exists(), source
        assert f"!{source}" in allowed, source


def test_all_files_that_the_package_build_reads_are_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = " ".join(rest for word, rest in instructions() if word == "COPY")

    assert project["project"]["readme"] in copied.split()
    assert all(
        place.startswith("src/")
        for place in (
            project["tool"]["hatch"]["version"]["path"],
            *project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
        )
    )


def test_the_image_has_the_locked_packages_and_runs_atoll() -> None:
    by_word = dict(instructions())
    lock = (ROOT / "requirements.lock").read_text()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

    assert "--require-hashes --requirement uv.txt" in by_word["RUN"]
    assert "--verify-hashes --constraint requirements.lock ." in by_word["RUN"]
    assert re.search(r"^uv==[\d.]+ \\$", lock, re.MULTILINE)
    (entry,) = json.loads(by_word["ENTRYPOINT"])
    assert entry in scripts


def test_the_image_and_instances_have_the_same_python_version() -> None:
    base = dict(instructions())["FROM"]
    minor = re.match(r"python:(\d+\.\d+)", DockerSettings().image)

    assert PINNED.fullmatch(base)
    assert minor is not None
    # Else the executor is compiled at every start of an instance.
    assert base.startswith(f"python:{minor[1]}.")

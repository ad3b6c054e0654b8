"""Settings: from arguments, then the environment, then defaults; nothing misspelt passes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import InvalidRequest
from atoll.settings import Group, Settings, known_variables

READ: dict[str, tuple[str, Any]] = {
    "ATOLL_HOST": ("::1", "::1"),
    "ATOLL_PORT": ("0", 0),
    "ATOLL_DATA_DIR": ("/somewhere", Path("/somewhere")),
    "ATOLL_INSECURE": ("true", True),
    "ATOLL_LOG_JSON": ("1", True),
    "ATOLL_MAX_BODY": ("4096", 4096),
    "ATOLL_SHUTDOWN_TIMEOUT": ("1.5", timedelta(seconds=1.5)),
    "ATOLL_CORS_ORIGINS": (" https://a, https://b,", ("https://a", "https://b")),
    "ATOLL_SESSION__TIMEOUT": ("60", timedelta(minutes=1)),
    "ATOLL_SESSION__CPU": ("0.5", 0.5),
    "ATOLL_EXECUTION__MAX_WAIT": ("PT2M", timedelta(minutes=2)),
    "ATOLL_POOL__SIZE": ("0", 0),
    "ATOLL_LINK__READ_TIMEOUT": ("3", timedelta(seconds=3)),
    "ATOLL_LOCAL__TEMPLATE_ROOTS": ("/a:/b", (Path("/a"), Path("/b"))),
    "ATOLL_SQLITE__BUSY_TIMEOUT": ("10", timedelta(seconds=10)),
}


def setting_of(settings: Settings, variable: str) -> Any:
    value: Any = settings
    for part in variable.removeprefix("ATOLL_").lower().split("__"):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("variable", "case"), READ.items(), ids=READ.keys())
def test_a_variable_is_read(
    monkeypatch: pytest.MonkeyPatch, variable: str, case: tuple[str, Any]
) -> None:
    text, value = case
    monkeypatch.setenv(variable, text)

    assert setting_of(Settings.read(), variable) == value


@pytest.mark.parametrize(
    "variable",
    ["ATOLL_PROT", "ATOLL_SESSION_TIMEOUT", "ATOLL_SESSION__TIME", "ATOLL_", "ATOLL_POOL"],
)
def test_an_unknown_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")

    with pytest.raises(InvalidRequest, match=variable) as caught:
        Settings.read()
    assert caught.value.code == "unknown_setting"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("ATOLL_PORT", "65536"),
        ("ATOLL_PORT", "http"),
        ("ATOLL_API_KEY", "short"),
        ("ATOLL_MAX_BODY", "1"),
        ("ATOLL_LOG_LEVEL", "loud"),
        ("ATOLL_SESSION__TIMEOUT", "0"),
        ("ATOLL_SESSION__TIMEOUT", "soon"),
        ("ATOLL_SESSION__TIMEOUT", "nan"),
        ("ATOLL_SESSION__CPU", "-1"),
        ("ATOLL_TEMPLATE__BUILDS", "0"),
        ("ATOLL_LOCAL__CGROUP_NAME", "../up"),
        ("ATOLL_TLS_CERT", "/only/one"),
        ("ATOLL_BLOB__URL", "https://s3.example.com/bucket"),
        ("ATOLL_BLOB__URL", "s3://"),
        ("ATOLL_BLOB__URL", "s3://Bucket"),
        ("ATOLL_BLOB__URL", "s3://bucket/../other"),
        ("ATOLL_BLOB__URL", "s3://bucket?region=x"),
        ("ATOLL_BLOB__ENDPOINT", "https://s3.example.com"),
        ("ATOLL_BLOB__SECRET_ACCESS_KEY", "without url"),
        ("ATOLL_BLOB__SPOOL_SIZE", "0"),
    ],
    ids=str,
)
def test_an_invalid_value_is_an_error(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)

    with pytest.raises(InvalidRequest) as caught:
        Settings.read()
    assert caught.value.code == "invalid_setting"


BUCKET = {"url": "s3://bucket/some/where"}
BLOB = {
    "half of the credentials": {"access_key_id": "a"},
    "the other half": {"secret_access_key": "a"},
    "endpoint without scheme": {"endpoint": "s3.example.com"},
    "endpoint with a path": {"endpoint": "https://s3.example.com/bucket"},
    "endpoint with a login": {"endpoint": "https://me:secret@s3.example.com"},
    "unknown encryption": {"encryption": "rot13"},
    "key of another encryption": {"encryption": "AES256", "kms_key_id": "1"},
}


@pytest.mark.parametrize("given", BLOB.values(), ids=BLOB.keys())
def test_inconsistent_s3_settings_are_an_error(given: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Settings.read(blob=BUCKET | given)
    assert caught.value.code == "invalid_setting"
    assert "secret@" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("s3://bucket", ("bucket", "")),
        ("s3://bucket/", ("bucket", "")),
        ("s3://my.bucket-1/a/b", ("my.bucket-1", "a/b")),
        ("s3://bucket/a/", ("bucket", "a")),
    ],
)
def test_a_url_contains_a_bucket_and_a_prefix(url: str, place: tuple[str, str]) -> None:
    assert Settings.read(blob={"url": url}).blob.bucket_and_prefix == place


def test_an_argument_that_is_not_null_overrides_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATOLL_PORT", "1234")

    assert Settings.read(port=99).port == 99
    assert Settings.read(port=None).port == 1234


def test_variables_of_clients_and_other_programs_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATOLL_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("ATOLLO", "1")

    assert Settings.read().port == 8000


def test_every_setting_has_a_variable() -> None:
    known = known_variables()

    for name, field in Settings.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, Group):
            assert {f"ATOLL_{name}__{inner}".upper() for inner in group.model_fields} <= known
        else:
            assert f"ATOLL_{name}".upper() in known


def test_the_key_is_not_shown() -> None:
    assert "a-secret-of-mine-1" not in repr(Settings(api_key="a-secret-of-mine-1"))


def test_credentials_of_s3_are_not_shown() -> None:
    keys = {"access_key_id": "an-access-key", "secret_access_key": "a-secret-key"}
    settings = Settings.read(blob=BUCKET | keys | {"proxy_url": "http://me:a-secret-key@proxy"})

    for shown in (repr(settings), str(settings.model_dump()), settings.model_dump_json()):
        assert "a-secret-key" not in shown
        assert "an-access-key" not in shown


def test_the_data_directory_follows_the_desktop_s_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")

    assert Settings.read().data_dir == Path("/data/atoll")


def test_the_data_directory_is_a_real_and_absolute_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = tmp_path.resolve() / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(real))

    assert Settings.read(data_dir="./link/data").data_dir == real / "data"
    assert Settings.read(data_dir="~/data").data_dir == real / "data"
    monkeypatch.setenv("ATOLL_DATA_DIR", "link")
    assert Settings.read().data_dir == real
    monkeypatch.delenv("ATOLL_DATA_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", "link")
    assert Settings.read().data_dir == real / "atoll"


def test_a_home_directory_of_an_unknown_user_is_an_error() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Settings.read(data_dir="~nobody-of-that-name/data")
    assert caught.value.code == "invalid_setting"

"""Sealed texts: opened by the right key for the right thing, and by nothing else."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from atoll.errors import InvalidRequest, PermanentError
from atoll.service.auth.encryption import Encryption
from atoll.settings import SecretSettings, parse_key

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = os.urandom(32).hex(), base64.b64encode(os.urandom(32)).decode()


def test_sealed_text_can_be_opened_only_for_the_same_purpose() -> None:
    sealing = Encryption([NEW])
    sealed = sealing.seal("the value", "session a, name X")

    assert "the value" not in sealed
    assert sealing.open(sealed, "session a, name X") == "the value"
    assert sealing.open(sealed, "session b, name X") is None
    assert sealing.open(sealed, "session a, name Y") is None


@pytest.mark.parametrize("text", ["", "ünïcödé\n", "\udc80 no text", "x" * 65536])
def test_any_text_is_restored_unchanged(text: str) -> None:
    sealing = Encryption([NEW])
    assert sealing.open(sealing.seal(text, "it"), "it") == text


def test_the_same_text_is_sealed_differently_each_time() -> None:
    sealing = Encryption([NEW])
    assert len({sealing.seal("text", "it") for _ in range(100)}) == 100


def test_a_replaced_key_still_opens_but_no_longer_seals() -> None:
    before = Encryption([OLD]).seal("text", "it")
    both = Encryption([NEW, OLD])

    assert both.open(before, "it") == "text"
    assert Encryption([OLD]).open(both.seal("text", "it"), "it") is None
    assert Encryption([NEW]).open(before, "it") is None


@pytest.mark.parametrize("sealed", ["", "1:", "1:AAAA", "1:not base64", "2:AAAA", "ü"])
def test_invalid_sealed_text_cannot_be_opened(sealed: str) -> None:
    assert Encryption([NEW]).open(sealed, "it") is None


def test_one_changed_byte_is_detected() -> None:
    sealing = Encryption([NEW])
    data = bytearray(base64.b64decode(sealing.seal("text", "it")[2:]))
    for place in range(len(data)):
        changed = bytes(byte ^ (place == at) for at, byte in enumerate(data))
        assert sealing.open("1:" + base64.b64encode(changed).decode(), "it") is None


def test_a_key_file_is_created_on_demand_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "secret-key"
    assert Encryption(file=file).open("1:AAAA", "it") is None
    assert not file.exists()

    sealed = Encryption(file=file).seal("text", "it")
    assert file.stat().st_mode & 0o777 == 0o600
    assert Encryption(file=file).open(sealed, "it") == "text"
    assert [path.name for path in tmp_path.iterdir()] == ["secret-key"]


def test_an_existing_key_file_is_never_replaced(tmp_path: Path) -> None:
    file = tmp_path / "secret-key"
    first, second = Encryption(file=file), Encryption(file=file)
    sealed = first.seal("text", "it")
    assert second.open(second.seal("text", "it"), "it") == "text"
    assert second.open(sealed, "it") == "text"

    file.write_text("no key\n")
    with pytest.raises(PermanentError, match="secret-key does not contain a key") as caught:
        Encryption(file=file).open(sealed, "it")
    assert caught.value.code == "secret_unreadable"


def test_the_error_for_a_missing_key_contains_the_setting() -> None:
    with pytest.raises(InvalidRequest, match="ATOLL_SECRETS__KEY") as caught:
        Encryption().seal("text", "it")
    assert caught.value.code == "secrets_not_configured"


def test_keys_are_accepted_in_the_usual_encodings() -> None:
    key = bytes(range(224, 256))
    plain = base64.b64encode(key).decode()
    for text in (key.hex(), key.hex().upper(), plain, plain.rstrip("="), f" {plain}\n",
                 base64.urlsafe_b64encode(key).decode()):  # fmt: skip
        assert parse_key(text) == key


@pytest.mark.parametrize("text", ["", "short", "0" * 63, base64.b64encode(b"x" * 31).decode()])
def test_an_invalid_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        parse_key(text)
    with pytest.raises(ValueError, match="32 bytes") as caught:
        SecretSettings(key=text)
    assert not text or f"'{text}'" not in str(caught.value)


def test_keys_and_settings_do_not_show_secrets() -> None:
    settings = SecretSettings(key=NEW, old_keys=OLD)
    assert [key.get_secret_value() for key in settings.old_keys] == [OLD]
    for shown in (repr(settings), str(settings), repr(Encryption([NEW, OLD]))):
        assert NEW not in shown
        assert OLD not in shown


def test_a_server_without_secrets_does_not_load_the_cipher() -> None:
    code = (
        "import atoll.app.application, sys; "
        "sys.exit(any('cryptography' in name for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

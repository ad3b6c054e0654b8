"""Data directories: one database each, one server or several, a name for the node."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from atoll.app import data_directory
from atoll.app.data_directory import DataDirLock, assign_to, node_id
from atoll.errors import Conflict


def test_a_directory_of_another_database_is_refused(tmp_path: Path) -> None:
    assign_to(tmp_path, "clus_1", own=False)
    assign_to(tmp_path, "clus_1", own=False)

    for cluster, own in (("clus_2", False), ("clus_2", True)):
        with pytest.raises(Conflict) as caught:
            assign_to(tmp_path, cluster, own=own)
        assert caught.value.code == "data_dir_of_other_database"
    assign_to(tmp_path, "clus_1", own=False)


def test_only_a_database_inside_the_directory_can_be_replaced_by_a_new_one(
    tmp_path: Path,
) -> None:
    assign_to(tmp_path, "clus_1", own=True)
    with pytest.raises(Conflict):
        assign_to(tmp_path, "clus_2", own=False)

    assign_to(tmp_path, "clus_3", own=True)
    with pytest.raises(Conflict):
        assign_to(tmp_path, "clus_1", own=False)


def test_a_node_keeps_its_name_and_shares_it_with_no_other(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with ThreadPoolExecutor(8) as pool:
        names = [set(pool.map(lambda _, p=place: node_id(p, own=False), range(16)))
                 for place in places]  # fmt: skip

    assert [len(each) for each in names] == [1, 1]
    assert names[0] != names[1]
    assert node_id(places[0], own=True) == "local"


def test_without_redis_only_one_server_can_use_a_directory(tmp_path: Path) -> None:
    with closing(DataDirLock(tmp_path, shared=False)) as lock:
        assert lock.alone
        with pytest.raises(Conflict) as caught:
            DataDirLock(tmp_path, shared=False)
        assert caught.value.code == "data_dir_in_use"

    with closing(DataDirLock(tmp_path, shared=False)) as lock:
        assert lock.alone


def test_with_redis_the_first_server_is_alone_until_it_releases_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_directory, "RECOVERY_TIMEOUT", 0.0)
    with closing(DataDirLock(tmp_path, shared=True)) as first:
        assert first.alone
        with pytest.raises(Conflict):
            DataDirLock(tmp_path, shared=True)
        first.let_others_in()
        with closing(DataDirLock(tmp_path, shared=True)) as second:
            assert not second.alone
            with pytest.raises(Conflict):
                DataDirLock(tmp_path, shared=False)

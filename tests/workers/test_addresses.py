"""What `--workers` may say, and how a lock file is understood."""

import dataclasses

import pytest

from towers.errors import InputError
from towers.workers.addresses import find_workers, join_address, parse_address
from towers.workers.lock import Lock, LockFile, from_text, to_text

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "text, found",
    [
        ("host1", ["host1:2222"]),
        ("Host1:22, 10.0.0.5", ["host1:22", "10.0.0.5:2222"]),
        ("[fd00::5]:22,[::1]", ["[fd00::5]:22", "[::1]:2222"]),
    ],
)
def test_workers_are_found(text, found):
    assert find_workers(text) == found


@pytest.mark.parametrize(
    "text, why",
    [
        ("a:1,b,a:1", "a:1 is named twice"),
        ("a,A:2222", "a:2222 is named twice"),
        *((t, "HOST:PORT is needed") for t in ("", "a,,b", "a:1:2", "http://a", "a:65536", "a b")),
        ("a:0", "has no port"),
    ],
)
def test_what_names_no_workers_is_one_line(text, why):
    with pytest.raises(InputError, match=f"^--workers=.*{why}"):
        find_workers(text)


def test_an_address_is_taken_apart_and_joined():
    for text in ("a:1", "10.0.0.5:2222", "[fd00::5]:0"):
        assert join_address(*parse_address(text, "address")) == text


def test_the_first_program_has_the_worker_until_it_is_silent_or_releases_it(tmp_path):
    now, path = 0.0, tmp_path / "lock"
    first, second = (Lock(id, f"{id}'s program", 10.0) for id in ("anna", "bert"))
    file = LockFile(tmp_path, clock=lambda: now)
    assert file.look() == "" and file.owner is None
    for beat in range(3):
        path.write_text(to_text(dataclasses.replace(first, beat=beat)))
        assert file.look() == "" and file.owner.id == "anna"
        path.write_text(to_text(second))  # it looked at the same moment
        assert file.look() == "" and from_text(Lock, path.read_text()).id == "anna"
        now += 9
        path.write_text("{half a li")
        assert file.look() == "" and file.owner.id == "anna"
        now += 9
    now += 2
    assert "no heartbeat" in file.look()
    file = LockFile(tmp_path, clock=lambda: now)
    path.write_text(to_text(second))
    assert file.look() == ""
    path.write_text(to_text(dataclasses.replace(second, timeout_seconds=0.0)))
    assert "released" in file.look()


@pytest.mark.parametrize("text", ["", "{}", "[]", "7", '{"id": 1, "owner": "a"}', "\udcff"])
def test_what_is_no_lock_is_none(text):
    assert from_text(Lock, text.encode(errors="surrogateescape")) is None

"""The files of a worker's board, and who they give it to; the time is passed by hand."""

import json

import pytest

from towers.workers import rendezvous
from towers.workers.rendezvous import DeviceInfo, Reservation, WorkerInfo
from towers.workers.server import Reservations

pytestmark = pytest.mark.unit
from_text, to_text = rendezvous.from_text, rendezvous.to_text

OFFER = WorkerInfo("1.0", "2.21.0", address="h:1", devices=(DeviceInfo("/gpu:0", "A100", 2**30),))


@pytest.mark.parametrize("notice", [OFFER, Reservation("a", "h", 3, "u", 2.0)])
def test_what_is_written_is_read_and_half_of_it_is_nothing(notice):
    text = to_text(notice)
    assert from_text(type(notice), text) == notice
    assert {from_text(type(notice), text[:end]) for end in range(len(text))} == {None}


def test_messages_are_understood_as_far_as_they_go_and_no_claim_keeps_a_worker_for_ever():
    assert to_text(None) == "{}" and from_text(Reservation, b"{}").id == ""
    newer = from_text(WorkerInfo, '{"towers": "0.9", "colour": "red"}')
    assert newer == WorkerInfo(towers="0.9")
    for text in "[]", "1", '{"pid": "x"}', '{"id": null}', b"\xff", "[" * 9999:
        assert from_text(Reservation, text) is None
    for seconds, then in (-1, 15), ("NaN", 15), ("Infinity", 15), (1e9, 3600):
        claim = from_text(Reservation, f'{{"id": "a", "timeout_seconds": {seconds}}}')
        assert claim.timeout_seconds == then


def test_files_that_are_no_claims_and_odd_names_of_strangers():
    assert rendezvous.reservation_id(rendezvous.reservation_file("a-1_b")) == "a-1_b"
    names = "claim.", "offer.json", "claim.a/b", "claim.ä"
    assert [rendezvous.reservation_id(name) for name in names] == [""] * 4
    assert "\n" not in str(Reservation("a", "h\n\x1b[31m", 1, "u" * 999))
    assert len(str(Reservation("a", "h", 1, "u" * 999))) < 120


def claim(folder, name, **values):
    text = json.dumps({"id": name, "user": name, "timeout_seconds": 10} | values)
    (folder / f"claim.{name}").write_text(text)


def given_to(folder):
    return from_text(Reservation, (folder / rendezvous.OWNER_FILE).read_bytes()).id


def test_the_first_whole_claim_has_it_until_it_says_so(tmp_path):
    reservations = Reservations(tmp_path, lambda: 0.0)
    (tmp_path / "claim.half").write_text('{"id":')
    claim(tmp_path, "gone", released=True)
    assert reservations.look() == "" and given_to(tmp_path) == ""
    claim(tmp_path, "half")
    assert reservations.look() == "" and given_to(tmp_path) == "half"
    claim(tmp_path, "another")  # which would come before it by name
    assert reservations.look() == "" and given_to(tmp_path) == "half"
    claim(tmp_path, "half", released=True)
    assert reservations.look() == "the program has released it"


def test_a_program_that_says_nothing_loses_it(tmp_path):
    now = 0
    reservations = Reservations(tmp_path, lambda: now)
    claim(tmp_path, "a")
    assert reservations.look() == ""
    now = 9
    (tmp_path / "claim.a").write_text("{")  # half of a sign of life is one
    assert reservations.look() == ""
    now = 18
    assert reservations.look() == ""
    now = 20
    assert reservations.look() == "no word from the program for 10 s"

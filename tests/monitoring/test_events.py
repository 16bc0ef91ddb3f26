"""Event files: every point once, whatever ended the process, and a size that is kept."""

import struct

import pytest
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from tests import tiny
from towers.monitoring import events
from towers.monitoring.event_writer import EventWriter

MIB = 2**20
picture = tiny.summary


def writer(folder, max_mib=200, say=pytest.fail):
    """Return a writer whose part "train" is `folder`."""
    return EventWriter(folder.parent, max_mib, say)


def write(folder, xs):
    """Write a file with the points {"a": x, "b/c": -x}; return its path."""
    before = set(folder.glob("*"))
    own = writer(folder)
    for x in xs:
        own.scalars("train", x, {"a": x, "b/c": -x})
    own.close()
    (path,) = set(folder.iterdir()) - before
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "train"


def xs_of(folder):
    return list(events.read(folder, {"a", "b/c"}))


def size(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_point_is_one_event_that_can_be_read_at_once(folder):
    own = writer(folder)
    own.scalars("train", 7, {"loss": 0.25, "rate": 2.0})
    assert events.read(folder, {"loss", "rate"}) == {7: {"loss": 0.25, "rate": 2.0}}  # not closed
    assert events.read(folder, {"rate"}) == {7: {"rate": 2.0}}
    assert events.read(folder, {"x"}) == events.read(folder / "none", {"rate"}) == {}
    own.close()


def test_what_a_continued_run_writes_anew_is_dropped(folder):
    write(folder, range(0, 100, 10))
    events.cut(folder, 40)
    assert [step for step, _ in tiny.records(folder)] == [0, 0, 10, 10, 20, 20, 30, 30]
    write(folder, range(40, 60, 10))
    assert xs_of(folder) == [0, 10, 20, 30, 40, 50]
    events.cut(folder, 35)  # into the older file; nothing is left of the newer one
    assert xs_of(folder) == [0, 10, 20, 30]
    assert len(list(folder.iterdir())) == 1
    events.cut(folder, 0)
    assert list(folder.iterdir()) == []
    events.cut(folder / "none", 0)


def test_a_file_that_ends_in_the_middle_of_a_record(folder):
    path = write(folder, [0, 10, 20])
    whole = path.read_bytes()
    *_, end, _ = [end for _, end in events.records(path)]
    for cut_at in range(end + 1, len(whole)):
        path.write_bytes(whole[:cut_at])
        assert xs_of(folder) == [0, 10]
    events.cut(folder, 100)
    assert path.stat().st_size == end
    write(folder, [20])
    assert xs_of(folder) == [0, 10, 20]


@pytest.mark.parametrize("block", [b"", bytes(4096), b"\xff" * 4096, "no event"])
def test_a_file_whose_end_was_never_written(folder, block):
    path = write(folder, [0, 10])
    good = path.read_bytes()
    if block == "no event":
        header = struct.pack("<Q", 4)
        block = header + struct.pack("<I", masked_crc32c(header)) + b"\xff" * 8
    path.write_bytes(good + block)  # as after a power failure
    events.cut(folder, 100)
    assert path.read_bytes() == good


def test_pictures_leave_room_for_curves_and_say_so_once(folder):
    lines = []
    own = writer(folder, 1, lines.append)
    for x in range(200):
        own.heavy("train", x, picture("picture", 20_000))
    shown = {x for x, _ in tiny.records(folder)}
    at_first = min(set(range(200)) - shown)
    assert 15 <= at_first <= 25 and max(shown) > at_first  # fewer and fewer, but some
    assert size(folder) < MIB / 2
    (line,) = lines
    assert "pictures" in line and "--max_event_mib=1" in line
    own.scalars("train", 1, {"a": 0.5})
    own.heavy("eval", 2, picture("picture", 20_000), last=True)  # may have what curves have
    assert xs_of(folder) == [1] and len(tiny.records(folder.with_name("eval"))) == 1
    own.close()
    own = writer(folder, 1, lines.append)  # the run is continued: what is there counts
    own.heavy("eval", 3, picture("picture", 50_000))
    own.close()
    assert len(tiny.records(folder.with_name("eval"))) == 1


def test_curves_never_pass_the_limit_and_none_is_starved(folder):
    """Of tags that take turns, a common count would always leave out the same."""
    lines = []
    own = writer(folder, 1 / 4, lines.append)
    for x in range(400):
        own.scalars("train", x, {"a": 1.0} | {f"loss/{i}": 1.0 for i in range(40)})
        if x % 3 == 0:
            own.scalars("train", x, {"accuracy": 0.5})
    own.close()
    assert size(folder) < MIB / 4
    xs = xs_of(folder)
    gaps = [after - before for before, after in zip(xs, xs[1:], strict=False)]
    assert gaps[0] == 1 and max(gaps) >= 4  # thinner towards the end
    assert xs[-1] > 300 and max(events.read(folder, {"accuracy"})) > 300
    assert len(lines) == 1 and "curves" in lines[0]

"""Event files: every point once, whatever ended the process, and a size that is kept."""

import pytest

from tests import tiny
from towers.monitoring import event_writer, events

MIB = 2**20
picture = tiny.summary


def writer(folder, max_bytes=200 * MIB, say=None):
    folder.mkdir(exist_ok=True)
    budget = event_writer.Budget([folder], max_bytes, say or (lambda line: pytest.fail(line)))
    return event_writer.Writer(folder, budget)


def write(folder, xs):
    """Write a file with the points {"a": x, "b/c": -x}; return its path."""
    before = set(folder.glob("*"))
    own = writer(folder)
    for x in xs:
        own.scalars(x, {"a": x, "b/c": -x})
    own.close()
    (path,) = set(folder.iterdir()) - before
    return path


def xs_of(folder):
    return list(events.read(folder, {"a", "b/c"}))


def size(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_point_is_one_event_that_can_be_read_at_once(tmp_path):
    own = writer(tmp_path)
    own.scalars(7, {"loss": 0.25, "rate": 2.0})
    assert events.read(tmp_path, {"loss", "rate"}) == {7: {"loss": 0.25, "rate": 2.0}}  # not closed
    assert events.read(tmp_path, {"rate"}) == {7: {"rate": 2.0}}
    assert events.read(tmp_path, {"x"}) == events.read(tmp_path / "none", {"rate"}) == {}
    own.close()


def test_what_a_continued_run_writes_anew_is_dropped(tmp_path):
    write(tmp_path, range(0, 100, 10))
    events.cut(tmp_path, 40)
    assert [step for step, _ in tiny.records(tmp_path)] == [0, 0, 10, 10, 20, 20, 30, 30]
    write(tmp_path, range(40, 60, 10))
    assert xs_of(tmp_path) == [0, 10, 20, 30, 40, 50]
    events.cut(tmp_path, 35)  # into the older file; nothing is left of the newer one
    assert xs_of(tmp_path) == [0, 10, 20, 30]
    assert len(list(tmp_path.iterdir())) == 1
    events.cut(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
    events.cut(tmp_path / "none", 0)


def test_nothing_to_drop_changes_no_byte(tmp_path):
    path = write(tmp_path, [0, 10])
    before = path.read_bytes(), path.stat().st_mtime_ns
    events.cut(tmp_path, 11)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_a_file_that_ends_in_the_middle_of_a_record(tmp_path):
    path = write(tmp_path, [0, 10, 20])
    whole = path.read_bytes()
    *_, end, _ = [end for _, end in events.records(path)]
    for cut_at in range(end + 1, len(whole)):
        path.write_bytes(whole[:cut_at])
        assert xs_of(tmp_path) == [0, 10]
    events.cut(tmp_path, 100)
    assert path.stat().st_size == end
    write(tmp_path, [20])
    assert xs_of(tmp_path) == [0, 10, 20]


@pytest.mark.parametrize("block", [bytes(4096), b"\xff" * 4096])
def test_a_file_whose_end_was_never_written(tmp_path, block):
    path = write(tmp_path, [0, 10])
    good = path.read_bytes()
    path.write_bytes(good + block)  # as after a power failure
    events.cut(tmp_path, 100)
    assert path.read_bytes() == good


def test_a_record_that_is_no_event_ends_a_file(tmp_path):
    path = write(tmp_path, [0, 10])
    good = path.read_bytes()
    *_, start, end = [end for _, end in events.records(path)]
    path.write_bytes(good[: start + 12] + b"\xff" * (end - start - 16) + good[end - 4 :])
    assert xs_of(tmp_path) == [0]


def test_pictures_leave_room_for_curves_and_say_so_once(tmp_path):
    lines = []
    own = writer(tmp_path, MIB, lines.append)
    written = [own.heavy(picture("picture", 20_000), i) for i in range(200)]
    at_first = written.index(False)
    assert 15 <= at_first <= 25  # three quarters of the half that is theirs
    assert sum(written[at_first:]) >= 2  # fewer and fewer, but some
    assert size(tmp_path) < MIB / 2
    assert len(lines) == 1
    assert "pictures" in lines[0] and "--max_event_mib=1" in lines[0]
    own.scalars(1, {"a": 0.5})
    assert xs_of(tmp_path) == [1]
    own.close()


def test_curves_never_pass_the_limit_and_none_is_starved(tmp_path):
    """Of tags that take turns, a common count would always leave out the same."""
    lines = []
    own = writer(tmp_path, MIB / 4, lines.append)
    for x in range(400):
        own.scalars(x, {"a": 1.0} | {f"loss/{i}": 1.0 for i in range(40)})
        if x % 3 == 0:
            own.scalars(x, {"accuracy": 0.5})
    own.close()
    assert size(tmp_path) < MIB / 4
    xs = xs_of(tmp_path)
    gaps = [after - before for before, after in zip(xs, xs[1:], strict=False)]
    assert gaps[0] == 1 and max(gaps) >= 4  # thinner towards the end
    assert xs[-1] > 300 and max(events.read(tmp_path, {"accuracy"})) > 300
    assert len(lines) == 1 and "curves" in lines[0]


def test_what_is_there_already_counts_and_the_last_may_have_what_is_left_for_curves(tmp_path):
    own = writer(tmp_path, MIB, lambda line: None)
    assert own.heavy(picture("picture", 450_000), 0) is True
    own.close()
    own = writer(tmp_path, MIB, lambda line: None)  # the run is continued
    assert own.heavy(picture("picture", 80_000), 1) is False
    assert own.heavy(picture("picture", 80_000), 1, last=True) is True
    own.close()

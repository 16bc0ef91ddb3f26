"""Event files: every point once, whatever ended the process, and a size that is kept."""

import pytest
import tensorflow as tf
from tensorboard.compat.proto.summary_pb2 import Summary

from towers.monitoring import events

MIB = 2**20


def writer(folder, max_bytes=200 * MIB, say=None):
    folder.mkdir(exist_ok=True)
    budget = events.Budget([folder], max_bytes, say or (lambda line: pytest.fail(line)))
    return events.Writer(folder, budget)


def write(folder, xs):
    """Write a file with the points {"a": x, "b/c": -x}."""
    own = writer(folder)
    for x in xs:
        own.scalars(x, {"a": x, "b/c": -x})
    own.close()


def points(folder, tags=None):
    return [(x, values) for x, _, values in events.read(folder, tags)]


def picture(num_bytes):
    summary = Summary()
    summary.value.add(tag="picture").tensor.string_val.append(bytes(num_bytes))
    return summary


def size(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_point_is_one_event_that_can_be_read_at_once(tmp_path):
    own = writer(tmp_path)
    own.scalars(7, {"loss": 0.25, "rate": 2.0})
    assert points(tmp_path) == [(7, {"loss": 0.25, "rate": 2.0})]  # not closed yet
    assert points(tmp_path, {"rate"}) == [(7, {"rate": 2.0})]
    assert points(tmp_path, {"x"}) == []
    own.close()


def test_what_a_continued_run_writes_anew_is_dropped(tmp_path):
    write(tmp_path, range(0, 100, 10))
    events.cut(tmp_path, 40)
    write(tmp_path, range(40, 60, 10))
    assert [x for x, _ in points(tmp_path)] == [0, 10, 20, 30, 40, 50]
    events.cut(tmp_path, 35)  # into the older file; nothing is left of the newer one
    assert [x for x, _ in points(tmp_path)] == [0, 10, 20, 30]
    assert len(list(tmp_path.iterdir())) == 1
    events.cut(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_drop_changes_no_byte(tmp_path):
    write(tmp_path, [0, 10])
    (path,) = tmp_path.iterdir()
    before = path.read_bytes(), path.stat().st_mtime_ns
    events.cut(tmp_path, 11)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_a_file_that_ends_in_the_middle_of_a_record(tmp_path):
    write(tmp_path, [0, 10, 20])
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    ends = [end for _, _, end in events._records(path)]
    for cut_at in range(ends[-2] + 1, len(whole)):
        path.write_bytes(whole[:cut_at])
        assert [x for x, _ in points(tmp_path)] == [0, 10]
    events.cut(tmp_path, 100)
    assert path.stat().st_size == ends[-2]
    write(tmp_path, [20])
    assert [x for x, _ in points(tmp_path)] == [0, 10, 20]


def test_a_file_whose_end_was_never_written(tmp_path):
    write(tmp_path, [0, 10])
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    path.write_bytes(good + bytes(4096))  # a block of zeros, as after a power failure
    events.cut(tmp_path, 100)
    assert path.read_bytes() == good


def test_tensorflow_reads_what_is_left(tmp_path):
    write(tmp_path, [0, 10, 20])
    events.cut(tmp_path, 15)
    (path,) = tmp_path.iterdir()
    found = [
        tf.compat.v1.Event.FromString(record.numpy())
        for record in tf.data.TFRecordDataset(str(path))
    ]
    assert [event.step for event in found if event.summary.value] == [0, 10]


def test_no_folder_is_an_empty_one(tmp_path):
    events.cut(tmp_path / "none", 0)
    assert points(tmp_path / "none") == []


def test_pictures_leave_room_for_curves_and_say_so_once(tmp_path):
    lines = []
    own = writer(tmp_path, MIB, lines.append)
    written = [own.heavy(picture(20_000), i) for i in range(200)]
    at_first = written.index(False)
    assert 15 <= at_first <= 25  # three quarters of the half that is theirs
    assert sum(written[at_first:]) >= 2  # fewer and fewer, but some
    assert size(tmp_path) < MIB / 2
    assert len(lines) == 1
    assert "pictures" in lines[0] and "--max_event_mib=1" in lines[0]
    own.scalars(1, {"loss": 0.5})
    assert (1, {"loss": 0.5}) in points(tmp_path)
    own.close()


def test_each_curve_is_thinned_and_none_starved(tmp_path):
    """Of tags that take turns, a common count would always leave out the same."""
    own = writer(tmp_path, MIB / 4, lambda line: None)
    for x in range(400):
        own.scalars(x, {f"loss/{i}": 1.0 for i in range(20)})
        if x % 3 == 0:
            own.scalars(x, {"accuracy": 0.5})
    own.close()
    last = {tag: x for x, values in points(tmp_path) for tag in values}
    assert last["accuracy"] > 300 and last["loss/0"] > 300


def test_the_last_pictures_may_have_what_is_left_for_curves(tmp_path):
    own = writer(tmp_path, MIB, lambda line: None)
    assert not own.heavy(picture(600_000), 1)
    assert own.heavy(picture(600_000), 2, last=True)
    own.close()


def test_a_file_that_holds_nothing_is_removed(tmp_path):
    write(tmp_path, [])
    assert len(list(tmp_path.iterdir())) == 1
    events.cut(tmp_path, 100)
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_is_no_event_ends_a_file(tmp_path):
    write(tmp_path, [0, 10])
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    start, _, end = list(events._records(path))[-1]
    path.write_bytes(good[: start + 12] + b"\xff" * (end - start - 16) + good[end - 4 :])
    assert [x for x, _ in points(tmp_path)] == [0]


def test_curves_never_pass_the_limit(tmp_path):
    lines = []
    own = writer(tmp_path, MIB / 4, lines.append)
    values = {f"tag_{i}": float(i) for i in range(60)}
    for x in range(300):
        own.scalars(x, values)
    own.close()
    xs = [x for x, _ in points(tmp_path)]
    assert size(tmp_path) < MIB / 4
    gaps = [after - before for before, after in zip(xs, xs[1:], strict=False)]
    assert gaps[0] == 1 and max(gaps) >= 4  # thinner towards the end
    assert len(lines) == 1 and "curves" in lines[0]


def test_what_is_there_already_counts(tmp_path):
    own = writer(tmp_path, MIB, lambda line: None)
    assert own.heavy(picture(450_000), 0) is True
    assert own.heavy(picture(600_000), 0) is False  # more than all pictures may have
    own.close()
    own = writer(tmp_path, MIB, lambda line: None)  # the run is continued
    assert own.heavy(picture(80_000), 1) is False
    own.close()

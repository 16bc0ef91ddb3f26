"""Event files: every point once, whatever ended the process, and a size that is kept."""

import os
import struct

import pytest
import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from tests import tiny
from towers.monitoring import events
from towers.monitoring.event_writer import EventWriter

pytestmark = pytest.mark.unit

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
        own.write_scalars("train", x, {"a": x, "b/c": -x})
    (path,) = set(folder.iterdir()) - before
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "train"


def xs_of(folder):
    return list(events.read(folder, {"a", "b/c"}))


def size(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_each_tower_is_a_run_of_its_own_with_the_tags_of_all(folder):
    own = writer(folder)
    files = len(os.listdir("/dev/fd"))
    for x in 0, 10:
        towers = {f"tower_{i}/loss": i / 8 for i in range(200)}
        own.write_scalars("train", x, {"loss": 0.25} | towers | {"gpu_3/power": 7.0})
    assert len(os.listdir("/dev/fd")) <= files  # of a thousand towers, too
    assert events.read(folder) == {x: {"loss": 0.25} for x in (0, 10)}
    assert events.read(folder / "tower_11") == {x: {"tower/loss": 11 / 8} for x in (0, 10)}
    own.write_scalars("train", 10, {"loss": 0.5, "rate": 2.0})
    assert events.read(folder, {"loss", "rate"})[10] == {"loss": 0.5, "rate": 2.0}  # not closed
    assert events.read(folder, {"rate"}) == {10: {"rate": 2.0}}
    assert events.read(folder, {"x"}) == events.read(folder / "none", {"rate"}) == {}
    events.cut(folder, 10)
    assert events.read(folder / "gpu_3") == {0: {"gpu/power": 7.0}}


@pytest.mark.graph
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


def test_a_file_whose_end_was_never_written(folder):
    path = write(folder, [0, 10, 20])
    whole = path.read_bytes()
    end = len(whole) - len(events.load(path)[-1].data)
    for cut_at in range(end + 1, len(whole)):
        path.write_bytes(whole[:cut_at])
        assert xs_of(folder) == [0, 10]
    header = struct.pack("<Q", 4)
    no_event = header + struct.pack("<I", masked_crc32c(header)) + b"\xff" * 8
    for block in whole[end:-1], b"", bytes(4096), b"\xff" * 4096, no_event:
        path.write_bytes(whole[:end] + block)  # as after a power failure
        events.cut(folder, 100)
        assert path.read_bytes() == whole[:end]
    write(folder, [20])
    assert xs_of(folder) == [0, 10, 20]


@pytest.mark.graph
def test_pictures_leave_room_for_curves_and_say_so_once(folder):
    lines = []
    own = writer(folder, 1, lines.append)
    for x in range(200):
        own.write_summary("train", x, picture("picture", 20_000))
    shown = {x for x, _ in tiny.records(folder)}
    at_first = min(set(range(200)) - shown)
    assert 15 <= at_first <= 25 and max(shown) > at_first  # fewer and fewer, but some
    assert size(folder) < MIB / 2
    (line,) = lines
    assert "pictures" in line and "--max_event_mib=1" in line
    own.write_scalars("train", 1, {"a": 0.5})
    own.write_summary("eval", 2, picture("picture", 20_000), last=True)  # may have what curves have
    assert xs_of(folder) == [1] and len(tiny.records(folder.with_name("eval"))) == 1
    own = writer(folder, 1, lines.append)  # the run is continued: what is there counts
    own.write_summary("eval", 3, picture("picture", 50_000))
    assert len(tiny.records(folder.with_name("eval"))) == 1


def test_curves_never_pass_the_limit_and_none_is_starved(folder):
    """Of tags that take turns, a common count would always leave out the same."""
    lines = []
    own = writer(folder, 1 / 4, lines.append)
    for x in range(400):
        own.write_scalars("train", x, {"a": 1.0} | {f"loss/{i}": 1.0 for i in range(40)})
        if x % 3 == 0:
            own.write_scalars("train", x, {"accuracy": 0.5})
    assert size(folder) < MIB / 4
    xs = xs_of(folder)
    gaps = [after - before for before, after in zip(xs, xs[1:], strict=False)]
    assert gaps[0] == 1 and max(gaps) >= 4  # thinner towards the end
    assert xs[-1] > 300 and max(events.read(folder, {"accuracy"})) > 300
    assert len(lines) == 1 and "curves" in lines[0]


def damaged(folder, path, content):
    """Return the points of a file with such bytes, and the lines that reading and cutting said."""
    path.write_bytes(content)
    read, cut = [], []
    points = events.read(folder, say=read.append)
    events.cut(folder, 1000, say=cut.append)
    assert len(read) == len(cut) <= 1
    if path.exists():
        assert events.read(folder, say=pytest.fail) == points  # the file is whole again
        tiny.records(folder)  # TensorFlow's own reader finds nothing wrong either
    return points, read


@pytest.mark.graph
def test_no_flipped_bit_changes_or_loses_a_point_in_silence_and_others_are_kept(folder):
    path = write(folder, range(0, 60, 10))
    good, expected = path.read_bytes(), events.read(folder)
    begin = sum(len(record.data) for record in events.load(path)[:-3])
    for place, xs in (begin + 40, [0, 10, 20, 40, 50]), (begin + 5, [0, 10, 20]):
        content = good[:place] + bytes(4) + good[place + 4 :]
        assert list(damaged(folder, path, content)[0]) == xs
    for place in range(0, len(good), 23):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        points, lines = damaged(folder, path, bad)
        assert points.items() <= expected.items()
        assert lines == [f"{path} is damaged: some of its points or pictures are lost"]
    assert damaged(folder, path, good) == (expected, [])


@pytest.mark.graph
def test_what_cannot_be_read_is_said(folder, monkeypatch):
    path = write(folder, [0, 10])
    (folder / "events.out.tfevents.1.folder").mkdir()
    (folder / "events.out.tfevents.2.link").symlink_to("missing")
    tensor = {"dtype": "DT_FLOAT", "float_val": [1.0]}
    own = write_events(folder, Event(step=-5, summary={"value": [{"tag": "a", "tensor": tensor}]}))
    assert xs_of(folder) == [0, 10]  # a point before the first step hides no others
    own.unlink()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    lines = []
    assert events.read(folder, say=lines.append) == {}
    events.cut(folder, 5, say=lines.append)
    assert [line.split(": ") for line in lines] == [
        [f"{path} cannot be read", "Permission denied"],
        [f"{path} cannot be cut back to step 5", "Permission denied"],
    ]


def write_events(folder, *found):
    """Write a file with these events; return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / "events.out.tfevents.9999999999.x"
    with tf.io.TFRecordWriter(str(path)) as file:
        for event in (Event(file_version="brain.Event:2"), *found):
            file.write(event.SerializeToString())
    return path


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "DT_INT32", "tensor_content": b"123"},
        {"dtype": "DT_INVALID"},
        {"dtype": "DT_RESOURCE", "float_val": [1.0, 2.0]},
        {"dtype": "DT_COMPLEX64", "scomplex_val": [1.0, 2.0]},
        {"dtype": "DT_FLOAT"},
        {"dtype": "DT_FLOAT", "float_val": [float("nan")]},
        {"dtype": "DT_STRING", "string_val": [b"a"]},
        {"dtype": "DT_HALF", "half_val": [2**31 - 1]},
        {"dtype": "DT_FLOAT", "tensor_shape": {"unknown_rank": True}},
    ],
)
def test_what_is_no_number_is_no_point(folder, tensor):
    summary = Summary(value=[{"tag": "a", "tensor": tensor}])
    write_events(folder, Event(step=1, summary=summary), Event(step=-1, summary=summary))
    assert events.read(folder).get(1, {}) in ({}, {"a": 0.0})

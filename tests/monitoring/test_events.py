"""Event files: after a resume each step is shown once."""

import os

import pytest

from tests.tensorboard_server import Server, read_scalars
from towers.monitoring import event_writer
from towers.monitoring.event_writer import EventWriter

pytestmark = pytest.mark.graph


def test_each_tower_is_a_run_of_its_own_with_the_tags_of_all(tmp_path):
    writer = EventWriter(tmp_path, say=pytest.fail)
    open_files = len(os.listdir("/dev/fd"))
    for step in 0, 10:
        towers = {f"tower_{i}/loss": i / 8 for i in range(200)}
        writer.write_scalars("train", step, {"loss": 0.25} | towers)
    assert len(os.listdir("/dev/fd")) <= open_files  # of a thousand towers, too
    train = tmp_path / "train"
    assert read_scalars(train) == {step: {"loss": 0.25} for step in (0, 10)}
    assert read_scalars(train / "tower_11") == {step: {"tower/loss": 11 / 8} for step in (0, 10)}
    assert read_scalars(train / "none") == {}


def session(folder, first, steps, value, towers):
    """Write what a process writes that goes on at step `first`, up to its crash."""
    writer = EventWriter(folder, first, say=pytest.fail)
    for step in steps:
        if step % 20 == 0:
            writer.write_scalars("eval", step, {"test/loss": value})
        own = {f"tower_{i}/loss": value for i in range(towers)}
        writer.write_scalars("train", step, {"loss": value} | own)


@pytest.fixture
def resumed(tmp_path):
    """A run that was killed after step 50, and again after 40; it then ran on one tower."""
    session(tmp_path, 0, range(0, 60, 10), 1.0, 2)
    session(tmp_path, 30, range(30, 50, 10), 2.0, 2)  # its evaluation at 20 was made before
    session(tmp_path, 40, range(40, 70, 10), 4.0, 1)
    return tmp_path


SHOWN = {
    ("train", "loss"): [1, 1, 1, 2, 4, 4, 4],
    ("train/tower_0", "tower/loss"): [1, 1, 1, 2, 4, 4, 4],
    ("train/tower_1", "tower/loss"): [1, 1, 1, 2],  # up to where it was there
}
EVALUATED = [(0, 1.0), (20, 1.0), (40, 4.0), (60, 4.0)]


def test_after_a_resume_the_page_shows_each_step_once(resumed):
    server = Server(resumed)
    for (run, tag), values in SHOWN.items():
        assert server.points(run, tag) == [(10 * i, value) for i, value in enumerate(values)]
    assert server.points("eval", "test/loss") == EVALUATED


def test_a_failure_to_write_is_told_once_and_costs_only_its_own_points(tmp_path, monkeypatch):
    said, write = [], event_writer.append

    def append(path, *events):
        if step in (2, 3):
            raise OSError(28, "No space left on device")
        write(path, *events)

    monkeypatch.setattr(event_writer, "append", append)
    writer = EventWriter(tmp_path, say=said.append)
    for step in range(6):
        writer.write_scalars("train", step, {"loss": step})
        if step == 4:  # somebody deletes the files
            for path in (tmp_path / "train").iterdir():
                path.unlink()
    assert [("train" in line, "No space left" in line) for line in said] == [(True, True)]
    assert list(read_scalars(tmp_path / "train")) == [5]

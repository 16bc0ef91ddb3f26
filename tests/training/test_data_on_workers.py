"""Towers on workers are given the same examples, whichever way these get there."""

import pytest
import tensorflow as tf

from tests import tiny, worker_processes
from tests.data import image_files
from tests.runs import released
from towers.devices import remote
from towers.errors import InputError, RunError
from towers.graphs.placement import read_placement
from towers.options.run import Options
from towers.training.run.tensorflow_errors import user_facing_errors
from towers.workers import cluster

pytestmark = pytest.mark.process
extended = pytest.mark.extended


@pytest.fixture(scope="module")
def two_workers(two_addresses):
    """Give the flags for two towers on each of two workers."""
    yield dict(workers=",".join(two_addresses), towers_per_worker=2, num_towers=0)
    if connected := remote.current_cluster():
        connected.close()


def generated():
    """Return data of the user's own code."""
    (x, y), test, num_classes = tiny.images()
    train = tf.data.Dataset.from_tensor_slices((x, y))
    return (train, len(y)), test, num_classes


def loop_of(batch_size=7, **given):
    options = tiny.options("unused", dtype="float64", batch_size=batch_size, **given)
    loop = tiny.Loop(options)
    loop.batches = iter(loop.run.batches(0, 0))
    return loop


def assert_same_numbers(two_workers, num_steps=3, over_workers=None, **given):
    """Return the loop over workers, after its numbers were found to be those of one device here."""
    over_workers = over_workers or loop_of(**two_workers, **given)
    here = loop_of(**given)
    assert over_workers(num_steps) == pytest.approx(here(num_steps), rel=1e-12)
    tiny.assert_close(over_workers.state(), here.state(), 1e-12)
    return over_workers


def sent(loop):
    """Return the bytes of each slice of the batch that a step of a new loop sends to a tower."""
    placement = read_placement(loop.loop, loop.batches, tf.constant(0))
    slices = ("/split/", "/GatherV2")
    return [t.bytes for t in placement.transfers if any(part in t.name for part in slices)]


RARE = {"accumulate_steps": 2}, {"validation_fraction": 0.2}, {"batch_size": 3}
MORE = released([{}, *RARE], {})


@pytest.mark.parametrize("given", MORE)
def test_of_arrays_rows_are_sent(two_workers, given):
    loop = assert_same_numbers(two_workers, **given)
    assert "sent to the workers once" in str(loop.run.on_towers)


def test_of_own_code_each_worker_is_sent_its_slices(two_workers):
    given = dict(dataset=f"{__name__}:generated")
    loop = loop_of(**two_workers, **given)
    assert loop.run.on_towers is None
    assert max(sent(loop)) == 2 * 8 * 8 * 3  # of a batch of 7 images, none whole
    assert_same_numbers(two_workers, over_workers=loop, **given)


@extended
def test_a_compiled_model_too(two_workers):
    given = dict(model="tests.tasks:images", dataset="tests.tasks:images_data", augment="auto")
    given |= dict(learning_rate=Options.learning_rate)
    assert_same_numbers(two_workers, **given)


@extended
def test_evaluation(two_workers):
    given = dict(ema_decay=0.9)
    found = [loop_of(**more, **given).run for more in (two_workers, {"num_towers": 4})]
    over_workers, here = (run.task.make_evaluator(run.data.test)() for run in found)
    assert over_workers.metrics == pytest.approx(here.metrics, rel=1e-12)
    assert over_workers.class_accuracy == here.class_accuracy


@pytest.fixture
def files(tmp_path):
    """Give the flags of images in files, which are below a folder."""
    for name, numbers in ("train", range(31)), ("test", range(40, 46)):
        image_files.write_folder(tmp_path, numbers, split=name)
    return {"dataset": "folder", "data_dir": str(tmp_path)}


@pytest.mark.parametrize("more", MORE)
def test_workers_read_their_own_files_from_any_step_on(two_workers, files, more):
    loop = assert_same_numbers(two_workers, 9, **files, **more)
    assert str(loop.run.on_towers).startswith("read by the workers from")
    if more:
        return
    kept = loop.state()
    loop(3)
    gone_on = loop.state()
    for name, variable in loop.train_state.variables().items():
        variable.assign(kept[name])
    loop.batches = iter(loop.run.batches(9, 9 * 7))
    loop(3)
    tiny.assert_identical(loop.state(), gone_on)


def test_devices_of_this_machine_are_not_asked_for_beside(two_workers):
    for given, remedy in [(dict(devices="cpu"), "--towers_per_worker"), (dict(num_towers=3), "=0")]:
        with pytest.raises(InputError, match=f"{next(iter(given))}.*{remedy}"):
            cluster.connect_run(tiny.options("unused", **two_workers | given))


@extended
def test_a_file_that_is_another_one_is_named_and_none_is_needed(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for split in "train", "test":
        for folder in (here, there):
            image_files.write_folder(folder / "images", range(9), split=split)
    monkeypatch.chdir(here)
    other = there / "images/train/cat/00004.png"
    other.write_bytes(image_files.png(image_files.image(5)))
    worker = worker_processes.Worker(folder=there)
    try:
        given = dict(workers=worker.ready().address, num_towers=0)
        given |= dict(dataset="folder", data_dir="images")
        with pytest.raises(InputError, match=f"{other} is another one on worker 0 "):
            loop_of(**given)
        other.unlink()
        loop = loop_of(**given)
        assert loop.run.on_towers is None
        loop(2)
        image_files.write_folder(there / "images", [4])
        loop = loop_of(**given)
        assert loop.run.on_towers
        other.write_bytes(b"GIF89a, or not")
        line = rf"{other} row \d, on worker 0 \({worker.address}\), is damaged"
        with pytest.raises(RunError, match=line), user_facing_errors(loop.run.options):
            loop(9)
    finally:
        remote.current_cluster().close()
        worker.close()

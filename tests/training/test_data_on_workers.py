"""Towers on workers are given the same examples, whichever way these get there."""

import pytest
import tensorflow as tf

from tests import tiny
from tests.data import image_files
from tests.runs import released
from towers.devices import remote
from towers.errors import InputError
from towers.graphs.placement import read_placement
from towers.options.run import Options
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


def assert_same_numbers(two_workers, num_steps=3, **given):
    """Return the loop over workers, after its numbers were found to be those of one machine."""
    over_workers = loop_of(**two_workers, **given)
    here = loop_of(num_towers=4, **given)
    assert over_workers(num_steps) == pytest.approx(here(num_steps), rel=1e-12)
    tiny.assert_close(over_workers.state(), here.state(), 1e-12)
    return over_workers


def sent(loop):
    """Return the bytes of each slice of the batch that a step sends to a tower; none is whole."""
    placement = read_placement(loop.run.train_loop(telemetry=False), loop.batches, tf.constant(0))
    slices = ("/split/", "/GatherV2")
    return [t.bytes for t in placement.transfers if any(part in t.name for part in slices)]


RARE = {"accumulate_steps": 2}, {"validation_fraction": 0.2}, {"batch_size": 3}
MORE = released([{}, *RARE], {})


@pytest.mark.parametrize("given", MORE)
def test_of_arrays_rows_are_sent(two_workers, given):
    loop = assert_same_numbers(two_workers, **given)
    assert "sent to the workers once" in str(loop.run.on_towers)


def test_of_own_code_each_worker_is_sent_its_slices(two_workers):
    loop = assert_same_numbers(two_workers, dataset=f"{__name__}:generated")
    assert loop.run.on_towers is None
    assert max(sent(loop)) == 2 * 8 * 8 * 3  # of a batch of 7 images


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


@extended
def test_images_in_files_are_read_by_the_program(two_workers, tmp_path):
    for name, numbers in ("train", range(31)), ("test", range(40, 46)):
        image_files.write_folder(tmp_path, numbers, split=name)
    loop = assert_same_numbers(two_workers, 9, dataset="folder", data_dir=str(tmp_path))
    assert loop.run.on_towers is None


def test_devices_of_this_machine_are_not_asked_for_beside(two_workers):
    for given, remedy in [(dict(devices="cpu"), "--towers_per_worker"), (dict(num_towers=3), "=0")]:
        with pytest.raises(InputError, match=f"{next(iter(given))}.*{remedy}"):
            cluster.connect_run(tiny.options("unused", **two_workers | given))

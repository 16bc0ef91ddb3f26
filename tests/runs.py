"""What tests of whole runs share: the command line, what happens at a step, what a run left."""

import contextlib
import json
import os
import resource
import threading

import pytest

from tests import tiny
from towers import cli
from towers.errors import InputError
from towers.monitoring.monitor import Monitor
from towers.options.run import Options
from towers.training.load import TrainedModel
from towers.training.run import checkpoint

# What towers leave out where all ops are deterministic: seconds of a step.
by_the_clock = pytest.mark.skipif(
    os.environ.get("TF_DETERMINISTIC_OPS") in ("1", "true"), reason="deterministic ops: no clock"
)


def rare(*values):
    """Return a parameter that is left to `scripts/test --all`."""
    return pytest.param(*values, marks=pytest.mark.extended)


def released(values, *names):
    """Return parameters of which those with other names are left to `scripts/test --all`."""
    marks = {True: [], False: [pytest.mark.extended]}
    return [pytest.param(v, marks=marks[v in names], id=str(v)) for v in values]


def command(capsys, *argv):
    """Return the exit code, standard output and standard error of a command line."""
    capsys.readouterr()
    code = cli.main([str(word) for word in argv])
    return code, *capsys.readouterr()


def done(capsys, verb, train_dir, *flags):
    """Return what a command about a run prints, which is to succeed."""
    code, out, err = command(capsys, verb, f"--train_dir={train_dir}", *flags)
    assert code == 0, err
    return out


def refusal(call, *arguments, **keywords):
    """Return the one line with which a call refuses what it is given."""
    with pytest.raises(InputError) as error:
        call(*arguments, **keywords)
    message = str(error.value)
    assert message == " ".join(message.splitlines())
    return message


def at_step(monkeypatch, actions):
    """Let each action of {step: action} be done once, when at least so many steps are made."""
    real = Monitor.after_step

    def after_step(monitor, step, *values):
        real(monitor, step, *values)
        for number in [number for number in actions if number <= step]:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":  # the save before is to be over
                    thread.join()
            actions.pop(number)()

    monkeypatch.setattr(Monitor, "after_step", after_step)


@contextlib.contextmanager
def small_disk():
    """Give a function that lets no file grow beyond a size; without one, it ends that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes=soft):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

    try:
        yield limit
    finally:
        limit()


def forget_after(train_dir, step):
    """Leave a run's folder as a kill after `step` steps, and before the next checkpoint, would."""
    (train_dir / "result.json").unlink()
    for number, prefix in checkpoint.find(train_dir / "checkpoints"):
        if number > step:
            for path in (train_dir / "checkpoints").glob(f"{prefix.rpartition('/')[2]}.*"):
                path.unlink()


def result_of(folder):
    return json.loads((folder / "result.json").read_text())


def points(folder, tag="loss/total"):
    return [(step, value) for step, name, value in tiny.events(folder) if name == tag]


def assert_has(model, train_dir, step=None, averages=False):
    """Compare the variables of a model with those in a checkpoint, bit for bit."""
    saved = tiny.saved(train_dir, step)
    kind = "average" if averages else "model"
    found = {v.path: v.numpy() for v in model.variables}
    names = {path: path.replace("/", ".S") for path in found}
    of_kind = {p: saved.get(f"{kind}.S{n}", saved[f"model.S{n}"]) for p, n in names.items()}
    tiny.assert_identical(found, of_kind)


def as_trained(model, *spec, **task):
    """Return a model as if it were that of a run on such examples."""
    about = dict(num_classes=0, class_names=[], image_shape=None, augment="none", spec=list(spec))
    return TrainedModel(Options(batch_size=4, num_towers=2), about | task, model, 5, False)

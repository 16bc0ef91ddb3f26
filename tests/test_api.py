"""Training from Python: functions and data as they are, several runs in a process, notebooks."""

import asyncio
import contextlib
import functools
import gc
import io
import os
import random
import re
import shutil
import signal
import textwrap
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import runs, tiny
from tests.programs import ROOT, python
from towers import cli
from towers.monitoring.monitor import Monitor

pytestmark = pytest.mark.run

SMALL = dict(
    augment="standardize", schedule="constant", batch_size=7, max_steps=4, evaluate_every_epochs=0
)


def build(num_classes, image_shape):
    return tiny.dense(num_classes, image_shape)


def handlers():
    return [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]


def train(folder, **fields):
    """Train with functions that no import finds."""
    fields = dict(model=lambda **given: build(**given), dataset=tiny.images()) | SMALL | fields
    return towers.train(train_dir=folder, **fields)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Return a run of functions and data, trained in a thread, and its result."""
    folder, before, results = tmp_path_factory.mktemp("api") / "given", handlers(), []
    thread = threading.Thread(target=lambda: results.append(train(folder)))
    with contextlib.redirect_stdout(io.StringIO()):
        thread.start()
        thread.join()
    assert handlers() == before
    return folder, results[0]


def test_functions_and_data_train_as_their_names_do_and_a_thread_as_the_main_thread(
    given, tmp_path, capsys
):
    folder, result = given
    keras.layers.Dense(1)  # which Keras counts; the names are those of a new process
    options = tiny.options(tmp_path, **{**SMALL, "max_steps": 9}, learning_rate=0.05)
    other = towers.train(options, max_steps=4)  # a field changes options
    for found in result, other:
        assert found["steps"] == 4 and found["test_examples"] == 23
    tiny.assert_identical(tiny.saved(folder), tiny.saved(tmp_path))
    figures = towers.evaluate(options, say=lambda line: None, num_towers=2)
    assert figures["accuracy"] == result["test_accuracy"] and figures["num_towers"] == 2


def test_loss_metrics_and_optimizer_may_be_functions_and_are_loaded_with_the_model(tmp_path):
    def squared(true, found):
        return keras.ops.mean((true - found) ** 2, axis=-1)

    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    given = dict(
        model=lambda: keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]),
        dataset={"train": (x[:40], x[:40, :1]), "test": (x[40:], x[40:, :1])},
        loss=squared,
        metrics=["mse", squared, keras.metrics.RootMeanSquaredError(name="root")],
        optimizer=lambda: keras.optimizers.Adam(0.01),
    )
    result = towers.train(train_dir=tmp_path, batch_size=7, max_steps=3, num_towers=2, **given)
    assert result["test_loss"] == pytest.approx(result["test_mse"])
    assert result["test_loss"] == pytest.approx(result["test_squared"])
    assert result["test_loss"] == pytest.approx(result["test_root"] ** 2, rel=1e-5)
    model = towers.load(tmp_path, model=given["model"])
    assert not model.compiled
    runs.assert_has(model, tmp_path)
    with pytest.raises(towers.InputError, match="pass it to this call"):
        towers.load(tmp_path)


def test_what_flags_cfg_cannot_name_is_given_again(given, tmp_path, capsys):
    run = f"--train_dir={shutil.copytree(given[0], tmp_path / 'run')}"
    with pytest.raises(towers.InputError, match="pass it to this call, too, as dataset="):
        towers.evaluate(train_dir=given[0], model=build)
    capsys.readouterr()
    assert cli.main(["evaluate", run]) == 2
    assert capsys.readouterr().err == (
        "towers: --model=given_in_python:lambda was defined in Python; pass it to this call, "
        "too, as model=..., or name it as module:function\n"
    )
    names = ["--dataset=tests.tiny:images", "--model=tests.tiny:dense"]
    assert cli.main(["evaluate", run, *names]) == 0
    assert cli.main(["train", run, "--max_steps=5", *names]) == 0
    with pytest.raises(towers.InputError, match="belongs to another run: --model="):
        towers.train(train_dir=tmp_path / "run", model=tiny.cnn)


@pytest.mark.unit
def test_bad_input_is_one_line(tmp_path):
    tf.constant(1)  # too late for more CPU devices
    said = runs.refusal(train, tmp_path / "run", num_towers=7, variables="replicated")
    assert said.endswith("towers.devices.tower_devices(7) before anything creates a tensor")
    refusal = functools.partial(runs.refusal, towers.train, train_dir=tmp_path / "run")
    meant = "there is no option learnin_rate; did you mean learning_rate?"
    assert refusal(learnin_rate=0.1) == meant
    builder = "pass the function that builds it, such as model="
    assert builder in refusal(model=build(3, (8, 8, 3)))  # which is built once
    assert "optimizer=lambda: keras.optimizers.Adam(" in refusal(optimizer=keras.optimizers.Adam())
    x, y = np.zeros([9, 8, 8, 3]), np.arange(9) / 2
    assert "y.astype('int32')" in refusal(model=build, dataset=lambda: ((x, y), (x, y)))
    assert "there is no run; train first" in runs.refusal(towers.evaluate, train_dir=tmp_path)
    assert "run's folder as train_dir=" in runs.refusal(towers.evaluate, str(tmp_path))
    assert not list(tmp_path.iterdir())


# In a program.


def test_an_interrupt_saves_and_the_same_cell_goes_on(tmp_path, capsys, monkeypatch):
    """Cells are run in the main thread, while a loop of asyncio is running."""
    cell, names = "stopped = train(folder, max_steps=100)", {"train": train, "folder": tmp_path}

    def after_step(*_):
        os.kill(os.getpid(), signal.SIGINT)

    async def kernel():
        before = handlers()
        exec(cell, names)
        assert handlers() == before
        await asyncio.sleep(0)

    with monkeypatch.context() as patch:
        patch.setattr(Monitor, "after_step", after_step)
        asyncio.run(kernel())
    assert names["stopped"] is None
    step = max(tiny.saved_steps(tmp_path))
    assert 0 < step < 100
    assert train(tmp_path, max_steps=step + 2)["steps"] == step + 2
    assert f"continuing  {tmp_path} at step {step} of" in capsys.readouterr().out


def test_runs_leave_the_program_as_it_was(tmp_path, capfd):
    """Of several precisions and numbers of towers, one after the other; also one that fails."""
    models, draws = [], set()

    def keeping(num_classes, image_shape):
        model = build(num_classes, image_shape)
        models.append(weakref.ref(model))
        return model

    def failing(num_classes, image_shape):
        raise RuntimeError("theirs")

    def random_states():
        return random.getstate(), np.random.get_state()[1].tolist()

    before = keras.config.dtype_policy().name, keras.config.floatx(), handlers()
    for num_towers, dtype in enumerate(("float64", "mixed_bfloat16"), start=1):
        states = random_states()
        train(tmp_path / dtype, model=keeping, dtype=dtype, num_towers=num_towers)
        assert random_states() == states
        draws.add(np.random.rand())
    with pytest.raises(RuntimeError, match="theirs"):
        train(tmp_path / "failed", model=failing, dtype="float64")
    assert (keras.config.dtype_policy().name, keras.config.floatx(), handlers()) == before
    assert len(draws) == 2  # else each run's split would be that of the one before
    gc.collect()
    assert len(models) == 2 and not any(model() for model in models)
    assert "retracing" not in capfd.readouterr().err
    train(tmp_path / "failed", max_steps=1)  # nobody holds the folder


# The page.


PAGE = (ROOT / "towers/README.md").read_text(encoding="utf-8")
CALLED = [name for name in towers.__all__ if name not in ("callbacks", "devices")]


@pytest.mark.unit
def test_the_page_has_every_public_name_with_an_example():
    sections = re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    shown = {name for title, text in sections if "```python" in text for name in title.split(", ")}
    assert set(towers.__all__) <= shown


def examples(name):
    """Return the indented paragraphs of a docstring before its Args."""
    parts = getattr(towers, name).__doc__.partition("\n    Args:")[0].rstrip().split("\n\n")
    parts = [part for part in parts if all(line.startswith(" " * 8) for line in part.splitlines())]
    return "".join(textwrap.dedent(part) + "\n" for part in parts)


@pytest.mark.process
def test_the_page_and_the_docstrings_run_in_a_new_process(tmp_path):
    cells = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    of_names = {name: examples(name) for name in CALLED if not name.endswith("Error")}
    assert all(of_names.values()), of_names
    (tmp_path / "my_net.py").write_text("from tests.tiny import dense as build\n")
    named = "from my_net import build\nmodel = regression\n"
    fresh = f"import shutil\nshutil.rmtree('runs/mine')\n{named}{of_names.pop('train')}"
    docs = [fresh, *(named + text for text in of_names.values())]
    program = "\n".join([*cells, *docs, "print('all of it')\n"])
    (tmp_path / "program.py").write_text(program)
    done = python("program.py", cwd=tmp_path, variables={"CUDA_VISIBLE_DEVICES": "-1"})
    assert done.stdout.endswith("all of it\n"), done.stderr
    assert not re.search(r"^W\d{4}.*", done.stderr, re.M), done.stderr  # of TensorFlow's
    assert "did you mean learning_rate?" in done.stdout
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"fit", "mine", "wide"}

"""Training from Python: functions and data as they are, several runs in a process, notebooks."""

import asyncio
import gc
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest

import towers
from tests import tiny
from tests.workers import workers
from towers import cli
from towers.monitoring.monitor import Monitor

ROOT = Path(__file__).resolve().parent.parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
SMALL = dict(
    augment="none", schedule="constant", batch_size=7, max_steps=4, evaluate_every_epochs=0
)


def build(num_classes, image_shape):
    return tiny.dense(num_classes, image_shape)


def data():
    return tiny.arrays(60), tiny.arrays(23, seed=1), 3


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def train(folder, **fields):
    """Train with functions that no import finds."""
    fields = dict(model=lambda **given: build(**given), dataset=data()) | SMALL | fields
    return towers.train(train_dir=folder, **fields)


def test_functions_and_data_train_as_their_names_do(tmp_path):
    by_name = dict(model="tests.tiny:dense", dataset="tests.tiny:images")
    results = [train(tmp_path / "given"), train(tmp_path / "named", **by_name)]
    for result in results:
        assert result["steps"] == 4 and result["test_examples"] == 23
    tiny.assert_identical(tiny.saved(tmp_path / "given"), tiny.saved(tmp_path / "named"))
    figures = towers.evaluate(train_dir=tmp_path / "named", say=lambda line: None)
    assert figures["accuracy"] == results[1]["test_accuracy"]


def test_loss_metrics_and_optimizer_may_be_functions(tmp_path):
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


def test_a_call_that_is_made_again_finds_it_finished_and_more_steps_continue_it(tmp_path, capsys):
    first, again = train(tmp_path), train(tmp_path)
    assert first == again and "finished " in capsys.readouterr().out
    given = dict(model=lambda **given: build(**given), dataset=data())
    more = towers.train(train_dir=tmp_path, max_steps=6, **given)  # the rest as in flags.cfg
    assert more["steps"] == 6 and more["batch_size"] == 7
    train(tmp_path / "whole", max_steps=6)
    tiny.assert_identical(tiny.saved(tmp_path), tiny.saved(tmp_path / "whole"))


def test_what_flags_cfg_cannot_name_is_given_again(tmp_path, capsys):
    train(tmp_path)
    with pytest.raises(towers.InputError, match="give it again there, as dataset="):
        towers.evaluate(train_dir=tmp_path, model=build)
    capsys.readouterr()
    assert cli.main(["evaluate", f"--train_dir={tmp_path}"]) == 2
    assert capsys.readouterr().err == (
        "towers: --model=given_in_python:lambda was given in Python: give it again there, as "
        "model=..., or name it as module:function\n"
    )
    names = ["--dataset=tests.tiny:images", "--model=tests.tiny:dense"]
    assert cli.main(["evaluate", f"--train_dir={tmp_path}", *names]) == 0
    assert cli.main(["train", f"--train_dir={tmp_path}", "--max_steps=5", *names]) == 0
    with pytest.raises(towers.InputError, match="goes on with it; for another run name another"):
        towers.train(train_dir=tmp_path, model=data)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(learnin_rate=0.1), "there is no flag --learnin_rate; did you mean --learning_rate?"),
        (dict(model=5), "model=5: a string is needed"),
        (dict(batch_size=0), "--batch_size=0: a whole number of at least 1 is needed"),
    ],
)
def test_bad_input_is_one_line(tmp_path, fields, message):
    with pytest.raises(towers.InputError) as error:
        towers.train(train_dir=tmp_path / "run", **fields)
    assert str(error.value) == message
    assert not (tmp_path / "run").exists()


def test_what_is_built_once_is_refused(tmp_path):
    with pytest.raises(towers.InputError, match="give the function that builds it, such as model="):
        towers.train(train_dir=tmp_path, model=build(3, (8, 8, 3)))
    with pytest.raises(towers.InputError, match=r"optimizer=lambda: keras.optimizers.Adam\("):
        towers.train(train_dir=tmp_path, optimizer=keras.optimizers.Adam())


def test_evaluate_needs_a_run(tmp_path):
    with pytest.raises(towers.InputError, match="there is no run; train first"):
        towers.evaluate(train_dir=tmp_path)


def test_fields_change_options(tmp_path):
    options = tiny.options(tmp_path, max_steps=9)
    assert towers.train(options, max_steps=3)["steps"] == 3
    assert towers.evaluate(options, say=lambda line: None, num_towers=2)["num_towers"] == 2


# ---------------------------------------------------------------------------- In a program


def test_an_interrupt_saves_and_the_same_cell_goes_on(tmp_path, capsys, monkeypatch):
    """Cells are run in the main thread, while a loop of asyncio is running."""
    cell, names = "stopped = train(folder, max_steps=100)", {"train": train, "folder": tmp_path}

    def progress(monitor, step, values):
        os.kill(os.getpid(), signal.SIGINT)

    async def kernel():
        before = handlers()
        exec(cell, names)
        assert handlers() == before
        await asyncio.sleep(0)

    with monkeypatch.context() as patch:
        patch.setattr(Monitor, "progress", progress)
        asyncio.run(kernel())
    assert names["stopped"] is None
    step = max(tiny.saved_steps(tmp_path))
    assert 0 < step < 100
    assert train(tmp_path, max_steps=step + 2)["steps"] == step + 2
    assert f"continuing  {tmp_path} at step {step} of" in capsys.readouterr().out


def test_a_notebook_has_a_bar(tmp_path, capsys, monkeypatch):
    train(tmp_path / "program")
    assert "4/4" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    train(tmp_path / "notebook")
    assert "4/4" in capsys.readouterr().err


def test_a_thread_trains_as_the_main_thread_does(tmp_path, capsys):
    before, results = handlers(), []
    thread = threading.Thread(target=lambda: results.append(train(tmp_path / "thread")))
    thread.start()
    thread.join()
    assert results[0]["steps"] == 4 and handlers() == before
    assert "USR2" not in capsys.readouterr().out  # it would end the program
    train(tmp_path / "main")
    tiny.assert_identical(tiny.saved(tmp_path / "thread"), tiny.saved(tmp_path / "main"))


def test_a_function_that_is_defined_again_is_the_one_that_counts(tmp_path):
    cell = "def build(num_classes, image_shape):\n    return dense(num_classes, image_shape, {})\n"
    names = {"dense": tiny.dense, "__name__": "__main__"}
    for width in (3, 4):
        exec(cell.format(width), names)
        train(tmp_path / str(width), model=names["build"])
        shapes = {value.shape for value in tiny.saved(tmp_path / str(width)).values()}
        assert (192, width) in shapes


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist()


def test_runs_leave_the_program_as_it_was(tmp_path, capfd):
    """Of several precisions and numbers of towers, one after the other; also one that fails."""
    models, draws = [], set()

    def keeping(num_classes, image_shape):
        model = tiny.cnn(num_classes, image_shape)
        models.append(weakref.ref(model))
        return model

    def failing(num_classes, image_shape):
        raise RuntimeError("theirs")

    before = keras.config.dtype_policy().name, keras.config.floatx(), handlers()
    for i, dtype in enumerate(("float64", "mixed_bfloat16", "float32", "float64", "float32")):
        states = random_states()
        train(tmp_path / str(i), model=keeping, dtype=dtype, num_towers=1 + i % 3)
        assert random_states() == states
        draws.add(np.random.rand())
    with pytest.raises(RuntimeError, match="theirs"):
        train(tmp_path / "failed", model=failing, dtype="float64")
    assert (keras.config.dtype_policy().name, keras.config.floatx(), handlers()) == before
    assert len(draws) == 5  # else each run's split would be that of the one before
    gc.collect()
    assert len(models) == 5 and not any(model() for model in models)
    assert "retracing" not in capfd.readouterr().err
    train(tmp_path / "failed", model=keeping)  # nobody holds the folder


def test_names_are_those_of_a_new_process(tmp_path):
    for folder in ("one", "two"):
        keras.layers.Dense(1)  # which Keras counts
        train(tmp_path / folder)
    assert tiny.saved(tmp_path / "one").keys() == tiny.saved(tmp_path / "two").keys()


@pytest.mark.slow
def test_what_comes_too_late_says_what_comes_first():
    program = (
        "import tensorflow as tf, towers\n"
        "tf.constant(1)\n"
        "try:\n    towers.train(num_towers=3)\n"
        "except towers.InputError as error:\n    print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout.endswith(
        "call towers.devices.tower_devices(3) before anything creates a tensor, as a model's "
        "weights are; in a notebook restart the kernel, and call it in its first cell\n"
    ), done.stderr


# ---------------------------------------------------------------------------- The page


PAGE = (ROOT / "towers/README.md").read_text(encoding="utf-8")
CALLED = [name for name in towers.__all__ if name not in ("callbacks", "devices")]


def test_the_page_has_every_public_name_with_an_example():
    sections = re.findall(r"^## (.*?)$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    shown = {name for title, text in sections if "```python" in text for name in title.split(", ")}
    assert set(towers.__all__) <= shown


def examples(name):
    """Return the indented paragraphs of a docstring before its Args."""
    parts = getattr(towers, name).__doc__.partition("\n    Args:")[0].rstrip().split("\n\n")
    parts = [part for part in parts if all(line.startswith(" " * 8) for line in part.splitlines())]
    return "".join(textwrap.dedent(part) + "\n" for part in parts)


@pytest.mark.slow
def test_the_page_and_the_docstrings_run_in_a_new_process(tmp_path):
    cells = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    of_names = {name: examples(name) for name in CALLED if not name.endswith("Error")}
    assert all(of_names.values()), of_names
    (tmp_path / "my_net.py").write_text("from tests.tiny import dense as build\n")
    named = "from my_net import build\nmodel = regression\n"
    fresh = f"import shutil\nshutil.rmtree('runs/mine')\n{named}{of_names.pop('train')}"
    docs = [fresh, *(named + text for text in of_names.values())]
    (tmp_path / "program.py").write_text("\n".join([*cells, *docs, "print('all of it')\n"]))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    with workers(2) as addresses:
        program = (tmp_path / "program.py").read_text()
        for name, address in zip(("host1:2222", "host2:2222"), addresses, strict=True):
            program = program.replace(name, address)
        (tmp_path / "program.py").write_text(program)
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment,
        )
    assert done.stdout.endswith("all of it\n"), done.stderr
    assert "did you mean --learning_rate?" in done.stdout
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"fit", "mine", "wide"}

"""Settings of TensorFlow and Keras that would end a program without a word are told in a line."""

import sys
from types import SimpleNamespace

import pytest

from tests import runs
from tests.programs import python
from towers.options import environment

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "name, wrong, right",
    [
        ("TF_DETERMINISTIC_OPS", ["maybe", "", "2"], ["0", "True"]),
        ("TF_NUM_INTRAOP_THREADS", ["-1"], ["0", "4", ""]),
        ("TF_MKL_ALLOC_MAX_BYTES", ["x", "-1"], ["1000"]),
        ("TF_ENABLED_DEVICE_TYPES", ["GPU"], ["CPU,GPU", ""]),
        ("TF_PLUGGABLE_DEVICE_LIBRARY_PATH", ["missing"], ["."]),
        ("AUTOGRAPH_VERBOSITY", ["x"], ["3"]),
        ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", ["x"], ["python"]),
    ],
)
def test_values_with_which_tensorflow_ends_are_refused(monkeypatch, name, wrong, right):
    for value in wrong:
        monkeypatch.setenv(name, value)
        assert runs.refusal(environment.check).startswith(f"{name}={value} ")
    for value in right:
        monkeypatch.setenv(name, value)
        environment.check()


def test_another_backend_of_keras_is_named_with_what_to_type(folder, monkeypatch):
    (folder / "keras.json").write_text('{"backend": "torch"}')
    monkeypatch.setenv("KERAS_HOME", str(folder))
    environment.check()  # what is imported counts
    jax = SimpleNamespace(config=SimpleNamespace(backend=lambda: "jax"))
    for module, variable, backend in (
        (jax, "tensorflow", "jax"), (None, "", f"torch in {folder}/keras.json"),
        (None, "jaks", "jaks"), (None, "tensorflow", ""),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, "keras", module)
        monkeypatch.setenv("KERAS_BACKEND", variable)
        if backend:
            message = runs.refusal(environment.check)
            assert message.startswith(f"the backend of Keras is {backend}, but towers needs")
            assert "type KERAS_BACKEND=tensorflow" in message
        else:
            environment.check()


EACH_NAME = """
import sys, towers
for package, names in (towers, towers.__all__), (towers.devices, towers.devices.__all__):
    for name in {*names} - {"InputError", "Options", "RunError", "devices"}:
        try:
            getattr(package, name)
        except towers.InputError as error:
            assert "KERAS_BACKEND=tensorflow" in str(error), error
        else:
            sys.exit(f"{name} was loaded")
assert not {"keras", "tensorflow"} & set(sys.modules)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "argv, variables, says",
    [
        (["-c", EACH_NAME], {"KERAS_BACKEND": "jax"}, None),
        (["-m", "towers", "export"], {"KERAS_BACKEND": "jax"}, "the backend of Keras is jax, "),
        (["-m", "towers", "sweep", "--vary=seed:1"], {"KERAS_BACKEND": "jax"}, "the backend of "),
        (["-m", "towers", "train"], {"KERAS_HOME": "list"}, "correct or remove list/keras.json"),
        (["-m", "towers", "train"], {"KERAS_MAX_EPOCHS": "x"}, "'x'; correct or remove "),
        (["-m", "towers", "train"], {"TF_XLA_FLAGS": "--x"}, "TF_XLA_FLAGS=--x: Unknown flag in "),
    ],
)  # fmt: skip
def test_where_one_enters(folder, argv, variables, says):
    (folder / "list").mkdir()
    (folder / "list/keras.json").write_text("[]")
    (folder / "runs/train/checkpoints").mkdir(parents=True)
    done = python(*argv, cwd=folder, variables=variables)
    assert done.returncode == (2 if says else 0), done.stderr
    if says:
        assert says in done.stderr and done.stderr.count("\n") == 1

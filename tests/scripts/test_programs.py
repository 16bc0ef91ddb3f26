"""scripts/programs and scripts/examples: programs that train in plain Keras, and over towers."""

import numpy as np
import pytest

from tests.programs import ROOT, python, script

PROGRAM = """
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(7, 5))
model = keras.Sequential([keras.layers.Dense(4), {}, keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(x, x[:, :1], batch_size=4, epochs=3)
"""
MIXED = "keras.layers.Lambda(lambda x: x - keras.ops.mean(x, 0))"


@pytest.fixture(scope="module")
def programs():
    return script("programs")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("other", "differs"),
    [
        ([[np.array([1.0, 2.0])], [np.array(3)]], 0.0),
        ([[np.array([1.0, 4.0])], [np.array(3)]], 1.0),
        ([[np.array([1.0, np.nan])], [np.array(3)]], np.inf),
        ([[np.array([1.0, 2.0])]], np.inf),
        ([[np.array([[1.0, 2.0]])], [np.array(3)]], np.inf),
    ],
    ids=["same", "differs", "no number", "a call less", "another shape"],
)
def test_what_differs_between_the_ends_of_two_runs(programs, other, differs):
    one = [[np.array([1.0, 2.0])], [np.array(3)]]
    assert programs.largest_difference(one, other) == differs


@pytest.mark.unit
def test_weights_that_are_zero_but_for_rounding_are_alike(programs):
    one, other = [[np.array([3e-17, 1.0])]], [[np.array([-5e-18, 1.0])]]
    assert programs.largest_difference(one, other) == 0
    assert programs.largest_difference([[np.array([2e-9])]], [[np.array([1e-9])]]) == 0.5


@pytest.mark.unit
@pytest.mark.parametrize(("loss", "kept"), [(0.5, 3e-11), (np.nan, 3e-11), (1e5, 0.0)])
def test_what_is_but_rounding_is_measured_by_the_loss(programs, loss, kept):
    weights, steps = np.array([3e-11, 1.0]), np.array(3)
    figures, *variables = programs.end_of([np.array([loss])], [weights, steps])
    np.testing.assert_array_equal(figures, [loss])
    np.testing.assert_array_equal(variables[0], [kept, 1.0])
    assert variables[1] == 3


@pytest.mark.process
@pytest.mark.extended
@pytest.mark.timeout(300)
def test_programs_are_run_plainly_and_over_towers(tmp_path):
    (tmp_path / "alike.py").write_text(PROGRAM.format("keras.layers.Dropout(0.3)"))
    (tmp_path / "mixed.py").write_text(PROGRAM.format(MIXED))
    (tmp_path / "broken.py").write_text("raise ValueError('of its own')")
    (tmp_path / "nothing.py").write_text("")
    done = python("scripts/programs", tmp_path, "--num_towers=3")
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert found["alike.py"].startswith("same ")
    assert found["mixed.py"].startswith("differs, told") and "mixed examples" in found["mixed.py"]
    assert "plain Keras fails: ValueError: of its own" in found["broken.py"]
    assert found["nothing.py"] == "calls no fit"
    assert done.returncode == 0


# scripts/examples; that they have plain Keras' numbers is in test_parallel.

EXAMPLES = ["images", "pairs", "segmentation", "table", "text", "two_outputs"]


@pytest.mark.unit
def test_there_are_six():
    assert sorted(path.stem for path in (ROOT / "scripts/examples").glob("*.py")) == EXAMPLES


@pytest.mark.process
@pytest.mark.extended
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_program_runs(name):
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    done = python(f"scripts/examples/{name}.py", "--num_towers=2", variables=no_gpu)
    assert done.returncode == 0, done.stderr
    losses = [line.split("- loss: ")[1].split()[0] for line in done.stdout.splitlines()[1::2]]
    assert len(losses) == 5 and float(losses[-1]) < 0.7 * float(losses[0])

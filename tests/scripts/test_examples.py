"""scripts/examples: programs that run; that they have plain Keras' numbers is in test_parallel."""

import pytest

from tests.programs import ROOT, python

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

"""scripts/examples: the numbers of plain `fit` at any number of towers, and programs that run."""

import contextlib
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import fits
from towers.builder import gather
from towers.builder.draws import Draws

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "scripts/examples").glob("*.py"))
SIZE = 29  # 23 to train on: batches of 8, 8 and 7, which no number of towers but one divides


def fit(name, num_towers=0, **options):
    """Return what can be read of an example that was trained for three epochs."""
    example = importlib.import_module(f"scripts.examples.{name}")
    return fits.fit(example.build, example.data(size=SIZE), num_towers, **options)


plain = functools.cache(fit)


def test_there_are_six():
    assert EXAMPLES == ["images", "pairs", "segmentation", "table", "text", "two_outputs"]


@pytest.mark.parametrize(
    "num_towers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))]
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_towers_compute_what_one_device_computes(name, num_towers):
    assert fits.differences(plain(name), fit(name, num_towers)) == {}


@pytest.mark.parametrize("part", fits.PARTS)
def test_a_small_difference_is_seen_in_each_part(part):
    found = plain("images")
    for place, (name, value) in enumerate(found[part]):
        changed = found[part].copy()
        changed[place] = name, value + 2e-9 * np.max(np.abs(value))
        if np.any(value):
            assert list(fits.differences(found, found | {part: changed})) == [part], name


def forgets_a_tower(monkeypatch):
    add = gather.add
    monkeypatch.setattr(gather, "add", lambda values: add(values[:1]))


def joins_in_another_order(monkeypatch):
    join = gather.join
    monkeypatch.setattr(gather, "join", lambda values: join(values[::-1]))


def each_tower_draws_from_the_start(monkeypatch):
    monkeypatch.setattr(Draws, "drawing", lambda self: contextlib.nullcontext())


TRAINING = {"losses", "weights", "optimizer", "predictions"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, fault, parts",
    [
        ("table", forgets_a_tower, TRAINING | {"metrics"}),
        ("pairs", joins_in_another_order, TRAINING | {"metrics"}),
        ("two_outputs", each_tower_draws_from_the_start, TRAINING | {"metrics"}),
    ],
)
def test_a_fault_is_seen(name, fault, parts, monkeypatch):
    expected = plain(name)
    fault(monkeypatch)
    assert set(fits.differences(expected, fit(name, 2))) == parts


@pytest.mark.slow
def test_moments_of_each_tower_are_seen():
    found = fits.differences(plain("images"), fit("images", 2, batch_norm="local"))
    assert set(found) >= TRAINING


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_program_runs(name):
    done = subprocess.run(
        [sys.executable, f"scripts/examples/{name}.py", "--num_towers=2"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = [line.split("- loss: ")[1].split()[0] for line in done.stdout.splitlines()[1::2]]
    assert len(losses) == 5 and float(losses[-1]) < 0.7 * float(losses[0])

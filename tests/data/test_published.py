"""Published data sets through the verbs: the same numbers on 1 and 2 towers, each example once."""

import json

import numpy as np
import pytest

from tests.data import mat_files, tiny_cifar10, tiny_cifar100
from towers import cli, data

WRITERS = {
    "cifar10": tiny_cifar10.write_binaries,
    "cifar100": tiny_cifar100.write_binaries,
    "cifar100_coarse": tiny_cifar100.write_pickles,
    "svhn": mat_files.write_svhn,
    "svhn_extra": mat_files.write_svhn,
}


@pytest.fixture
def run(capsys):
    def call(verb, *flags):
        capsys.readouterr()
        assert cli.main([verb, *flags, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture(params=[*WRITERS, "npz"])
def flags(request, tmp_path, tiny):
    """Return the flags of a data set whose files are made, and how large its test set is."""
    if request.param == "npz":  # as Keras gives out its data sets, labels [N, 1]
        parts = {}
        for half in "train", "test":
            parts[f"x_{half}"], labels = mat_files.digits(half)
            parts[f"y_{half}"] = labels.astype(np.uint8)[:, None]
        np.savez(tmp_path / "keras.npz", **parts)
        return [f"--dataset={tmp_path}/keras.npz"], mat_files.NUM["test"]
    WRITERS[request.param](tmp_path / "data")
    size = data.load(request.param, str(tmp_path / "data")).test.size
    return [f"--dataset={request.param}", f"--data_dir={tmp_path}/data"], size


def test_train_evaluate_verify(flags, run, tmp_path):
    where, size = flags
    small = ["--model=tests.tiny:cnn", "--batch_size=7", "--learning_rate=0.1"]
    trained = run(
        "train", *where, *small, "--max_steps=4", "--num_towers=2", f"--train_dir={tmp_path}/run"
    )
    for towers in 1, 2:  # 7 does not divide it
        found = run("evaluate", f"--train_dir={tmp_path}/run", f"--num_towers={towers}")
        assert found["examples"] == size
        assert found["accuracy"] == pytest.approx(trained["test_accuracy"])
    proof = run("verify", *where, *small, "--steps=2", "--num_towers=2")
    assert proof["passed"] and proof["max_relative_difference"]["2"] < 1e-9


@pytest.mark.parametrize("name", WRITERS)
def test_what_stands_in_has_as_many_classes(name, tmp_path):
    known = data.stand_in(name)
    assert data.locate(name, str(tmp_path)) is None
    assert len(known.class_names) == known.num_classes == {
        "cifar100": 100, "cifar100_coarse": 20
    }.get(name, 10)  # fmt: skip
    assert known.image_shape == (32, 32, 3)

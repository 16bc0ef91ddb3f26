"""`towers verify` on two GPUs: what one device computes, for recipes, tasks and models."""

import json

import pytest

from tests.runs import command

pytestmark = pytest.mark.run
TASKS = "images table masks two".split()
CASES = {
    "cnn": "--flagfile=configs/cifar10_cnn.cfg --dataset=tests.tiny:images",
    "cnn_fast": "--flagfile=configs/cifar10_cnn_fast.cfg --dataset=tests.tiny:images",
    "resnet20": "--flagfile=configs/cifar10_resnet20.cfg --dataset=tests.tiny:images",
    "fast": "--flagfile=configs/cifar10_fast.cfg --dataset=tests.zoo.applications:images_32",
    "quickstart": "--flagfile=configs/quickstart.cfg --dataset=tests.tiny:images",
    **{name: f"--model=tests.tasks:{name} --dataset=tests.tasks:{name}_data" for name in TASKS},
    "text": "--model=tests.gpu.models:text --dataset=tests.tasks:text_data",
    "transformer": "--model=tests.user_models:transformer --dataset=tests.user_models:text",
}


def verified(capsys, *flags):
    """Return the largest relative difference that verify finds on one GPU and on two."""
    small = "--batch_size=7 --steps=2 --num_towers=1,2 --json".split()
    code, out, err = command(capsys, "verify", *flags, *small)
    assert code == 0, err
    return max(json.loads(out)["max_relative_difference"].values())


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_compute_what_one_device_computes(name, capsys):
    assert verified(capsys, *CASES[name].split()) < 1e-9

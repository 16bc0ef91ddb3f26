"""What a run stands on, and that no secret is among it."""

import os
import platform

import tensorflow as tf

from towers.devices import host


def test_versions_are_those_in_use():
    versions = host.versions()
    assert versions["python"] == platform.python_version()
    assert versions["tensorflow"] == tf.__version__
    assert {"keras", "numpy", "tensorboard", "towers", "cuda_build", "cudnn_build", "driver"} < set(
        versions
    )
    assert all(value is None or isinstance(value, str) for value in versions.values())


def test_the_machine_is_described():
    machine = host.machine()
    assert machine["cores"] == os.cpu_count() and 1 <= machine["usable_cores"] <= machine["cores"]
    assert machine["processor"] and machine["name"] == platform.node()
    assert machine["memory_mib"] > 100


def test_variables_that_matter_are_read_and_no_others():
    given = {
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "XLA_FLAGS": "",
        "PYTHONHASHSEED": "1",
        "CUDA_VISIBLE_DEVICES": "0,2",
        "CUDA_SECRET_TOKEN": "hush",
        "TF_PASSWORD": "hush",
        "KERAS_API_KEY": "hush",
        "NVIDIA_NGC_API_KEY": "hush",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_CLI_CONFIG_FILE": "of Terraform",
        "TF_LOG": "of Terraform",
        "SOME_TF_FLAG": "1",
        "PATH": "/bin",
    }
    assert host.environment(given) == {
        "CUDA_VISIBLE_DEVICES": "0,2",
        "PYTHONHASHSEED": "1",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "XLA_FLAGS": "",
    }


def test_the_command_can_be_typed_again_but_shows_no_secret():
    plain = ["python", "-m", "towers", "train", "--data_dir=/a b", "--model_args=num_tokens=3"]
    assert host.command(plain) == (
        "python -m towers train '--data_dir=/a b' --model_args=num_tokens=3"
    )
    hidden = host.command(
        ["my.py", "--api-key", "hush", "--wandb_token=hush", "-password", "hush", "--x=1"]
    )
    assert "hush" not in hidden and hidden.endswith("--x=1") and hidden.count("***") == 3

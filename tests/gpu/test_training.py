"""`towers train` over two GPUs: where everything runs, and what follows on a run."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests import tiny
from tests.runs import command, done

pytestmark = pytest.mark.run
IMAGES = "--dataset=tests.tiny:images --augment=standardize"
GPUS = ["GPU:0", "GPU:1"]
CNN = f"--model=tests.tiny:cnn {IMAGES}"
WORDS = "--dataset=tests.user_models:text"
FAST = "--model=models.fast:fast --model_args=small_size=0 --augment=shift"
FAMILIES = {
    "resnet": f"--model=models.resnet:resnet20 {IMAGES} --augment=resnet --weight_decay=1e-4",
    "vit": f"--model=models.vit:vit --model_args=depth=1 {IMAGES}",
    "muon": f"{FAST} --dataset=tests.zoo.applications:images_32 --optimizer=muon",
    "dense": f"--model=tests.tiny:dense {IMAGES} --clip_global_norm=1 --accumulate_steps=2",
    "dropout, cpu": f"{CNN} --augment=resnet --variables=cpu",
    "dropout, local": f"{CNN} --augment=resnet --batch_norm=local",
    "float16": f"{CNN} --dtype=mixed_float16",
    "bfloat16": f"{CNN} --dtype=mixed_bfloat16",
    "words, cpu": f"--model=tests.user_models:transformer {WORDS} --variables=cpu",
    "compiled": "--model=tests.tasks:two --dataset=tests.tasks:two_data",
}


def train(capsys, folder, *flags):
    """Return what a run of batches of 8 prints, which is to succeed."""
    return done(capsys, "train", folder, "--batch_size=8", *flags)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_op_of_a_tower_is_on_its_gpu(name, tmp_path, capsys):
    flags = ["--variables=replicated", *FAMILIES[name].split(), "--max_steps=3"]
    out = train(capsys, tmp_path, "--placement=strict", *flags)
    assert "ops in towers, each on its tower's device" in out
    assert json.loads((tmp_path / "result.json").read_text())["devices"] == ["/gpu:0", "/gpu:1"]


def test_what_gpus_have_no_kernel_for(tmp_path, capsys):
    """Soft placement moves it to the CPU, and is the default; without it a run does not begin."""
    flags = f"--model=tests.gpu.models:without_kernel {IMAGES} --max_steps=2"
    flags = [*flags.split(), "--variables=cpu"]
    assert "layer sequential/smallest: NthElement on /cpu:0, by soft placement" in train(
        capsys, tmp_path / "soft", *flags
    )
    try:
        for forbidden in "--allow_soft_placement=false", "--placement=strict":
            code, _, err = command(capsys, "train", f"--train_dir={tmp_path}/no", *flags, forbidden)
            assert code != 0 and len(err.splitlines()) == 1
            assert "NthElement" in err
    finally:
        tf.config.set_soft_device_placement(True)
    assert not (tmp_path / "no").exists()


def test_every_op_is_written_down_with_its_device(tmp_path, capsys):
    out = train(capsys, tmp_path, *f"{CNN} --max_steps=2 --log_device_placement".split())
    assert "/gpu:1 -> GPU of host memory, GPU 1 of the driver, PCI bus id 00000000:02:00.0" in out
    header, *rows = (tmp_path / "placement.tsv").read_text().splitlines()
    rows = [dict(zip(header.split("\t"), row.split("\t"), strict=True)) for row in rows]
    convolutions = {(r["tower"], r["device"]) for r in rows if r["type"] == "Conv2D"}
    assert convolutions == {("0", "/gpu:0"), ("1", "/gpu:1")}


@pytest.mark.parametrize(
    "flags, devices",
    [
        ("", ["/gpu:0", "/gpu:1"]),
        ("--num_gpus=1", ["/gpu:0"]),
        ("--devices=/gpu:1", ["/gpu:1"]),
        ("--devices=/gpu:1,/gpu:0", ["/gpu:1", "/gpu:0"]),
        ("--devices=/cpu:0,/gpu:1", ["/cpu:0", "/gpu:1"]),
    ],
)
def test_towers_are_where_they_are_asked_for(flags, devices, tmp_path, capsys):
    flags = f"--model=tests.tiny:dense {IMAGES} --max_steps=2 --variables=cpu {flags}"
    train(capsys, tmp_path, *flags.split())
    assert json.loads((tmp_path / "result.json").read_text())["devices"] == devices


def test_a_run_on_the_second_gpu_takes_nothing_of_the_first(tmp_path, capsys):
    tf.config.experimental.reset_memory_stats("GPU:0")
    before = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    train(capsys, tmp_path, *f"{CNN} --max_steps=2 --devices=/gpu:1 --ema_decay=0.9".split())
    assert command(capsys, "evaluate", f"--train_dir={tmp_path}")[0] == 0
    assert tf.config.experimental.get_memory_info("GPU:0")["peak"] == before


def test_too_few_gpus_are_an_error(tmp_path, capsys):
    code, _, err = command(
        capsys, "train", f"--train_dir={tmp_path}/run", *CNN.split(), "--num_gpus=3"
    )
    assert code == 2 and len(err.splitlines()) == 1
    assert "TensorFlow sees 2 GPUs (/gpu:0, /gpu:1)" in err and "ask for at most 2" in err


def test_a_run_goes_on_on_other_towers(tmp_path, capsys):
    """On one GPU, on the other, on both, then also on CPUs: nothing but rounding differs."""
    flags = f"{CNN} --dtype=float64 --optimizer=adam --learning_rate=0.01 --num_epochs=2"
    train(capsys, tmp_path / "whole", *flags.split(), "--variables=replicated", "--max_steps=8")
    for steps, where in (
        (2, "--devices=/gpu:0 --variables=cpu"),
        (4, "--devices=/gpu:1 --variables=cpu"),
        (6, "--num_towers=2"),
        (8, "--devices=/cpu:0,/cpu:1,/gpu:0 --variables=cpu"),
    ):
        moved = *flags.split(), *where.split(), f"--max_steps={steps}"
        train(capsys, tmp_path / "moved", *moved)
    assert tiny.saved_steps(tmp_path / "moved")[-1] == 8
    tiny.assert_close(tiny.saved(tmp_path / "moved"), tiny.saved(tmp_path / "whole"), 1e-9)


def test_what_comes_after_a_run(tmp_path, capsys):
    """Evaluation and prediction say the same on GPUs and on a CPU."""
    run = tmp_path / "run"
    np.save(tmp_path / "images.npy", tiny.arrays(11, seed=5)[0])
    train(capsys, run, *CNN.split(), "--variables=replicated", "--max_steps=4", "--dtype=float64")
    losses, tables = [], set()
    for where in "--num_towers=2", "--devices=/gpu:1", "--devices=/cpu:0":
        losses.append(json.loads(done(capsys, "evaluate", run, "--json", where))["loss"])
        tables.add(done(capsys, "predict", run, tmp_path / "images.npy", where))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-9)
    assert len(tables) == 1

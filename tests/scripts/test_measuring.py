"""Scripts that measure or compare, on the tiniest input: their tables, and what they compare."""

import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest

from scripts.soak_run import Run, Wrong
from tests import tiny
from tests.programs import ROOT, TENSORFLOWS_LINES, python, script
from towers import data
from towers.options.run import Options

pytestmark = pytest.mark.process
TEXTS = {path: path.read_text() for path in (ROOT / "scripts").glob("*.py")}
SCRIPTS = sorted(p.name for p, text in TEXTS.items() if "tensorflow" in text and "__main__" in text)
TABLES = (ROOT / "configs" / "README.md").read_text()


@pytest.mark.extended
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_without_tensorflows_lines(name):
    """Of one that is run, tests/graphs/test_placement.py looks at the lines."""
    done = python(f"scripts/{name}", "--help")
    assert done.returncode == 0 and done.stdout
    assert not TENSORFLOWS_LINES.search(done.stderr), done.stderr


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "given", "remedy"),
    [
        ("accuracy", "", "required: config"),
        ("accuracy", "configs/quickstart.cfg --seeds=0", "--seeds=0: there must be at least 1"),
        ("accuracy", "configs/quickstart.cfg --peer=ddp", "choose from 'fit'"),
        ("accuracy", "configs/quickstart.cfg --train_dir=x", "--train_dir is set for each run"),
        ("accuracy", "configs/quickstart.cfg --batchsize=3", "--batch_size"),
        ("accuracy", "configs/none.cfg", "configs/none.cfg"),
        ("speed", "--against=fit,tensorpack", "there are mirrored"),
        ("speed", "--against=fit --windows=0", "at least 1"),
    ],
)
def test_bad_input_is_one_line(folder, monkeypatch, capsys, name, given, remedy):
    monkeypatch.chdir(ROOT)
    runs = [f"--runs={folder}"] if name == "accuracy" else []
    assert script(name).main([*given.split(), *runs]) == 2
    out, err = capsys.readouterr()
    assert out == "" and remedy in err and len(err.splitlines()) == 1
    assert not list(folder.iterdir())


# Beside what others do.


@pytest.mark.extended
def test_towers_have_none_of_the_three_faults_of_mirrored_strategy():
    done = python("scripts/mirrored_faults.py")
    assert done.returncode == 0, done.stderr
    header, updates, weights, variances = [line.split() for line in done.stdout.splitlines()]
    assert header == ["one", "device", "2", "towers", "MirroredStrategy"]
    assert updates[-3:] == ["1.0000", "1.0000", "1.4142"]
    assert weights[-6:] == ["0", "0", "0", "0", "nan", "nan"]
    assert variances[-3:] == ["1", "1", "0"]


# scripts/speed, beside programs that speak the protocol of peers and compute nothing.

# {} is what it does when it starts.
PEER = """
import json, sys
config = json.loads(sys.argv[1])
def say(**answer):
    print(json.dumps(answer), flush=True)
{}
print("a word of the library's own")
say(ready=True, versions={{"peer": "1.0"}})
for line in sys.stdin:
    say(steps=4, seconds=2.0, loss=1.0)
say(peak_memory_mib=12.5)
"""
KEEP_IMAGES = """
images = __import__('numpy').load(config['data'])
config['images'] = [images['images'].shape, int(images['labels'].sum())]
json.dump(config, open('config', 'w'))
"""
STARTS = {
    "mirrored": KEEP_IMAGES,
    "fit": "say(skipped='fit is not installed: pip install fit'); sys.exit()",
    "torch_ddp": "sys.stderr.write('first\\nno memory is left\\n'); sys.exit(3)",
    "session": "say(ready=True, versions={}); sys.exit(4)",  # before its first window
}


@pytest.fixture
def speed(folder, monkeypatch):
    """Return the script, with peers of these."""
    speed = script("speed")
    path = f"import sys\nsys.path.insert(0, {str(speed.FOLDER)!r})\n"
    (folder / "images.py").write_text(path + (speed.FOLDER / "images.py").read_text())
    for name, start in STARTS.items():
        (folder / f"{name}.py").write_text(PEER.format(start))
    monkeypatch.setattr(speed, "FOLDER", folder)
    return speed


@pytest.mark.extended
@pytest.mark.process
def test_peers_train_what_we_train_and_take_turns(speed, capsys):
    argv = "--against=mirrored,fit,torch_ddp,mirrored_own_layers,session --model=tests.tiny:dense "
    argv += "--num_towers=1,2 --windows=2 --seconds=0.02 --json --batch_size=8 --optimizer=adamw "
    argv += "--model_args=width=3 --dataset=tests.tiny:images --augment=none"
    assert speed.main(argv.split()) == 1  # a peer has failed
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [row["num_towers"] for row in result["results"]] == [1, 2]
    ours, theirs = result["results"][1]["examples_per_second"], 8 * 4 / 2.0
    assert result["ratios"].keys() == {"mirrored", "mirrored_own_layers"}
    for name, ratio in result["ratios"].items():
        assert result["peers"][name] == {
            "examples_per_second": {"median": theirs, "min": theirs, "max": theirs},
            "peak_memory_mib": 12.5,
            "versions": {"peer": "1.0"},
        }
        assert ratio == pytest.approx(ours["median"] / theirs)
        assert result["ratio_ranges"][name]["max"] == pytest.approx(ours["max"] / theirs)
    assert result["skipped"] == {"fit": "fit is not installed: pip install fit"}
    assert result["failed"]["torch_ddp"].endswith("exit code 3: no memory is left")
    assert "exit code 4" in result["failed"]["session"] and "| mirrored |" in err
    config = json.loads(Path("config").read_text())
    images, labels = tiny.arrays(tiny.TRAIN_SIZE)
    assert config.pop("images") == [list(images.shape), int(labels.sum())]
    assert Path(config.pop("data")).name == "train.npz"
    assert config == {
        "model": "tests.tiny:dense", "model_args": {"width": 3}, "image_shape": [8, 8, 3],
        "num_classes": 3, "batch_size": 8, "num_devices": 2, "gpus": False, "dtype": "float32",
        "optimizer": "adamw", "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 0.0,
        "ema_decay": 0.0, "augment": "none", "steps_per_loop": 10, "seed": 0, "own_layers": True,
    }  # fmt: skip


@pytest.mark.graph
def test_data_that_are_no_images_with_classes_are_given_to_nobody(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "peers")
    images, lane = import_module("images"), import_module("lane")
    with pytest.raises(lane.Skipped, match="no images as bytes"):
        images.export(data.load("tests.tasks:masks_data").train, str(tmp_path / "train.npz"))
    options = Options(dataset="tests.tiny:images", augment="shift")
    with pytest.raises(lane.Skipped, match="do not know --augment=shift"):
        images.main(options, str(tmp_path / "train.npz"))
    assert not (tmp_path / "train.npz").exists()


# scripts/accuracy: a row of several seeds, which are trained once; and the table of configs/.

SHORT = "--model=tests.tiny:cnn --dataset=shapes --max_steps=30 --batch_size=32 --dtype=float64 "
SHORT += "--devices=cpu --learning_rate=0.05 --optimizer=momentum --schedule=onecycle "
SHORT += "--weight_decay=0.001 --clip_global_norm=1 --label_smoothing=0.1 --ema_decay=0.9"


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.chdir(ROOT)
    return script("accuracy")


@pytest.mark.unit
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.cfg")), ids=lambda p: p.name)
def test_every_config_is_described_and_has_rows_that_can_be_made(accuracy, tmp_path, path):
    assert f"| `{path.name}` |" in TABLES
    commands = re.findall(rf"^\| `scripts/accuracy (configs/{path.name}.*?)` \|", TABLES, re.M)
    assert commands
    for command in commands:
        accuracy.plan([*shlex.split(command), f"--runs={tmp_path}"])


@pytest.mark.unit
def test_the_table_has_the_columns_of_the_rows_and_a_row_the_range_of_all_seeds(accuracy):
    assert accuracy.markdown(accuracy.HEADER, [])[0] in TABLES
    planned = accuracy.plan(["configs/quickstart.cfg", "--seeds=2", "--peer=fit"])
    assert [(run.seed, run.way) for run in planned] == [
        (seed, way) for seed in (0, 1) for way in ("towers", "fit")
    ]
    ends = [{"test_accuracy": a, "training_seconds": 1.0} for a in (0.5, 0.75)]
    cells = accuracy.row("command", "towers", ends)
    assert cells[2] == "0.6250 (0.5000 to 0.7500)" and cells[4] == 2


# scripts/programs and scripts/examples: programs that train in plain Keras, and over towers.

PROGRAM = """
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(7, 5))
model = keras.Sequential([keras.layers.Dense(4), {}, keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(x, x[:, :1], batch_size=4, epochs=3)
"""
MIXED = "keras.layers.Lambda(lambda x: x - keras.ops.mean(x, 0))"


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
    assert found["mixed.py"].startswith("differs, told") and "lambda" in found["mixed.py"]
    assert "plain Keras fails: ValueError: of its own" in found["broken.py"]
    assert found["nothing.py"] == "calls no fit"
    assert done.returncode == 0


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "scripts/examples").glob("*.py")))
def test_the_program_runs(name):
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    done = python(f"scripts/examples/{name}.py", "--num_towers=2", variables=no_gpu)
    assert done.returncode == 0, done.stderr
    losses = [line.split("- loss: ")[1].split()[0] for line in done.stdout.splitlines()[1::2]]
    assert len(losses) == 5 and float(losses[-1]) < 0.7 * float(losses[0])


# scripts/soak: a few of its rounds, and that it notices what is wrong.


@pytest.mark.extended
@pytest.mark.timeout(600)  # of a busy machine
def test_some_rounds_pass(tmp_path):
    faults, folder = ["terminated", "killed_in_save", "damaged", "blocked"], tmp_path / "soak"
    flags = [f"--rounds={len(faults)}", f"--faults={','.join(faults)}", f"--folder={folder}"]
    done = python("scripts/soak", *flags, "--json")
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    assert sorted(r["fault"] for r in rounds) == sorted(faults)
    assert not any(r["wrong"] for r in rounds) and not folder.exists()


@pytest.mark.parametrize(
    ("program", "wrong"),
    [
        ("exit(3)", r"ended with 3, not \(0, 75\)"),
        (
            "import sys; print('towers: step 7 is saved', file=sys.stderr); exit(75)",
            "but there is none",
        ),
        ("import time; time.sleep(60)", "did not end within 1 s"),
    ],
)
def test_an_end_that_no_page_has_is_noticed(program, wrong, tmp_path):
    with Run("dropout", tmp_path / "run") as run:
        run.command = [sys.executable, "-c", program]
        run.start()
        with pytest.raises(Wrong, match=wrong):
            run.end(0, 75, seconds=1 if "sleep" in program else 60)

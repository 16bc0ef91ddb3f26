"""README.md and the pages of the rooms: what they say can be typed, and does what they say."""

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import fake_gpus, tiny
from towers import cli, devices
from towers.commands.init import command as init
from towers.options import flags
from towers.options.run import Options
from towers.training.parallel import builder_of
from towers.training.train import train

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOP = ("README.md", "towers/README.md", "scripts/README.md")
PATHS = [*(ROOT / name for name in TOP), *sorted(ROOT.glob("towers/*/README.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PATHS}
ALL = "\n".join(PAGES.values())


def blocks(language, page=README):
    """Return the code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def commands(page=ALL):
    """Return the lines of the shell blocks, without comments."""
    lines = [line for block in blocks("bash", page) for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


TOWERS = [words for words in commands() if words[0] == "towers"]


def test_the_first_commands_are_the_quickstart_and_the_tests():
    assert commands(README)[:2] == [["scripts/quickstart"], ["scripts/test", "--fast"]]


def test_it_is_read_in_ten_minutes():
    assert len(README) <= 10_000


def test_the_chinese_page_has_the_same_code():
    chinese = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    assert re.findall(r"```.*?```", chinese, re.DOTALL) == re.findall(
        r"```.*?```", README, re.DOTALL
    )
    headings = re.compile(r"^#+ |^\| ", re.MULTILINE)
    assert len(headings.findall(chinese)) == len(headings.findall(README))


@pytest.mark.parametrize("page", [*PAGES, "README.zh-CN.md"])
def test_links_and_pictures_are_there(page):
    path = ROOT / page
    targets = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_are_there(page):
    folder = (ROOT / page).parent
    if folder != ROOT:
        named = re.findall(r"`([\w/]+\.py)`", PAGES[page])
        assert [n for n in named if not any((top / n).is_file() for top in places(folder))] == []


def places(folder):
    return [folder, ROOT / "towers", ROOT, *folder.glob("*/")]


def test_the_scripts_are_there():
    for words in commands():
        if words[0].startswith("scripts/"):
            assert (ROOT / words[0]).stat().st_mode & 0o111, words


@pytest.mark.parametrize("words", TOWERS, ids=" ".join)
def test_the_commands_are_understood(words, monkeypatch, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    init.run(init.InitOptions((str(tmp_path),)), say=print)
    if words[1] != "train":  # which begins the run
        for name in "fast", "mine":
            (tmp_path / "runs" / name).mkdir(parents=True)
            (tmp_path / "runs" / name / "flags.cfg").write_text(Options().to_flagfile())
    monkeypatch.chdir(tmp_path)
    cli.parse(words[1], words[2:])


def test_no_other_program_is_called_for():
    first = {words[0] for words in commands()}
    scripts = {f"scripts/{name}" for name in ("quickstart", "test", "catalogue", "soak", "fuzz")}
    assert first <= {"towers", "source", "python", "pip"} | scripts


@pytest.mark.parametrize(
    "name",
    re.findall(r"configs/\w+\.cfg", README) + [p.name for p in (ROOT / "configs").glob("*.cfg")],
)
def test_the_flagfiles_are_there_and_named(name):
    assert (ROOT / "configs" / Path(name).name).is_file()
    assert f"configs/{Path(name).name}" in README


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.cfg")), ids=lambda p: p.name)
def test_a_flagfile_opens_with_command_hardware_time_and_accuracy(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    opening = re.match(r"(#.*\n)+", path.read_text())[0]
    for word in ("towers train --flagfile=configs/", "hardware:", "time:", "accuracy:"):
        assert word in opening, f"{path.name} opens without {word}"
    flags.parse([f"--flagfile={path}"])


def test_every_flag_that_is_named_exists():
    ours = re.sub("#SBATCH .*", "", ALL)
    for name in set(re.findall(r"--(\w+)", ours)) - {"flagfile", "help", "version"}:
        known = any(f"--{name}" in flags.verb_help(verb) for verb in cli.VERBS.values())
        assert known or name in SCRIPT_FLAGS, name


SCRIPT_FLAGS = {"fast"} | {
    name
    for path in (ROOT / "scripts").iterdir()
    if path.is_file()
    for name in re.findall(r'"--(\w+)"', path.read_text())
}


@pytest.mark.slow
def test_the_program_that_uses_the_builder_runs(tmp_path):
    """Also where the guides' line chooses GPUs and there is none."""
    program = next(block for block in blocks("python") if "TowerBuilder" in block)
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(  # devices are configured before TensorFlow starts
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": '"0,1"'},
        capture_output=True,
        text=True,
    )
    assert "[[ 44.  56.]\n [ 98. 128.]]" in done.stdout, done.stderr


@pytest.mark.slow
def test_the_program_that_verifies_runs(capsys):
    (program,) = blocks("python", PAGES["towers/commands/README.md"])
    exec(program, {})
    assert "passed      the largest relative" in capsys.readouterr().out


# ---------------------------------------------------------------------------- Programs


def run(program, **names):
    """Run a block of a page with what stands outside of it; return all names."""
    names |= {"tf": tf, "towers": towers, "keras": keras}
    exec(program, names)
    return names


def a_model():
    """Return a compiled model with the same weights each time."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    return model


X, Y = np.random.default_rng(0).normal(size=(2, 10, 4))


def test_fit_in_three_lines():
    program = next(block for block in blocks("python") if ".fit(" in block)
    assert len(program.splitlines()) == 3
    model = run(program, model=a_model(), x=X, y=Y[:, :3])["model"]
    assert len(builder_of(model).devices) == 2 and len(model.history.epoch) == 10


def test_a_fitted_model_is_saved_as_a_plain_one(monkeypatch, tmp_path):
    page = blocks("python", PAGES["towers/training/README.md"])
    program, callbacks = (block for block in page if ".fit(" in block)
    monkeypatch.chdir(tmp_path)
    model = run(program, build=a_model, x=X, y=Y[:, :3])["model"]
    saved = keras.models.load_model("model.keras")
    assert len(builder_of(model).devices) == 2 and builder_of(saved) is None
    np.testing.assert_array_equal(saved.predict(X, verbose=0), model.predict(X, verbose=0))
    run(callbacks, model=model, x=X, y=Y[:, :3])
    assert len(model.history.epoch) == 10
    assert (tmp_path / "runs/fit").is_dir() and (tmp_path / "saved").is_dir()


def test_the_weights_of_a_run_are_read_with_towers_and_without(monkeypatch, tmp_path):
    page = blocks("python", PAGES["towers/training/README.md"])
    ours = next(block for block in page if "towers.load" in block)
    theirs = next(block for block in page if "tf.train.Checkpoint" in block)
    monkeypatch.chdir(tmp_path)
    train(tiny.options("runs/mine", max_steps=2, ema_decay=0.9))
    model = run(ours)["model"]
    keras.backend.clear_session()
    read = run(theirs, model=tiny.dense(3, (8, 8, 3)))["model"]
    for one, other in zip(model.variables, read.variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_both_ways_to_a_loss_make_the_same_step():
    page = PAGES["towers/builder/README.md"]
    kept = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = []
    for program in blocks("python", page):
        model, optimizer = a_model(), keras.optimizers.SGD(1.0)
        optimizer.build(model.trainable_variables)
        builder = towers.TowerBuilder(["/cpu:0", "/cpu:1", "/cpu:2"])
        names = run(program, model=model, optimizer=optimizer, builder=builder, any_loss=kept)
        labels = np.arange(10) % 3
        loss = names["train_step"](tf.constant(X, tf.float32), tf.constant(labels))
        found.append([loss, *model.weights])
    one, other = found
    assert np.abs(one[1] - a_model().weights[0]).max() > 0.01
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def coming_from():
    """Return the lines of the page that stand for those of other programs."""
    table = PAGES["towers/builder/README.md"].partition("| from | your lines |")[2]
    cells = [line.split(" | ")[2] for line in table.partition("\n\n")[0].splitlines()[2:]]
    return sorted({line for cell in cells for line in re.findall(r"`(\w.* = .*?)`", cell)})


def test_the_lines_that_stand_for_those_of_other_programs_run():
    assert len(coming_from()) == 4
    for line in coming_from():
        model = a_model()
        names = run(
            line,
            model=model,
            build=a_model,
            builder=towers.TowerBuilder(["/cpu:0", "/cpu:1"]),
            loss_fn=lambda x, y, model=model: tf.reduce_mean((model(x) - y) ** 2, axis=1),
            variables=model.trainable_variables,
            images=tf.constant(X, tf.float32),
            labels=tf.constant(Y[:, :3], tf.float32),
        )
        assert {"losses", "grads"} & set(names) or len(builder_of(names["model"]).devices) == 2


# ---------------------------------------------------------------------------- The guides' table


def guide_rows():
    """Return {what the guides write: what is typed here}, cells as README has them."""
    table = README.partition("| in the guides you wrote")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {left: right for left, right in rows}


GUIDES = guide_rows()
SETTINGS = [left for left in GUIDES if left.startswith("`config.")]


def typed(left):
    """Return the options that the flags of a row's right side give."""
    line = " ".join(re.findall(r"`(?:towers train )?(--[^`]*)`", GUIDES[left]))
    return flags.parse(line.split())


def test_guides_every_row_is_tried():
    variables = [left for left in GUIDES if left.startswith("`CUDA_VISIBLE_DEVICES=")]
    devices = [left for left in GUIDES if "tf.device" in left]
    sessions = [left for left in GUIDES if left.startswith("`tf.Session(")]
    assert len(variables) == len(devices) == 2 and len(sessions) == 1 and len(SETTINGS) == 5
    assert sorted(variables + devices + sessions + SETTINGS) == sorted(GUIDES)


@pytest.mark.parametrize("left", SETTINGS)
def test_guides_a_setting_of_a_session_is_a_flag(left, monkeypatch):
    """What the flags mean to a session is what the guides' line sets."""
    fake_gpus.install(monkeypatch, fake_gpus.A100)
    wanted = devices.config_proto()
    exec(left.strip("`"), {"config": wanted})
    options = typed(left)
    log = options.log_device_placement
    if left.startswith("`config.allow_soft"):
        assert GUIDES[left].startswith("nothing")
        assert not options.allow_soft_placement  # which is the way to forbid it
        assert devices.config_proto(allow_soft_placement=False) != wanted
        options = Options()
    given = dataclasses.asdict(options.gpu_options())
    assert devices.config_proto(log_device_placement=log, **given) == wanted
    devices.configure(**given)  # and the same can be set for a run
    devices.read_back()


@pytest.mark.parametrize("left", [left for left in GUIDES if left.startswith("`CUDA_")])
def test_guides_a_variable_is_a_flag_and_still_works(left, monkeypatch):
    cards = [dataclasses.replace(fake_gpus.A100, name=f"card {i}") for i in range(4)]
    value = re.search(r'CUDA_VISIBLE_DEVICES="?([\d,]*)"? ', left)[1]

    def seen_with(**options):
        devices.configure(**options)
        return [row.name for row in devices.describe()]

    with monkeypatch.context() as patch:
        fake_gpus.install(patch, *cards)
        by_flag = seen_with(visible_gpus=typed(left).visible_gpus)
    with monkeypatch.context() as patch:
        fake_gpus.install(patch, *cards)
        patch.setenv("CUDA_VISIBLE_DEVICES", value)
        by_variable = seen_with()
    expected = [f"card {i}" for i in value.split(",")] if value else None
    cpu = by_flag[0].startswith("CPU")
    assert by_flag == by_variable and (by_flag == expected or (cpu and expected is None))


@pytest.mark.parametrize("left", [left for left in GUIDES if "tf.device" in left])
def test_guides_a_device_is_a_flag(left, monkeypatch):
    fake_gpus.install(monkeypatch, *[fake_gpus.A100] * 4)
    assert devices.tower_devices(devices=typed(left).devices) == re.findall(r"/gpu:\d", left)


def test_guides_a_session_takes_the_config(monkeypatch):
    fake_gpus.install(monkeypatch, fake_gpus.A100)
    (right,) = [right for left, right in GUIDES.items() if left.startswith("`tf.Session(")]
    with tf.Graph().as_default():
        with eval(right.strip("`"), {"tf": tf.compat.v1, "towers": towers}) as session:
            assert session.run(tf.constant(42)) == 42
            assert session._config.gpu_options.allow_growth


def test_the_model_of_your_own_trains(monkeypatch, tmp_path, capsys):
    net = next(block for block in blocks("python") if "my_net.py" in block)
    (tmp_path / "my_net.py").write_text(net)
    (tmp_path / "my_data.py").write_text(
        "import numpy as np\n\n\ndef load():\n"
        "    images = np.zeros([20, 32, 32, 3], np.uint8)\n"
        "    return (images, np.arange(20) % 4), (images, np.arange(20) % 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (more,) = re.findall(r"`(--model_args=.*?)`", README)
    words = ["train", "--model=my_net:build", "--dataset=my_data:load", "--train_dir=runs/mine"]
    assert cli.main([*words, more, "--max_steps=2", "--batch_size=8"]) == 0
    assert "128" not in capsys.readouterr().err
    width = tf.train.load_checkpoint("runs/mine/checkpoints").get_variable_to_shape_map()
    assert [3, 3, 3, 64] in width.values()  # --model_args=width=64 has arrived
    shutil.rmtree(tmp_path / "runs")


def test_what_the_quickstart_prints_is_what_readme_shows():
    """The figures differ from machine to machine; the words do not."""
    shown = next(block for block in blocks("text") if "test_accuracy" in block)
    for words in ("batch size", "rules, the same", "watch it", "step 0", "towers tensorboard"):
        assert words in shown

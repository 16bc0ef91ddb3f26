"""README.md and the pages of the rooms: what they say can be typed, and does what they say."""

import re
import shlex

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import tiny
from tests.programs import ROOT
from towers import cli
from towers.commands.init import command as init
from towers.data.user_data import data_set
from towers.options import flags
from towers.options.run import Options
from towers.training.step.on_towers import builder_of

pytestmark = pytest.mark.unit

README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
TOP = ("README.md", "configs/README.md", "towers/README.md", "scripts/README.md")
PATHS = [*(ROOT / name for name in TOP), *sorted(ROOT.glob("towers/*/*.md"))]
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


def test_it_is_short_and_begins_with_the_quickstart_and_the_tests():
    assert len(README.split()) <= 900 and README.count("\n") <= 150
    assert commands(README)[:2] == [["scripts/quickstart"], ["scripts/test"]]


def test_the_chinese_page_has_the_same_code_and_its_own_words():
    code, headings = re.compile(r"```.*?```", re.S), re.compile(r"^#+ |^\| ", re.M)
    assert code.findall(CHINESE) == code.findall(README)
    assert len(headings.findall(CHINESE)) == len(headings.findall(README))
    assert "塔" not in CHINESE and "副本" in CHINESE and "均为英文" in CHINESE


def test_what_pages_link_to_and_name_is_there():
    for page in [*PAGES, "README.zh-CN.md"]:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        targets = re.findall(r"\]\(([^)#:]+)\)", text)
        assert [t for t in targets if not (path.parent / t).is_file()] == [], page
        if path.parent != ROOT:
            places = [path.parent, ROOT / "towers", ROOT, *path.parent.glob("*/")]
            named = re.findall(r"`([\w/]+\.py)`", text)
            assert [n for n in named if not any((top / n).is_file() for top in places)] == [], page
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:towers|tests|scripts|models|configs)/[\w/]+(?:\.py)?)`", page)
    assert len(named) > 10 and [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("words", TOWERS, ids=" ".join)
def test_the_commands_are_understood(words, monkeypatch, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    init.run(init.InitOptions((str(tmp_path),)), say=print)
    if words[1] != "train":  # which begins the run
        for name in "fast", "mine", "quickstart":
            (tmp_path / "runs" / name).mkdir(parents=True)
            (tmp_path / "runs" / name / "flags.cfg").write_text(Options().to_flagfile())
    monkeypatch.chdir(tmp_path)
    cli.parse(words[1], words[2:])


def test_the_scripts_are_there_and_no_other_program_is_called_for():
    called = {words[0] for words in commands()}
    scripts = {name for name in called if name.startswith("scripts/")}
    assert all((ROOT / name).stat().st_mode & 0o111 for name in scripts)
    assert scripts <= {f"scripts/{n}" for n in "quickstart test catalogue soak fuzz speed".split()}
    assert called - scripts <= {"towers", "tensorboard", "source", "python", "pip"}


def test_flagfiles_are_named_and_open_with_command_hardware_time_and_accuracy(monkeypatch):
    monkeypatch.chdir(ROOT)
    paths = {str(path.relative_to(ROOT)): path for path in (ROOT / "configs").glob("*.cfg")}
    table = PAGES["configs/README.md"].partition("## ")[0]
    assert {f"configs/{name}" for name in re.findall(r"`(\w+\.cfg)`", table)} == set(paths)
    for name, path in paths.items():
        opening = re.match(r"(#.*\n)+", path.read_text())[0]
        for word in ("towers train --flagfile=configs/", "hardware:", "time:", "accuracy:"):
            assert word in opening, f"{name} opens without {word}"
        flags.parse([f"--flagfile={path}"])


def test_every_flag_that_is_named_exists():
    ours = re.sub("#SBATCH .*", "", ALL)
    for name in set(re.findall(r"--(\w+)", ours)) - {"flagfile", "help", "version"}:
        known = any(f"--{name}" in flags.verb_help(verb) for verb in cli.VERBS.values())
        assert known or name in SCRIPT_FLAGS, name


OF_OTHERS = {"shm", "nproc_per_node", "saved", "logdir", "samples_per_plugin"}
SCRIPT_FLAGS = (
    {"fast", "all"}
    | OF_OTHERS
    | {
        name
        for path in (ROOT / "scripts").iterdir()
        if path.is_file()
        for name in re.findall(r'"--(\w+)"', path.read_text())
    }
)


@pytest.mark.run
def test_the_program_that_verifies_runs(capsys):
    page = blocks("python", PAGES["towers/commands/README.md"])
    exec(next(block for block in page if "verify" in block), {})
    assert "passed      the largest relative" in capsys.readouterr().out


@pytest.mark.run
@pytest.mark.extended
def test_an_exported_model_becomes_tflite_with_its_numbers(trained, monkeypatch, tmp_path, capsys):
    page = blocks("python", PAGES["towers/commands/README.md"])
    monkeypatch.chdir(tmp_path)
    run = trained.copy("classes", tmp_path / "run")
    words = ["export", f"--train_dir={run}", "--output=fast.keras"]
    assert cli.main(words) == 0
    exec(next(block for block in page if "TFLite" in block), {})
    with pytest.warns(UserWarning, match="LiteRT"):  # another package is to have it
        lite = tf.lite.Interpreter("fast.tflite")
    (given,), (found,) = lite.get_input_details(), lite.get_output_details()
    images = np.random.default_rng(0).integers(0, 256, [1, *given["shape"][1:]], np.uint8)
    lite.allocate_tensors()
    lite.set_tensor(given["index"], images)
    lite.invoke()
    exported = tf.saved_model.load("exported")  # which holds the variables
    logits = exported.serve(images)
    np.testing.assert_allclose(lite.get_tensor(found["index"]), logits, rtol=1e-4, atol=1e-5)


# The first screen.


def test_the_figures_of_the_first_screen_are_those_that_were_measured():
    first = README.partition("\n## ")[0]
    measured = [line for line in PAGES["scripts/README.md"].splitlines() if "| 1.4142 |" in line]
    faults = re.findall(r"^\| (?!\|).*", first, re.M)
    assert measured[0] in faults and len(faults) == 3
    assert all(line in PAGES["scripts/README.md"] for line in faults)
    for ratio in re.findall(r"\d\.\d+(?= times)", first):
        assert f"| {ratio} " in PAGES["scripts/README.md"]


# Programs.


def run(program, **names):
    """Run a block of a page with what stands outside of it; return all names."""
    names |= {"tf": tf, "towers": towers, "keras": keras}
    exec(program, names)
    return names


def a_model():
    """Return a compiled model with the same weights each time."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, kernel_regularizer="l2")])
    model.compile("sgd", "mse")
    return model


X, Y = np.random.default_rng(0).normal(size=(2, 10, 4))


@pytest.mark.run
def test_the_diff_of_the_first_screen_runs():
    (diff,) = blocks("diff")
    program = "\n".join(line[2:] for line in diff.splitlines())
    build = lambda: keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])  # noqa: E731
    model = run(program, build=build, x=X, y=Y[:, :3])["model"]
    assert builder_of(model) and model.history.epoch == [0]
    assert all("towers" in line for line in diff.splitlines() if line.startswith("+"))


@pytest.mark.run
def test_fit_in_three_lines():
    program = next(block for block in blocks("python") if ".fit(" in block)
    assert len(program.splitlines()) == 3
    model = run(program, model=a_model(), x=X, y=Y[:, :3])["model"]
    assert len(builder_of(model).devices) == 2 and len(model.history.epoch) == 10


@pytest.mark.run
def test_layers_of_keras_augment_and_mix_in_the_data_function(monkeypatch):
    images = np.arange(256, dtype=np.uint8)[:, None, None, None] + np.zeros((32, 32, 3), np.uint8)
    labels = np.arange(256)[:, None] % 10
    halves = (images, labels), (images[:20], labels[:20])
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", lambda: halves)
    page = blocks("python", PAGES["towers/data/README.md"])
    load = run(next(block for block in page if "MixUp" in block))["load"]
    own = data_set("my_mixed:load", dict(zip(("train", "test"), load(), strict=True)))
    (x, y), _ = next(iter(own.train.train_batches(200, seed=1)))
    assert own.spec[0].shape == (32, 32, 3) and x.dtype == "float32" and own.test.size == 20
    np.testing.assert_allclose(np.sum(y, 1), 1, rtol=1e-5)
    assert 20 < np.sum(np.max(y, 1) < 0.999) < 200
    assert np.ptp(x, axis=(1, 2, 3)).max() > 100  # gray images are so no more


@pytest.mark.run
def test_a_fitted_model_is_saved_as_a_plain_one(monkeypatch, tmp_path):
    page = blocks("python", PAGES["towers/training/FIT.md"])
    program, callbacks = (block for block in page if ".fit(" in block)
    monkeypatch.chdir(tmp_path)
    model = run(program, build=a_model, x=X, y=Y[:, :3])["model"]
    saved = keras.models.load_model("model.keras")
    assert len(builder_of(model).devices) == 2 and builder_of(saved) is None
    np.testing.assert_array_equal(saved.predict(X, verbose=0), model.predict(X, verbose=0))
    run(callbacks, model=model, x=X, y=Y[:, :3])
    assert len(model.history.epoch) == 10
    assert (tmp_path / "runs/fit").is_dir()


@pytest.mark.run
def test_the_weights_of_a_run_are_read_with_towers_and_without(trained, monkeypatch, tmp_path):
    page = blocks("python", PAGES["towers/training/RUNNING.md"])
    ours = next(block for block in page if "towers.load" in block)
    theirs = next(block for block in page if "tf.train.Checkpoint" in block)
    monkeypatch.chdir(tmp_path)
    trained.copy("classes", tmp_path / "runs/mine")
    model = run(ours)["model"]
    keras.backend.clear_session()
    read = run(theirs, model=tiny.cnn(3, (8, 8, 3), width=3))["model"]
    for one, other in zip(model.variables, read.variables, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.run
def test_the_curves_of_a_run_are_read_by_the_lines_of_the_page(trained, monkeypatch, tmp_path):
    (program,) = blocks("python", PAGES["towers/monitoring/README.md"])
    monkeypatch.chdir(tmp_path)
    trained.copy("classes", tmp_path / "runs/quickstart")
    losses = run(program)["losses"]
    assert list(losses) == [0, 4, 8, 12, 16, 17] and all(0 < loss < 9 for loss in losses.values())


@pytest.mark.graph
def test_both_ways_to_a_loss_make_the_same_step():
    page = PAGES["towers/builder/README.md"]
    kept = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = []
    for program in (block for block in blocks("python", page) if "train_step" in block):
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


@pytest.mark.run
@pytest.mark.checked
def test_a_gan_is_trained_as_on_one_device(recwarn):
    page = blocks("python", PAGES["towers/builder/README.md"])
    program = next(block for block in page if "gan_step" in block)
    assert len(program.splitlines()) <= 20
    found = []
    for num_towers in 1, 3:
        names = {"builder": towers.TowerBuilder(["/cpu:0"] * num_towers)}
        keras.utils.set_random_seed(0)
        for net, (inputs, outputs) in {"discriminator": (4, 1), "generator": (16, 4)}.items():
            names[net] = keras.Sequential([keras.Input([inputs]), keras.layers.Dense(outputs)])
            names[f"{net}_optimizer"] = keras.optimizers.Adam(0.1)
            names[f"{net}_optimizer"].build(names[net].trainable_variables)
        weights = [v for net in ("discriminator", "generator") for v in names[net].weights]
        before = [v.numpy() for v in weights]
        names = run(program, **names)
        for _ in range(2):
            names["gan_step"](tf.constant(X, tf.float32))
        found.append([v.numpy() for v in weights])
    for old, one, several in zip(before, *found, strict=True):
        assert np.abs(one - old).max() > 0.1
        np.testing.assert_allclose(several, one, rtol=1e-4, atol=1e-5)
    assert not list(recwarn)


def coming_from():
    """Return the lines of the page that stand for those of other programs."""
    table = PAGES["towers/builder/README.md"].partition("| from | your lines |")[2]
    cells = [line.split(" | ")[2] for line in table.partition("\n\n")[0].splitlines()[2:]]
    return sorted({line for cell in cells for line in re.findall(r"`(\w.* = .*?)`", cell)})


@pytest.mark.graph
def test_the_lines_that_stand_for_those_of_other_programs_run():
    assert len(coming_from()) == 5
    for line in coming_from():
        model = a_model()
        names = run(
            line, model=model, build=a_model, builder=towers.TowerBuilder(["/cpu:0", "/cpu:1"]),
            loss_fn=lambda x, y, model=model: tf.reduce_mean((model(x) - y) ** 2, axis=1),
            variables=model.trainable_variables, images=tf.constant(X, tf.float32),
            labels=tf.constant(Y[:, :3], tf.float32),
        )  # fmt: skip
        assert {"losses", "grads"} & set(names) or len(builder_of(names["model"]).devices) == 2

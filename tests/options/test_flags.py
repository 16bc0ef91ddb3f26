"""Flags: the frozen command line, flagfiles, and the way from options to a flagfile and back."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import towers
from towers import cli
from towers.commands.benchmark.options import BenchmarkOptions
from towers.commands.compare.options import CompareOptions
from towers.commands.plan.options import PlanOptions
from towers.commands.verify.options import VerifyOptions
from towers.errors import InputError
from towers.options import flags
from towers.options.fields import option
from towers.options.run import Options

ROOT = Path(__file__).resolve().parents[2]

# Scripts of others rely on these: change them only deliberately.
DEFAULTS = """
--train_dir=runs/train
--overwrite=false
--seed=0
--json=false
--model=models.cnn:cnn
--model_args=
--dtype=float32
--dataset=shapes
--data_dir=
--image_size=
--augment=tutorial
--batch_size=128
--num_towers=0
--devices=
--placement=report
--draws=report
--variables=cpu
--jit_compile=false
--log_device_placement=false
--batch_norm=sync
--accumulate_steps=1
--steps_per_loop=10
--visible_gpus=
--per_process_gpu_memory_fraction=0
--gpu_memory_limit_mib=0
--allow_growth=false
--allow_soft_placement=true
--num_epochs=0
--max_steps=0
--optimizer=momentum
--learning_rate=0.05
--schedule=cosine
--warmup_epochs=0
--decay_epochs=
--decay_factor=0.1
--momentum=0.9
--weight_decay=0
--ema_decay=0
--label_smoothing=0
--clip_norm=0
--clip_value=0
--clip_global_norm=0
--log_every_steps=100
--evaluate_every_epochs=1
--checkpoint_every_steps=1000
--keep_checkpoints=3
--tensorboard_x=step
--histogram_every_epochs=0
--profile_steps=
--max_event_mib=200
""".split()
ALIASES = {"num_gpus": "num_towers"}
OF_EVALUATE = (
    "train_dir json dataset data_dir image_size batch_size dtype num_towers devices visible_gpus "
    "per_process_gpu_memory_fraction gpu_memory_limit_mib allow_growth allow_soft_placement"
).split()


def name_of(line):
    return line.removeprefix("--").partition("=")[0]


def help_of(verb):
    return flags.verb_help(cli.VERBS[verb])


def main_help():
    return flags.main_help("0", list(cli.VERBS.values()))


def refusal(verb, *argv):
    """Return the message with which a command line is refused."""
    with pytest.raises(InputError) as error:
        cli.parse(verb, argv)
    return str(error.value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Stand in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------------- The command line


def test_the_verbs_are_frozen():
    verbs = "train evaluate verify benchmark plan doctor sweep compare tensorboard"
    assert list(cli.VERBS) == verbs.split()


def test_the_flags_and_their_defaults_are_frozen():
    shown = [line.split()[0] for line in help_of("train").splitlines() if line.startswith("  --")]
    assert shown == DEFAULTS


def test_the_defaults_that_are_shown_are_those_in_force():
    assert flags.parse(DEFAULTS) == flags.parse([]) == Options()


def test_verify_takes_a_list_of_towers_and_has_flags_of_its_own():
    lines = help_of("verify").splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    changed = [line.replace("--num_towers=0", "--num_towers=1,2,3,4") for line in DEFAULTS]
    assert shown == [*changed, "--steps=10", "--float32=false"]
    options = cli.parse("verify", ["--num_gpus=1,2", "--steps=3", "--nojson", "--float32"])
    assert options == VerifyOptions(num_towers="1,2", steps=3, float32=True)
    assert options.of_run(num_towers=2) == Options(num_towers=2)
    assert "there is no flag --steps" in refusal("train", "--steps=3")


@dataclasses.dataclass(frozen=True)
class OfAVerb:
    """Options of a verb that holds those of a run."""

    num_towers: str = option("1,2", "Towers", "Numbers of towers.", alias="num_gpus")
    steps: int = option(3, "Verb", "Steps to make.", minimum=1)
    run: Options = Options()


@dataclasses.dataclass(frozen=True)
class OfAnyRun:
    """Options of a verb that makes runs of what it is given."""

    run: dict
    steps: int = option(3, "Verb", "Steps to make.", minimum=1)


@pytest.fixture
def verb(monkeypatch):
    """Return a function that gives a verb with the options of a class."""
    here = SimpleNamespace(OfAVerb=OfAVerb, OfAnyRun=OfAnyRun)
    monkeypatch.setitem(sys.modules, "here", here)
    return lambda name: flags.Verb("try", options=f"here:{name}")


def test_a_verb_may_hold_the_options_of_a_run(verb):
    options = flags.parse(["--num_gpus=4", "--steps=5", "--seed=7"], verb("OfAVerb"))
    assert options == OfAVerb(num_towers="4", steps=5, run=Options(seed=7))
    assert flags.parse([], verb("OfAVerb")) == OfAVerb()
    lines = flags.verb_help(verb("OfAVerb")).splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    changed = [line.replace("--num_towers=0", "--num_towers=1,2") for line in DEFAULTS]
    assert shown == [*changed, "--steps=3"]

    options = flags.parse(["--schedule=step", "--steps=5"], verb("OfAnyRun"))  # no run by itself
    assert options == OfAnyRun({"schedule": "step"}, steps=5)


def test_plan_has_flags_of_its_own():
    lines = help_of("plan").splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    own = "--gpu_memory_gib=16 --gpu_tflops=19.5 --gpu_utilisation=0.3 --step_ms=0 --measure=true"
    assert shown == [*DEFAULTS, *own.split()]
    options = cli.parse("plan", ["--num_gpus=8", "--gpu_memory_gib=80", "--nomeasure"])
    assert options == PlanOptions(num_towers=8, gpu_memory_gib=80.0, measure=False)
    assert "there is no flag --gpu_memory_gib" in refusal("train", "--gpu_memory_gib=80")


def test_benchmark_takes_a_list_of_towers_and_has_flags_of_its_own():
    lines = help_of("benchmark").splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    others = {"--num_towers=0": "--num_towers=", "--dataset=shapes": "--dataset=synthetic"}
    own = ["--against=", "--windows=5", "--seconds=2", "--plot="]
    assert shown == [*(others.get(line, line) for line in DEFAULTS), *own]
    options = cli.parse("benchmark", ["--num_gpus=1,2", "--against=jax, fit", "--windows=3"])
    assert options == BenchmarkOptions(num_towers="1,2", against="jax, fit", windows=3)
    assert (options.tower_numbers(), options.peers()) == ([1, 2], ["jax", "fit"])
    assert "there is no flag --against" in refusal("train", "--against=jax")


def test_sweep_has_flags_of_its_own_and_gives_runs_their_folders():
    lines = help_of("sweep").splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    own = "--vary= --samples=0 --sweep_seed=0 --sweep_dir=runs/sweep --parallel=1".split()
    taken = [line for line in DEFAULTS if name_of(line) not in ("train_dir", "overwrite")]
    assert shown == [*taken, *own]
    assert "there is no flag --vary" in refusal("train", "--vary=seed:1")


def test_compare_takes_folders_and_flags_of_its_own():
    lines = help_of("compare").splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    assert shown == ["--accuracy=0", "--plot=", "--json=false"]
    assert any(line.startswith("usage: towers compare RUN... [") for line in lines)
    options = cli.parse("compare", ["a", "--accuracy", "0.5", "b", "--json"])
    assert options == CompareOptions(runs=("a", "b"), accuracy=0.5, json=True)
    assert "unexpected argument 'a'" in refusal("train", "a")


def test_evaluate_takes_what_does_not_change_the_run():
    text = help_of("evaluate")
    shown = [name_of(line.split()[0]) for line in text.splitlines() if line.startswith("  --")]
    assert sorted(shown) == sorted(OF_EVALUATE)
    assert "What is not given is as in the run's flags.cfg." in text


@pytest.mark.parametrize("alias, name", ALIASES.items())
def test_aliases(alias, name):
    assert getattr(flags.parse([f"--{alias}=3"]), name) == 3
    assert getattr(flags.parse([f"--{alias}=3", f"--{name}=4"]), name) == 4
    assert getattr(flags.parse([f"--{name}=4", f"--{alias}", "3"]), name) == 3
    assert f"Also --{alias}." in help_of("train")


def test_help_is_narrow_and_names_every_choice():
    for verb in cli.VERBS:
        text = help_of(verb)
        assert max(map(len, text.splitlines())) <= 100
        assert verb in main_help()
    words = " ".join(help_of("train").split())
    assert "One of float32, float64, mixed_bfloat16, mixed_float16." in words
    assert max(map(len, main_help().splitlines())) <= 100


def test_the_ways_to_write_a_flag():
    for argv in (
        ["--batch_size=3"],
        ["--batch_size", "3"],
        ["-batch_size=3"],
        ["-batch_size", "3"],
    ):
        assert flags.parse(argv).batch_size == 3
    for argv in (["--overwrite"], ["--overwrite=true"], ["--overwrite=1"], ["--overwrite=T"]):
        assert flags.parse(argv).overwrite is True
    for argv in (["--nooverwrite"], ["--overwrite=False"], ["--overwrite", "--nooverwrite"]):
        assert flags.parse(argv).overwrite is False
    assert flags.parse(["--model_args=depth=20,width=16"]).model_args == "depth=20,width=16"
    assert flags.parse(["--train_dir=a b"]).train_dir == "a b"


def test_the_last_one_wins():
    assert flags.parse(["--batch_size=3", "--json", "--batch_size=4"]).batch_size == 4


def test_a_folder_may_lie_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert flags.parse(["--train_dir=~/runs/a"]).train_dir == "/home/me/runs/a"
    assert flags.parse(["--train_dir", "~"]).train_dir == "/home/me"


# ---------------------------------------------------------------------------- Flagfiles


def test_flagfiles_nest_and_take_comments_and_blank_lines(folder):
    (folder / "inner.cfg").write_text("--batch_size=1\n--max_steps=1\n--seed=1\n")
    (folder / "outer.cfg").write_text(
        "\ufeff# a comment\n\n   \n// another\n  # indented\n--max_steps=2\n"
        "  --flagfile=inner.cfg  \r\n--seed=2\n--overwrite\n--train_dir=a b"
    )
    options = flags.parse(["--flagfile=outer.cfg"])
    assert options == Options(batch_size=1, max_steps=1, seed=2, overwrite=True, train_dir="a b")


def test_a_flagfile_counts_where_it_stands(folder):
    (folder / "a.cfg").write_text("--batch_size=1\n--num_towers=2")
    for flag in (["--flagfile=a.cfg"], ["--flagfile", "a.cfg"], ["-flagfile=a.cfg"]):
        options = flags.parse(["--batch_size=3", *flag, "--num_gpus=4"])
        assert (options.batch_size, options.num_towers) == (1, 4)


def test_a_flagfile_may_be_read_twice_but_not_by_itself(folder):
    (folder / "a.cfg").write_text("--batch_size=1")
    (folder / "b.cfg").write_text("--flagfile=a.cfg\n--flagfile=a.cfg")
    assert flags.parse(["--flagfile=b.cfg", "--flagfile=a.cfg"]).batch_size == 1

    (folder / "c.cfg").write_text("--seed=1\n--flagfile=./d.cfg\n")
    (folder / "d.cfg").write_text(f"--flagfile={folder}/c.cfg\n")
    assert refusal("train", "--flagfile=c.cfg") == (
        f"c.cfg, line 2: ./d.cfg, line 1: --flagfile={folder}/c.cfg: "
        "a flagfile cannot include itself"
    )


def test_a_flagfile_may_lie_at_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "a.cfg").write_text("--batch_size=1")
    assert flags.parse(["--flagfile=~/a.cfg"]).batch_size == 1


def test_flagfiles_that_cannot_be_read(folder):
    (folder / "a folder").mkdir()
    (folder / "binary").write_bytes(b"--seed=1\n\xff\xfe")
    (folder / "outer.cfg").write_text("\n--flagfile=missing.cfg")
    absent = "cannot be read: No such file or directory"
    assert refusal("train", "--flagfile=missing.cfg") == f"--flagfile=missing.cfg {absent}"
    assert refusal("train", "--flagfile=") == f"--flagfile= {absent}"
    assert refusal("train", "--flagfile=it's.cfg") == f"--flagfile=it's.cfg {absent}"
    assert refusal("train", "--flagfile=outer.cfg") == (
        f"outer.cfg, line 2: --flagfile=missing.cfg {absent}"
    )
    assert refusal("train", "--flagfile=a folder") == (
        "--flagfile=a folder cannot be read: Is a directory"
    )
    assert refusal("train", "--flagfile=binary") == (
        "--flagfile=binary cannot be read: it is no text in UTF-8"
    )


@pytest.mark.parametrize(
    "line, message",
    [
        ("--batchsize=1", "there is no flag --batchsize; did you mean --batch_size?"),
        ("--batch_size=1 # big", "--batch_size=1 # big: a whole number is needed"),
        ("--batch_size", "--batch_size needs a value: --batch_size=..."),
        ("--flagfile", "--flagfile needs a value: --flagfile=..."),
        ("batch_size=1", "unexpected argument 'batch_size=1': flags are written --name=value"),
        ("--undefok=foo", "there is no flag --undefok; see towers train --help"),
        ("--", "unexpected argument '--': flags are written --name=value"),
    ],
)
def test_what_is_wrong_in_a_flagfile_is_said_with_its_line(folder, line, message):
    (folder / "a.cfg").write_text(f"# comment\n--seed=1\n{line}\n--max_steps=1\n")
    assert refusal("train", "--flagfile=a.cfg") == f"a.cfg, line 3: {message}"


def test_the_flagfiles_of_the_checkout_are_good(monkeypatch):
    monkeypatch.chdir(ROOT)
    paths = sorted((ROOT / "configs").glob("*.cfg"))
    assert paths
    for path in paths:
        flags.parse([f"--flagfile=configs/{path.name}"])


# ---------------------------------------------------------------------------- There and back

WORD = st.text(st.characters(categories="LNPS", exclude_characters="~,"), min_size=1, max_size=9)
TEXT = st.lists(WORD, min_size=1, max_size=3).map(" ".join)
KEYWORDS = st.dictionaries(
    st.from_regex(r"[a-z]\w*", fullmatch=True, alphabet=st.characters(max_codepoint=127)),
    TEXT,
    max_size=3,
).map(lambda keywords: ",".join(f"{name}={value}" for name, value in keywords.items()))


def values_of(field):
    """Return a strategy for what an option may be."""
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    if "choices" in field.metadata:
        return st.sampled_from(field.metadata["choices"])
    if field.name == "model_args":
        return KEYWORDS
    if field.name == "profile_steps":
        return st.sampled_from(["", "0:1", "100:110"])
    if field.name == "image_size":
        return st.sampled_from(["", "64", "48x64"])
    if field.metadata.get("numbers"):
        rising = st.lists(st.floats(0, 1e9), min_size=1, unique=True).map(sorted)
        return rising.map(lambda numbers: ",".join(map(str, numbers)))
    return {
        bool: st.booleans(),
        int: st.integers(low, high),
        float: st.floats(low, high, allow_infinity=False, allow_nan=False),
        str: TEXT,
    }[field.type]


CLIPS = ("clip_norm", "clip_value", "clip_global_norm")
MEMORY = ("per_process_gpu_memory_fraction", "gpu_memory_limit_mib", "allow_growth")


def at_most_one_of(names):
    fields = {field.name: field for field in dataclasses.fields(Options)}
    return st.one_of(
        st.just({}), *(st.fixed_dictionaries({n: values_of(fields[n])}) for n in names)
    )


OPTIONS = st.builds(
    lambda clip, memory, **values: Options(**values, **clip, **memory),
    clip=at_most_one_of(CLIPS),
    memory=at_most_one_of(MEMORY),
    visible_gpus=st.sampled_from(["", "none", "0", "0,2", "3, 1"]),
    **{
        field.name: values_of(field)
        for field in dataclasses.fields(Options)
        if field.name not in ("overwrite", "json", "visible_gpus", *CLIPS, *MEMORY)
    },
)


@settings(deadline=None, max_examples=50)
@given(options=OPTIONS)
def test_a_run_is_repeated_by_its_flagfile(tmp_path_factory, options):
    path = tmp_path_factory.getbasetemp() / "flags.cfg"
    path.write_text(options.to_flagfile(), encoding="utf-8")
    assert flags.parse([f"--flagfile={path}"]) == options


# ---------------------------------------------------------------------------- evaluate


def write_run(folder, **values):
    folder.mkdir()
    (folder / "flags.cfg").write_text(Options(train_dir=str(folder), **values).to_flagfile())
    return folder


def test_evaluate_takes_the_run_and_then_its_own_flags(folder):
    run = write_run(folder / "run", batch_size=7, model="a.b:c", momentum=0.5, num_towers=2)
    options = cli.parse("evaluate", [f"--train_dir={run}", "--num_gpus=4", "--json"])
    assert options == Options(
        train_dir=str(run), batch_size=7, model="a.b:c", momentum=0.5, num_towers=4, json=True
    )


def test_evaluate_finds_a_run_that_was_moved(folder):
    write_run(folder / "run", batch_size=7).rename(folder / "other")
    options = cli.parse("evaluate", ["--train_dir=other"])
    assert (options.train_dir, options.batch_size) == ("other", 7)


def test_evaluate_finds_the_run_that_a_flagfile_names(folder):
    write_run(folder / "run", batch_size=7, seed=5)
    (folder / "a.cfg").write_text("--train_dir=run\n--seed=6\n")
    options = cli.parse("evaluate", ["--flagfile=a.cfg"])
    assert (options.train_dir, options.batch_size, options.seed) == ("run", 7, 6)


def test_evaluate_finds_the_default_folder(folder):
    (folder / "runs").mkdir()
    write_run(folder / "elsewhere", batch_size=7).rename(folder / "runs" / "train")
    options = cli.parse("evaluate", [])
    assert (options.train_dir, options.batch_size) == ("runs/train", 7)


def test_evaluate_does_without_flags_cfg_where_there_are_checkpoints(folder):
    (folder / "run" / "checkpoints").mkdir(parents=True)
    assert cli.parse("evaluate", ["--train_dir=run"]) == Options(train_dir="run")


def test_evaluate_needs_a_run(folder):
    (folder / "empty").mkdir()
    for name in ("missing", "empty"):
        assert refusal("evaluate", f"--train_dir={name}") == (
            f"--train_dir={name}: there is no run; train first, or name the folder of a run"
        )
    name = "x" * 300
    assert refusal("evaluate", f"--train_dir={name}") == f"--train_dir={name}: File name too long"


def test_evaluate_says_what_is_wrong_in_the_run(folder):
    write_run(folder / "run")
    (folder / "run" / "flags.cfg").write_text("--train_dir=run\n--colour=red\n")
    assert refusal("evaluate", "--train_dir=run") == (
        "run/flags.cfg, line 2: there is no flag --colour; see towers evaluate --help"
    )


@pytest.mark.parametrize(
    "name", [name_of(line) for line in DEFAULTS if name_of(line) not in OF_EVALUATE]
)
def test_evaluate_refuses_what_it_would_ignore(name):
    for flag in (f"--{name}=1", f"-{name}", f"--no{name}" if name == "overwrite" else f"--{name}"):
        assert refusal("evaluate", flag) == (
            f"towers evaluate takes no --{name}: it takes --{', --'.join(OF_EVALUATE)}, "
            "and the rest from the run's flags.cfg"
        )


def test_doctor_takes_what_it_checks_and_no_more():
    assert refusal("doctor", "--num_towers=2") == (
        "towers doctor takes no --num_towers: it takes --train_dir, --json, --dataset, --data_dir, "
        "--visible_gpus"
    )
    assert cli.parse("doctor", ["--json", "--train_dir=a"]) == Options(json=True, train_dir="a")


# ---------------------------------------------------------------------------- Importing


def test_importing_towers_defines_no_flag_and_starts_no_tensorflow():
    code = """
import sys
from absl import flags
before = set(flags.FLAGS)
import towers, towers.options.flags, towers.options.run, towers.cli
towers.options.flags.parse([])
assert set(flags.FLAGS) == before, set(flags.FLAGS) - before
assert not {"tensorflow", "keras"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_public_names_are_loaded_on_first_use():
    code = """
import sys, towers
assert {"TowerBuilder", "PerTower"} <= set(towers.__all__) <= set(dir(towers))
assert "tensorflow" not in sys.modules and "towers.builder.tower" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    from towers.builder import tower

    assert towers.TowerBuilder is tower.TowerBuilder
    assert towers.PerTower is tower.PerTower
    with pytest.raises(AttributeError, match="module 'towers' has no attribute 'Tower'"):
        _ = towers.Tower

"""Flags: the frozen command line, flagfiles, and the way from options to a flagfile and back."""

import dataclasses
import os

import pytest

from tests import runs
from tests.programs import python
from towers import cli
from towers.options import code_trust, flags
from towers.options.run import Options

pytestmark = pytest.mark.unit

# Scripts of others rely on these: change them only deliberately.
DEFAULTS = """
--train_dir=runs/train --overwrite=false --seed=0 --json=false --quiet=false
--trust=false
--model=models.cnn:cnn --model_args= --init_from= --dtype=float32 --loss= --metrics= --monitor=
--dataset=shapes --data_dir= --image_size=
--augment=auto --test_time_flip=false --validation_fraction=0 --batch_size=128
--num_towers=0 --devices= --placement=report --variables=default
--jit_compile=false
--log_device_placement=false --batch_norm=sync --accumulate_steps=1 --steps_per_loop=10
--workers= --towers_per_worker=0 --worker_timeout_seconds=15 --min_workers=0
--visible_gpus= --per_process_gpu_memory_fraction=0 --gpu_memory_limit_mib=0 --allow_growth=false
--allow_soft_placement=true --tf32=true --deterministic=false
--num_epochs=0 --max_steps=0 --optimizer=momentum
--learning_rate=0.05 --schedule=cosine --warmup_epochs=0 --decay_epochs= --decay_factor=0.1
--momentum=0.9 --weight_decay=0 --ema_decay=0 --label_smoothing=0 --clip_norm=0 --clip_value=0
--clip_global_norm=0 --on_nan=stop --stall_seconds=300 --on_stall=wait --check=once
--on_inexact=warn --callbacks=
--log_every_steps=0 --evaluate_every_epochs=1 --early_stopping_epochs=0 --keep_best=false
--checkpoint_every_steps=1000 --keep_checkpoints=3
--histogram_every_epochs=0
--profile_steps=
""".split()
OF_EVALUATE = (
    "train_dir json trust model dataset data_dir image_size batch_size dtype "
    "test_time_flip num_towers devices workers towers_per_worker worker_timeout_seconds "
    "min_workers visible_gpus per_process_gpu_memory_fraction gpu_memory_limit_mib allow_growth "
    "allow_soft_placement tf32 deterministic"
).split()
# {verb: the flags that it shows first, its own; those of a run that it does not take}
OF_VERBS = {
    "train": ("", ""),
    "verify": ("--num_towers=1,2,3,4 --steps=10", "train_dir quiet"),
    "benchmark": (
        "--dataset=synthetic --num_towers= --windows=5 --seconds=2",
        "train_dir quiet workers towers_per_worker worker_timeout_seconds min_workers",
    ),
    "sweep": ("--vary= --sweep_dir=runs/sweep", "train_dir overwrite quiet"),
}


def name_of(line):
    return line.removeprefix("--").partition("=")[0]


FLAGS_OF_RUN = list(map(name_of, DEFAULTS))


def help_of(verb):
    return flags.verb_help(cli.VERBS[verb])


def refusal(verb, *argv):
    return runs.refusal(cli.parse, verb, argv)


# ---------------------------------------------------------------------------- The command line


def test_the_verbs_are_frozen():
    verbs = "train evaluate verify benchmark doctor sweep predict export init worker"
    assert list(cli.VERBS) == verbs.split()


def shown_by(text):
    """Return the flags with their defaults that a help shows."""
    return [line.split()[0] for line in text.splitlines() if line.startswith("  --")]


@pytest.mark.parametrize("verb", OF_VERBS)
def test_the_flags_and_their_defaults_are_frozen(verb):
    own, refused = OF_VERBS[verb]
    names = [*map(name_of, own.split()), *refused.split()]
    of_run = [line for line in DEFAULTS if name_of(line) not in names]
    shown = shown_by(help_of(verb))
    if verb == "sweep":  # its --json is that of its table, and stands with those of a run
        for lines in shown, of_run:
            lines.remove("--json=false")
    assert shown == [*own.split(), *of_run]
    for flag in map(name_of, own.split()):
        if flag not in FLAGS_OF_RUN:
            assert f"Unknown command line flag '{flag}'" in refusal("train", f"--{flag}=1")


def test_evaluate_and_doctor_take_what_they_use():
    text = help_of("evaluate")
    assert sorted(map(name_of, shown_by(text))) == sorted(OF_EVALUATE)
    assert "Flags that you leave out have the values in the run's flags.cfg." in text
    assert "takes no --num_towers: it takes --json, --visible" in refusal(
        "doctor", "--num_towers=2"
    )
    assert cli.parse("doctor", ["--json", "--tf32=false"]) == Options(json=True, tf32=False)


@pytest.mark.parametrize(
    "line, values",
    [
        ("-batch_size 3", dict(batch_size=3)),
        ("--overwrite", dict(overwrite=True)), ("--overwrite=T", dict(overwrite=True)),
        ("--overwrite --nooverwrite", {}),
        ("--batch_size=3 --json --batch_size=4", dict(batch_size=4, json=True)),
        ("--model_args=depth=20,width=16", dict(model_args="depth=20,width=16")),
        # --num_gpus is an alias, and needs GPUs.
        ("--num_gpus=3", dict(num_towers=3, devices="gpu")),
        ("--devices=any --num_gpus=3", dict(num_towers=3, devices="gpu")),
        ("--num_gpus=0", dict(num_towers=0)),
        ("--num_gpus=3 --devices=/gpu:0", dict(num_towers=3, devices="/gpu:0")),
    ],
)  # fmt: skip
def test_the_ways_to_write_a_flag(line, values):
    assert flags.parse([*line.split(), "--train_dir=a b"]) == Options(train_dir="a b", **values)


def test_num_gpus_names_no_cpus_in_a_call_either():
    said = "exclude each other; type --num_towers=2"
    assert said in refusal("train", "--num_gpus=2", "--devices=cpu")
    assert said in runs.refusal(flags.options_from_call, None, dict(num_gpus=2, devices="cpu"))
    options = flags.options_from_call(Options(), {"num_gpus": 2})
    assert (options.num_towers, options.devices) == (2, "gpu")


# ---------------------------------------------------------------------------- Flagfiles


WORKERS = {"verify": "a:1", "benchmark": ""}  # of the run's, those that are used


@pytest.mark.parametrize("verb", WORKERS)
def test_the_flags_of_a_run_are_those_of_its_flagfile(folder, verb):
    (folder / "run").mkdir()
    path = folder / "run/flags.cfg"
    for number, shown in ("0", {"verify": "1,2,3,4", "benchmark": ""}[verb]), ("2", "2"):
        lines = f"--batch_size=24\n--seed=3\n--num_towers={number}\n--workers=a:1\n"
        path.write_text(code_trust.signed(lines))
        found = cli.parse(verb, ["--flagfile=run/flags.cfg", "--batch_size=12"])
        assert (found.run.batch_size, found.run.seed) == (12, 3)
        assert (str(found.num_towers), found.run.workers) == (shown, WORKERS[verb])
        assert "type --flagfile=RUN/flags.cfg" in refusal(verb, "--train_dir=run")


@pytest.mark.parametrize(
    "content, says",
    [
        ("--seed=1\n--batchsize=1\n", "'batchsize'. Did you mean: batch_size ?"),
        ("--flagfile=missing.cfg", "missing.cfg: No such file or directory"),
        ("--flagfile=a.cfg", "a.cfg: more than 100 flagfiles"),
        ("--flagfile\n.", ".: is not a regular file"),
        ("--flagfile=pipe", "pipe: is not a regular file"),
        ("--flagfile=/dev/zero", "/dev/zero: is not a regular file"),
        ("--flagfile=/proc/self/mem", "/proc/self/mem: Input/output error"),
        ("--flagfile=\0", "embedded null byte"), ("--flagfile=", "--flagfile needs a value"),
        ("#" * 2**20 + "\n", "a.cfg: is larger than 1048576 bytes"),
        ("--seed=\udcff", "'utf-8' codec can't decode"),
        ("--help=x", "'help'"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_flagfile_is_one_line(folder, content, says):
    (folder / "a.cfg").write_bytes(content.encode(errors="surrogateescape"))
    os.mkfifo("pipe")
    assert says in refusal("train", "--flagfile=a.cfg")


# ---------------------------------------------------------------------------- There and back


def another(field):
    """Return a value that is not the default."""
    if "choices" in field.metadata:
        return next(c for c in field.metadata["choices"] if c not in (field.default, "step"))
    number = (field.metadata.get("minimum") or 0) + 0.125
    text = OTHERS.get(field.name, "a b, #c")
    return {bool: not field.default, int: 7, float: number, str: text}[field.type]


OTHERS = {
    "model_args": "a=1,b_1=x y", "decay_epochs": "80,120.5", "profile_steps": "100:110",
    "image_size": "48x64", "visible_gpus": "0,2", "augment": "resnet,cutout=8",
}  # fmt: skip
NOT_VARIED = (
    "overwrite json quiet trust clip_norm clip_global_norm gpu_memory_limit_mib allow_growth"
).split()  # of those that exclude each other, one


def test_a_run_is_repeated_by_its_flagfile(folder):
    given = dataclasses.fields(Options)
    options = Options(**{f.name: another(f) for f in given if f.name not in NOT_VARIED})
    (folder / "a.cfg").write_text(options.to_flagfile(), encoding="utf-8")
    assert flags.parse(["--flagfile=a.cfg"]) == options


# ---------------------------------------------------------------------------- Of a run


def write_run(folder, **values):
    folder.mkdir(parents=True)
    text = Options(**values | {"train_dir": "elsewhere"}).to_flagfile()
    (folder / "flags.cfg").write_text(code_trust.signed(text))


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_the_flags_of_the_run_count_and_then_those_given(folder, verb):
    values = dict(train_dir="run", batch_size=7, model="a.b:c", num_towers=2, seed=5)
    write_run(folder / "run", **values)
    assert cli.parse(verb, ["--train_dir=run"]) == Options(**values)
    (folder / "a.cfg").write_text("--train_dir=run\n--seed=6\n--model=a.b:c\n")  # as at first
    options = cli.parse(verb, ["--flagfile=a.cfg", "--num_towers=4", "--json"])
    assert options == Options(**values | dict(num_towers=4, json=True, seed=6))


def test_evaluate_needs_a_run_and_refuses_what_it_would_ignore(folder):
    assert refusal("evaluate", "--train_dir=missing").startswith(
        "--train_dir=missing: there is no run; train first"
    )
    assert "--train_dir=runs/train: there is no run" in refusal("evaluate")
    for name in [name_of(line) for line in DEFAULTS if name_of(line) not in OF_EVALUATE]:
        message = refusal("evaluate", f"--{name}=1")
        assert message.startswith(f"towers evaluate takes no --{name}: it takes --train_dir, ")
        assert message.endswith(", and the rest from the run's flags.cfg")


def test_verbs_that_look_at_a_run_do_not_need_its_workers(folder):
    write_run(folder / "run", workers="a:1", towers_per_worker=2, batch_size=7)
    options = cli.parse("evaluate", ["--train_dir=run"])
    assert (options.workers, options.towers_per_worker, options.batch_size) == ("", 0, 7)
    assert cli.parse("evaluate", ["--train_dir=run", "--workers=b"]).workers == "b"


@pytest.mark.parametrize(
    "before, argv, after",
    [
        (dict(num_towers=2), "--workers=a", dict(workers="a")),
        (dict(workers="a", min_workers=1), "--num_towers=2", dict(num_towers=2)),
        (dict(workers="a", min_workers=1), "--seed=0", dict(workers="a", min_workers=1)),
        (dict(max_steps=9), "--num_epochs=2", dict(num_epochs=2.0)),
        (dict(clip_norm=1.0), "--clip_value=2", dict(clip_value=2.0)),
        (dict(clip_norm=1.0), "--clip_value=0", dict(clip_norm=1.0)),
        (dict(allow_growth=True), "--gpu_memory_limit_mib=9", dict(gpu_memory_limit_mib=9)),
        (dict(devices="gpu:0,gpu:2"), "--num_towers=1", dict(num_towers=1)),
        (dict(devices="any"), "--num_towers=1", dict(devices="any", num_towers=1)),
        (dict(num_towers=4), "--devices=/gpu:0,/gpu:1", dict(devices="/gpu:0,/gpu:1")),
        (dict(num_towers=4), "--devices=cpu", dict(devices="cpu", num_towers=4)),
    ],
)
def test_what_is_given_takes_the_place_of_what_says_the_same(folder, before, argv, after):
    write_run(folder / "run", **before)
    assert cli.parse("train", ["--train_dir=run", argv]) == Options(train_dir="run", **after)


def test_a_damaged_flags_cfg_is_named(folder):
    write_run(folder / "run")
    path = folder / "run/flags.cfg"
    for damage in b"--batchsize=1", b"--batch_size=0", b"batch", b"\0", b"--seed=1\n\xff\xfe":
        path.write_bytes(damage)
        message = refusal("evaluate", "--train_dir=run")
        assert message.startswith("run/flags.cfg is damaged: ") and "; repair it, or " in message
    path.write_text("--overwrite\n--json\n--train_dir=other\n--seed=3\n")  # not of the run
    assert cli.parse("train", ["--train_dir=run"]) == Options(train_dir="run", seed=3)


# ---------------------------------------------------------------------------- Importing


@pytest.mark.process
def test_importing_towers_defines_no_flag_and_starts_no_tensorflow():
    """CUDA's cache is made large: the program starts CUDA before it calls towers."""
    code = """
import os, sys
from absl import flags
before, environ = set(flags.FLAGS), dict(os.environ)
import towers, towers.cli, towers.options.run
import towers.devices.nvml, towers.devices.cuda_visible_devices
towers.cli.parse("verify", [])
assert set(flags.FLAGS) == before, set(flags.FLAGS) - before
assert {"TowerBuilder", "PerTower"} <= set(towers.__all__) <= set(dir(towers))
assert not {"tensorflow", "keras", "towers.builder.tower"} & set(sys.modules)
assert os.environ == {"CUDA_CACHE_MAXSIZE": "4294967296"} | environ
"""
    for variables in {}, {"CUDA_CACHE_MAXSIZE": "1000"}:
        done = python("-c", code, variables=variables)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "theirs, ours",
    [("num_processes", "num_towers"), ("log_dir", "train_dir"), ("lr", "learning_rate")],
)
def test_flags_of_other_programs_are_translated(theirs, ours):
    assert f"did you mean --{ours}?" in refusal("train", f"--{theirs}=2")
    assert f"did you mean {ours}?" in runs.refusal(flags.options_from_call, None, {theirs: 2})

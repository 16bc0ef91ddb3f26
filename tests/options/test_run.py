"""Options: what each may be, and what is said of a value that it may not be.

They need neither TensorFlow nor a GPU.
"""

import dataclasses
import itertools

import pytest

from tests import runs
from towers.options.parts import GpuOptions
from towers.options.run import Options, names_that_affect

pytestmark = pytest.mark.unit

# The least and the greatest value of each number.
AT_LEAST_1 = "batch_size accumulate_steps steps_per_loop log_every_steps keep_checkpoints".split()
AT_LEAST_1 += ["worker_timeout_seconds"]
PARTS = "per_process_gpu_memory_fraction decay_factor momentum ema_decay label_smoothing".split()
HIGHEST = {"seed": 2**31 - 1, "num_epochs": 10**9, "validation_fraction": 0.9}
HIGHEST |= {"worker_timeout_seconds": 86_400, "num_towers": 1000}
HIGHEST |= dict.fromkeys(PARTS, 1)
FIELDS = {field.name: field for field in dataclasses.fields(Options)}
NUMBERS = [name for name, field in FIELDS.items() if field.type in (int, float)]
CHOICES = {name: f.metadata["choices"] for name, f in FIELDS.items() if "choices" in f.metadata}
STRINGS = [name for name, field in FIELDS.items() if field.type is str and name not in CHOICES]


def refusal(kind=Options, **values):
    return runs.refusal(kind, **values)


# ---------------------------------------------------------------------------- By their types


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_finite_and_have_their_range(name):
    low, high = int(name in AT_LEAST_1), HIGHEST.get(name)
    kind = "a whole number" if FIELDS[name].type is int else "a number"
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    for value in {low, high} - {None}:
        assert getattr(Options(**{name: value}), name) == value
    for value in [low - 1] if high is None else [low - 1, high + 1]:
        message = refusal(**{name: value})
        assert message.startswith(f"--{name}={value}: {kind} {limits} is needed")
    for value in (float("nan"), -float("inf"), "1", None, True):
        assert refusal(**{name: value}) == f"--{name}={value!r}: {kind} is needed"


@pytest.mark.parametrize("name", CHOICES)
def test_choices_and_an_optimizer_of_the_users_own(name):
    choices = CHOICES[name]
    assert Options(optimizer="my.own:make").optimizer == "my.own:make"
    for choice in choices:
        Options(**{name: choice}, decay_epochs="1")
    for value, meant in {"": "", "none of them": "", f" {choices[0]}": f"{choices[0]}?"}.items():
        allowed = [*choices, *(["module:function"] if name == "optimizer" else [])]
        line, _, found = refusal(**{name: value}).partition("; did you mean ")
        assert line == f"--{name}={value}: allowed are {', '.join(allowed)}" and found == meant


@pytest.mark.parametrize("name", STRINGS)
def test_text_is_what_flags_cfg_can_repeat(name):
    for value in (" a", "a\nb", "a\0b", "a\u2028b", "\udcff"):
        assert refusal(**{name: value}).startswith(f"--{name}={value!r}: text in one line")
    said = refusal(**{name: 3})
    assert said.startswith(f"{name}=3: a ") and ("string" in said or "module:function" in said)
    assert Options(train_dir="Läufe/日本 #1").train_dir == "Läufe/日本 #1"
    if example := FIELDS[name].default:
        assert refusal(**{name: ""}) == f"--{name}= is empty: give a value, as --{name}={example}"


def test_the_flagfile_is_the_whole_run_but_for_what_concerns_one_call():
    lines = Options(train_dir="runs/a", overwrite=True, json=True).to_flagfile().splitlines()
    assert lines[0] == "# towers train --flagfile=THIS_FILE repeats the run"
    assert lines[1] == "--train_dir=runs/a"
    named = [line[2:].partition("=")[0] for line in lines[1:]]
    assert named == [name for name in FIELDS if name not in ("overwrite", "json", "trust")]


def test_each_option_says_what_it_means_and_what_it_affects():
    for name, field in FIELDS.items():
        assert field.metadata["group"] and field.metadata["help"].endswith("."), name
    kinds = ("result", "speed", "machine", "report", "call")
    assert sorted(sum(map(names_that_affect, kinds), [])) == sorted(FIELDS)
    assert names_that_affect("call") == ["train_dir", "overwrite", "json", "trust"]


# ---------------------------------------------------------------------------- By their meaning


def test_a_step_schedule_needs_its_steps():
    message = refusal(schedule="step")
    assert "--schedule=step needs --decay_epochs" in message and "=80,120" in message
    # A flagfile that is overridden by another schedule may leave them there.
    assert Options(schedule="cosine", decay_epochs="80").decay_boundaries() == [80]


@pytest.mark.parametrize(
    "name, method, good, bad, remedy",
    [
        ("image_size", "image_height_width", {"": None, "64": (64, 64), "48x64": (48, 64)},
         ["0", "64x", "64,48", "64x48x3", "6.4", "1000000"],
         "as 64, or height x width, as 48x64"),
        ("profile_steps", "profile_range", {"": None, "0:3": (0, 3)},
         ["100", "100:", "5:5", "-1:5", "a:b", "1:2:3", "1.5:2"],
         "the first before the last, as 100:110"),
        ("decay_epochs", "decay_boundaries", {"": [], "0,0.5, 80,1e2": [0.0, 0.5, 80.0, 100.0]},
         ["80,x", "80,", "80;120", "80,nan", "80,inf", "-1,80"],
         "numbers with commas are needed, as 80,120"),
        ("decay_epochs", "decay_boundaries", {}, ["120,80", "80,80.0"],
         "each number must be greater than the one before"),
        ("model_args", "model_keywords",
         {"": {}, "depth=20,width=16": {"depth": 20, "width": 16},
          "a=0.5,b=1e-3,c=2.": {"a": 0.5, "b": 0.001, "c": 2.0},
          "a=true,b=False": {"a": True, "b": False},
          "a=relu,b=,c=x=y": {"a": "relu", "b": "", "c": "x=y"},
          "a=-3, b=+3,c=007,": {"a": -3, "b": 3, "c": 7}},
         ["depth", "a=1,20", "=3", "a b=1"],
         "is not name=value, as in --model_args=depth=20,width=16"),
    ],
)  # fmt: skip
def test_text_with_a_meaning(name, method, good, bad, remedy):
    for text, value in good.items():
        found = getattr(Options(**{name: text}), method)()
        assert repr(found) == repr(value)  # with the types
    for text in bad:
        message = refusal(**{name: text})
        assert message.startswith(f"--{name}={text}: ") and message.endswith(remedy)
    if name == "model_args":
        assert "has two values of a" in refusal(model_args="a=3, a=4")


# ---------------------------------------------------------------------------- GPUs, exclusion

CLIPS = dict.fromkeys(["clip_norm", "clip_value", "clip_global_norm"], 1.0)
MEMORY = {"per_process_gpu_memory_fraction": 0.4, "gpu_memory_limit_mib": 4096}
MEMORY |= {"allow_growth": True}
GPUS = {
    "": None, "None": [], "2, 0": ["2", "0"], "2,0,2": ["2", "0"], "10,07": ["10", "7"],
    "GPU-0a,MIG-GPU-0a5b/3/0": ["GPU-0a", "MIG-GPU-0a5b/3/0"],
}  # fmt: skip
NO_GPUS = ["0,,2", "0,", "-1", "gpu:0", "1.5", "²", "none,0", '"0,1"', "MIG-", "UUID-0"]


@pytest.mark.parametrize("kind, given", [(GpuOptions, MEMORY), (Options, CLIPS)])
def test_options_that_exclude_each_other(kind, given):
    for one, other in itertools.combinations(given, 2):
        expected = f"--{one} and --{other} exclude each other"
        message = refusal(kind, **{one: given[one], other: given[other]})
        assert message.startswith(expected)
        kind(**{one: given[one], other: type(given[other])(0)})


def test_visible_gpus():
    for text, numbers in GPUS.items():
        assert GpuOptions(visible_gpus=text).chosen() == numbers
    for text in NO_GPUS:
        expected = f"--visible_gpus={text}: numbers of GPUs are needed, as --visible_gpus=0,2"
        assert refusal(GpuOptions, visible_gpus=text).startswith(expected)


def test_what_must_be_set_before_tensorflow_starts():
    assert GpuOptions(allow_soft_placement=False).demands() == {}
    for name, value in MEMORY.items():
        options = GpuOptions(visible_gpus="1", allow_soft_placement=False, **{name: value})
        assert options.demands() == {"visible_gpus": "1", name: value}

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

FIELDS = {field.name: field for field in dataclasses.fields(Options)}


def refusal(kind=Options, **values):
    return runs.refusal(kind, **values)


@pytest.mark.parametrize("name", [n for n, f in FIELDS.items() if f.type in (int, float)])
def test_numbers_are_finite_and_of_their_type(name):
    kind = "a whole number" if FIELDS[name].type is int else "a number"
    for value in (float("nan"), -float("inf"), "1", None, True):
        assert refusal(**{name: value}) == f"--{name}={value!r}: {kind} is needed"
    assert refusal(**{name: -1}).startswith(f"--{name}=-1: {kind} ")


@pytest.mark.parametrize(
    "given, says",
    [
        (dict(batch_size=0), "--batch_size=0: a whole number of at least 1 is needed"),
        (dict(validation_fraction=0.95), "a number from 0 to 0.9 is needed"),
        (dict(seed=2**31), "a whole number from 0 to 2147483647 is needed"),
        (
            dict(gpu_memory_limit_mib=-1),
            "of at least 0 is needed, such as --gpu_memory_limit_mib=4096",
        ),
        (
            dict(schedule="cosin"),
            "allowed are constant, step, linear, cosine, onecycle; did you me",
        ),
        (dict(optimizer="SGD7"), "muon, module:function"),
        (dict(dtype=""), "--dtype=: allowed are float32, float64, mixed_bfloat16, mixed_float16"),
        (dict(augment="mirror"), "--augment=mirror: allowed are auto, tutorial"),
        (dict(train_dir=""), "--train_dir= is empty; give a value, such as --train_dir=runs/train"),
        (dict(train_dir=" a"), "--train_dir=' a': UTF-8 text"),
        (dict(monitor="a\nb"), "UTF-8 text in one line without spaces around"),
        (dict(data_dir="--seed=1"), "--data_dir needs a value: --data_dir=..."),
        (dict(monitor=3), "monitor=3: a string is needed"),
        (dict(model=5), "model=5: a function, or its name as module:function, is needed"),
        (dict(schedule="step"), "needs --decay_epochs, such as --decay_epochs=80,120"),
    ],
)
def test_what_an_option_may_not_be_is_one_line(given, says):
    assert says in refusal(**given)


def test_what_options_may_be():
    for given in dict(optimizer="my.own:make"), dict(train_dir="Läufe/日本 #1"), dict(seed=0):
        assert Options(**given) != Options() or given == dict(seed=0)
    # A flagfile that is overridden by another schedule may leave them there.
    assert Options(schedule="cosine", decay_epochs="80").decay_boundaries() == [80]


def test_the_flagfile_is_the_whole_run_but_for_what_concerns_one_call():
    lines = Options(train_dir="runs/a", overwrite=True, json=True).to_flagfile().splitlines()
    assert lines[0] == "# towers train --flagfile=THIS_FILE repeats the run"
    named = [line[2:].partition("=")[0] for line in lines[1:]]
    assert named == [name for name in FIELDS if name not in ("overwrite", "json", "quiet", "trust")]
    kinds = ("result", "speed", "machine", "report", "call")
    assert sorted(sum(map(names_that_affect, kinds), [])) == sorted(FIELDS)
    for field in FIELDS.values():
        assert field.metadata["group"]
        assert field.metadata["help"].partition("\n")[0].endswith(".")


@pytest.mark.parametrize(
    "name, method, good, bad, remedy",
    [
        ("image_size", "image_height_width", {"": None, "64": (64, 64), "48x64": (48, 64)},
         ["0", "64x", "64,48", "6.4"], "as 64, or height x width, as 48x64"),
        ("profile_steps", "profile_range", {"": None, "0:3": (0, 3)},
         ["100", "5:5", "-1:5", "1:2:3"], "the first before the last, as 100:110"),
        ("decay_epochs", "decay_boundaries", {"": [], "0,0.5, 80,1e2": [0.0, 0.5, 80.0, 100.0]},
         ["80,x", "80;120", "80,nan", "-1,80"], "type numbers separated by commas, such as 80,120"),
        ("decay_epochs", "decay_boundaries", {}, ["120,80", "80,80.0"],
         "each number must be larger than the one before"),
        ("model_args", "model_keywords",
         {"": {}, "depth=20,width=16": {"depth": 20, "width": 16},
          "a=0.5,b=1e-3,c=true,d=False": {"a": 0.5, "b": 0.001, "c": True, "d": False},
          "a=relu,b=,c=x=y": {"a": "relu", "b": "", "c": "x=y"}},
         ["depth", "=3", "a b=1"], "is not name=value, as in --model_args=depth=20,width=16"),
    ],
)  # fmt: skip
def test_text_with_a_meaning(name, method, good, bad, remedy):
    for text, value in good.items():
        assert repr(getattr(Options(**{name: text}), method)()) == repr(value)  # with the types
    for text in bad:
        message = refusal(**{name: text})
        assert message.startswith(f"--{name}={text}: ") and message.endswith(remedy)


CLIPS = dict.fromkeys(["clip_norm", "clip_value", "clip_global_norm"], 1.0)
MEMORY = {"per_process_gpu_memory_fraction": 0.4, "gpu_memory_limit_mib": 4096}
MEMORY |= {"allow_growth": True}
GPUS = {
    "": None, "None": [], "2, 0": ["2", "0"], "2,0,2": ["2", "0"], "10,07": ["10", "7"],
    "GPU-0a,1": ["GPU-0a", "1"],
}  # fmt: skip


@pytest.mark.parametrize("kind, given", [(GpuOptions, MEMORY), (Options, CLIPS)])
def test_options_that_exclude_each_other(kind, given):
    for one, other in itertools.combinations(given, 2):
        message = refusal(kind, **{one: given[one], other: given[other]})
        assert message.startswith(f"--{one} and --{other} exclude each other")


def test_visible_gpus_and_what_must_be_set_before_tensorflow_starts():
    for text, numbers in GPUS.items():
        assert GpuOptions(visible_gpus=text).chosen() == numbers
    for text in ["0,,2", "-1", "gpu:0", "1.5", "none,0", "MIG-", "UUID-0"]:
        expected = f"--visible_gpus={text}: numbers of GPUs are needed, as --visible_gpus=0,2"
        assert refusal(GpuOptions, visible_gpus=text).startswith(expected)
    assert GpuOptions(allow_soft_placement=False).demands() == {}
    for name, value in MEMORY.items():
        options = GpuOptions(visible_gpus="1", allow_soft_placement=False, **{name: value})
        assert options.demands() == {"visible_gpus": "1", name: value}


def test_a_cutout_is_written_in_one_way():
    for text, meant in {
        "resnet,cutout": "resnet,cutout=16",
        "none , cutout=008": "none,cutout=8",
    }.items():
        assert Options(augment=text).augment == Options(augment=meant).augment == meant
    assert "cutout=SIDE" in refusal(augment="standardize,cutout=0")

"""Options: what each may be, and what is said of a value that it may not be."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from towers.errors import InputError
from towers.options.run import DTYPES, SCHEDULES, Options

ROOT = Path(__file__).resolve().parents[2]

# The least and the greatest value of each number.
RANGES = {
    "seed": (0, 2**31 - 1),
    "batch_size": (1, None),
    "num_towers": (0, None),
    "accumulate_steps": (1, None),
    "steps_per_loop": (1, None),
    "per_process_gpu_memory_fraction": (0, 1),
    "gpu_memory_limit_mib": (0, None),
    "num_epochs": (0, 10**9),
    "max_steps": (0, None),
    "learning_rate": (0, None),
    "warmup_epochs": (0, None),
    "decay_factor": (0, 1),
    "momentum": (0, 1),
    "weight_decay": (0, None),
    "ema_decay": (0, 1),
    "label_smoothing": (0, 1),
    "clip_norm": (0, None),
    "clip_value": (0, None),
    "clip_global_norm": (0, None),
    "log_every_steps": (1, None),
    "evaluate_every_epochs": (0, None),
    "checkpoint_every_steps": (0, None),
    "keep_checkpoints": (1, None),
    "histogram_every_epochs": (0, None),
    "max_event_mib": (1, None),
}
FIELDS = {field.name: field for field in dataclasses.fields(Options)}
NUMBERS = [name for name, field in FIELDS.items() if field.type in (int, float)]
STRINGS = [name for name, field in FIELDS.items() if field.type is str]
FREE_STRINGS = [name for name in STRINGS if "choices" not in FIELDS[name].metadata]


def refusal(**values):
    """Return the message with which the options are refused."""
    with pytest.raises(InputError) as error:
        Options(**values)
    message = str(error.value)
    assert message == " ".join(message.splitlines())
    return message


@pytest.mark.parametrize("given", ["100", "100:", "5:5", "7:5", "-1:5", "a:b", "1:2:3", "1.5:2"])
def test_profile_steps_are_two_steps(given):
    message = refusal(profile_steps=given)
    assert f"--profile_steps={given}" in message and "100:110" in message


def test_profile_steps_as_numbers():
    assert Options(profile_steps="0:3").profile_range() == (0, 3)
    assert Options().profile_range() is None


def test_the_ranges_cover_every_number():
    assert list(RANGES) == NUMBERS


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_their_range(name):
    low, high = RANGES[name]
    kind = "a whole number" if FIELDS[name].type is int else "a number"
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    assert getattr(Options(**{name: low}), name) == low
    example = FIELDS[name].metadata.get("example")
    limits += f" is needed, as --{name}={example}" if example else " is needed"
    assert refusal(**{name: low - 1}) == f"--{name}={low - 1}: {kind} {limits}"
    if high is not None:
        assert getattr(Options(**{name: high}), name) == high
        assert refusal(**{name: high + 1}) == f"--{name}={high + 1}: {kind} {limits}"


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "1", None, True])
def test_numbers_are_finite_numbers(name, value):
    kind = "a whole number" if FIELDS[name].type is int else "a number"
    assert refusal(**{name: value}) == f"--{name}={value}: {kind} is needed"


def test_a_whole_number_has_no_fraction():
    assert refusal(batch_size=1.0) == "--batch_size=1.0: a whole number is needed"


def test_numbers_of_numpy_will_do():
    options = Options(batch_size=np.int64(32), learning_rate=np.float64(0.1), num_epochs=3)
    assert "\n--batch_size=32\n" in options.to_flagfile()
    assert "\n--learning_rate=0.1\n" in options.to_flagfile()
    assert "\n--num_epochs=3\n" in options.to_flagfile()


@pytest.mark.parametrize(
    "name, choices",
    [
        ("dtype", DTYPES),
        ("augment", ("tutorial", "resnet", "none", "off")),
        ("optimizer", ("sgd", "momentum", "nesterov", "adamw")),
        ("schedule", SCHEDULES),
    ],
)
def test_choices(name, choices):
    for choice in choices:
        Options(**{name: choice}, decay_epochs="1")
    for value in ("", "none of them", choices[0].upper(), f" {choices[0]}"):
        assert refusal(**{name: value}) == f"--{name}={value}: allowed are {', '.join(choices)}"


@pytest.mark.parametrize("name", [n for n in FREE_STRINGS if FIELDS[n].default])
def test_what_is_needed_is_not_empty(name):
    example = FIELDS[name].default
    assert refusal(**{name: ""}) == f"--{name}= is empty: give a value, as --{name}={example}"


@pytest.mark.parametrize("name", FREE_STRINGS)
@pytest.mark.parametrize("value", [" a", "a ", "a\nb", "a\r", "a\0b", "a\u2028b", "\udcff"])
def test_text_is_what_flags_cfg_can_repeat(name, value):
    message = f"--{name}={value!r}: text in one line, without spaces at its ends, is needed"
    assert refusal(**{name: value}) == message


def test_text_may_hold_spaces_and_any_letters():
    assert Options(train_dir="Läufe/日本 #1").train_dir == "Läufe/日本 #1"


@pytest.mark.parametrize("name", FREE_STRINGS)
def test_text_is_a_string(name):
    assert refusal(**{name: 3}) == f"{name}=3: a string is needed"


@pytest.mark.parametrize("name", ["overwrite", "json"])
def test_a_switch_is_true_or_false(name):
    assert getattr(Options(**{name: True}), name) is True
    assert refusal(**{name: "yes"}) == f"{name}='yes': True or False is needed"
    assert refusal(**{name: 1}) == f"{name}=1: True or False is needed"


def test_one_way_of_clipping():
    names = ["clip_norm", "clip_value", "clip_global_norm"]
    for name in names:
        Options(**{other: float(other == name) for other in names})
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert refusal(**{names[one]: 1.0, names[other]: 1.0}) == (
            f"--{names[one]} and --{names[other]} exclude each other: give one of them, 0 is off"
        )


def test_a_step_schedule_needs_its_steps():
    assert refusal(schedule="step") == (
        "--schedule=step needs --decay_epochs, such as --decay_epochs=80,120"
    )
    # A flagfile that is overridden by another schedule may leave them there.
    assert Options(schedule="cosine", decay_epochs="80").decay_boundaries() == [80]


def test_image_size():
    assert Options().image_height_width() is None
    assert Options(image_size="64").image_height_width() == (64, 64)
    assert Options(image_size="48x64").image_height_width() == (48, 64)
    for text in ("0", "64x", "x64", "64x0", "64,48", "64x48x3", "-1", "6.4", "64X48", "1000000"):
        assert refusal(image_size=text) == (
            f"--image_size={text}: a size in pixels is needed, as 64, or height x width, as 48x64"
        )


def test_decay_epochs():
    assert Options().decay_boundaries() == []
    assert Options(decay_epochs="0,0.5, 80,1e2").decay_boundaries() == [0, 0.5, 80, 100]
    for text in ("80,x", "80,", ",80", "80;120", "nan", "80,nan", "80,inf", "-1,80"):
        message = f"--decay_epochs={text}: numbers with commas are needed, as 80,120"
        assert refusal(decay_epochs=text) == message
    for text in ("120,80", "80,80", "80,80.0"):
        message = f"--decay_epochs={text}: each number must be greater than the one before"
        assert refusal(decay_epochs=text) == message


@pytest.mark.parametrize(
    "text, keywords",
    [
        ("", {}),
        ("depth=20,width=16", {"depth": 20, "width": 16}),
        ("a=-3,b=+3,c=007", {"a": -3, "b": 3, "c": 7}),
        ("a=0.5,b=1e-3,c=2.", {"a": 0.5, "b": 0.001, "c": 2.0}),
        ("a=true,b=False", {"a": True, "b": False}),
        ("a=relu,b=,c=x=y", {"a": "relu", "b": "", "c": "x=y"}),
        ("a=1, b=2,", {"a": 1, "b": 2}),
    ],
)
def test_model_args(text, keywords):
    found = Options(model_args=text).model_keywords()
    assert found == keywords
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in keywords.items()}


@pytest.mark.parametrize(
    "text, part", [("depth", "depth"), ("a=1,20", "20"), ("=3", "=3"), ("a b=1", "a b=1")]
)
def test_malformed_model_args_are_refused_at_once(text, part):
    assert refusal(model_args=text) == (
        f"--model_args={text}: {part!r} is not name=value, as in --model_args=depth=20,width=16"
    )


def test_the_flagfile_is_the_whole_run_but_for_what_concerns_one_call():
    lines = Options(train_dir="runs/a", overwrite=True, json=True).to_flagfile().splitlines()
    assert lines[0] == "# towers train --flagfile=THIS_FILE repeats the run"
    assert lines[1] == "--train_dir=runs/a"
    named = [line[2:].partition("=")[0] for line in lines[1:]]
    assert named == [name for name in FIELDS if name not in ("overwrite", "json")]


def test_each_option_says_what_it_means():
    for name, field in FIELDS.items():
        assert field.metadata["group"] and field.metadata["help"].endswith("."), name


def test_options_need_no_tensorflow():
    code = "import sys, towers.options.run; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

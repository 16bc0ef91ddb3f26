"""The rules of the GPU options; they need neither TensorFlow nor a GPU."""

import itertools
import subprocess
import sys

import pytest

from towers.errors import InputError
from towers.options.gpu import GpuOptions

MEMORY = {
    "per_process_gpu_memory_fraction": 0.4,
    "gpu_memory_limit_mib": 4096,
    "allow_growth": True,
}


def refusal(**options):
    with pytest.raises(InputError) as error:
        GpuOptions(**options)
    return str(error.value)


@pytest.mark.parametrize(
    "text, numbers",
    [
        ("", None),
        ("none", []),
        ("None", []),
        ("0", [0]),
        ("0,2", [0, 2]),
        ("2, 0", [2, 0]),
        ("10,07", [10, 7]),
    ],
)
def test_visible_gpus(text, numbers):
    assert GpuOptions(visible_gpus=text).indices() == numbers


@pytest.mark.parametrize(
    "text, part",
    [
        ("0,,2", ""),
        ("0,", ""),
        ("-1", "-1"),
        ("gpu:0", "gpu:0"),
        ("0;2", "0;2"),
        ("1.5", "1.5"),
        ("²", "²"),
        ("٣", "٣"),
        ("none,0", "none"),
        ('"0,1"', '"0'),
    ],
)
def test_what_is_not_the_number_of_a_gpu(text, part):
    assert refusal(visible_gpus=text) == (
        f"--visible_gpus={text}: {part!r} is not the number of a GPU; "
        "write them as --visible_gpus=0,2, or --visible_gpus=none"
    )


def test_no_gpu_is_named_twice():
    assert refusal(visible_gpus="2,0,2") == (
        "--visible_gpus=2,0,2 names a GPU twice; type --visible_gpus=2,0"
    )


@pytest.mark.parametrize("value", [-0.1, 1.0001, 40, float("nan"), float("inf"), "0.4", True, None])
def test_a_fraction_is_from_0_to_1(value):
    message = refusal(per_process_gpu_memory_fraction=value)
    assert message.startswith(f"--per_process_gpu_memory_fraction={value}: a number ")
    if value == 40:
        assert message.endswith("from 0 to 1 is needed, as --per_process_gpu_memory_fraction=0.4")


@pytest.mark.parametrize("value", [-1, 0.5, 4096.0, float("nan"), "4096", True])
def test_a_limit_is_a_whole_number(value):
    message = refusal(gpu_memory_limit_mib=value)
    assert message.startswith(f"--gpu_memory_limit_mib={value}: a whole number ")
    if value == -1:
        assert message.endswith("of at least 0 is needed, as --gpu_memory_limit_mib=4096")


@pytest.mark.parametrize("name", ["allow_growth", "allow_soft_placement"])
@pytest.mark.parametrize("value", [1, "true", None])
def test_switches_are_true_or_false(name, value):
    assert refusal(**{name: value}) == f"{name}={value!r}: True or False is needed"


@pytest.mark.parametrize("pair", list(itertools.combinations(MEMORY, 2)))
def test_pairs_that_exclude_each_other(pair):
    assert refusal(**{name: MEMORY[name] for name in pair}) == (
        f"--{pair[0]} and --{pair[1]} exclude each other in TensorFlow: give one of them"
    )


@pytest.mark.parametrize("name", MEMORY)
def test_each_goes_with_visible_gpus_and_soft_placement(name):
    options = GpuOptions(visible_gpus="1", allow_soft_placement=False, **{name: MEMORY[name]})
    assert options.demands() == {"visible_gpus": "1", name: MEMORY[name]}


def test_defaults_demand_nothing():
    assert GpuOptions().demands() == {}
    assert GpuOptions(allow_soft_placement=False).demands() == {}
    assert GpuOptions(per_process_gpu_memory_fraction=1).demands() == {
        "per_process_gpu_memory_fraction": 1
    }


def test_no_tensorflow_is_needed():
    modules = "towers.options.gpu, towers.devices.nvml, towers.devices.visibility"
    code = f"import sys, {modules}; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

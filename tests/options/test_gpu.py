"""The rules of the GPU options; they need neither TensorFlow nor a GPU."""

import itertools

import pytest

from towers.errors import InputError
from towers.options.gpu import GpuOptions

MEMORY = {
    "per_process_gpu_memory_fraction": 0.4,
    "gpu_memory_limit_mib": 4096,
    "allow_growth": True,
}
NUMBERS = {
    "": None, "none": [], "None": [], "0": ["0"], "0,2": ["0", "2"], "2, 0": ["2", "0"],
    "10,07": ["10", "7"], "MIG-0a5b-3": ["MIG-0a5b-3"],
    "GPU-0a,MIG-GPU-0a5b/3/0": ["GPU-0a", "MIG-GPU-0a5b/3/0"],
}  # fmt: skip
NO_NUMBERS = ["0,,2", "0,", "-1", "gpu:0", "0;2", "1.5", "²", "٣", "none,0", '"0,1"']
NO_NUMBERS += ["MIG-", "0:1", "UUID-0"]


def refusal(**options):
    with pytest.raises(InputError) as error:
        GpuOptions(**options)
    return str(error.value)


def test_visible_gpus():
    for text, numbers in NUMBERS.items():
        assert GpuOptions(visible_gpus=text).chosen() == numbers
    assert GpuOptions(visible_gpus="2,0,2").chosen() == ["2", "0"]
    for text in NO_NUMBERS:
        expected = f"--visible_gpus={text}: numbers of GPUs are needed, as --visible_gpus=0,2"
        assert refusal(visible_gpus=text).startswith(expected)


def test_a_number_out_of_range_is_refused_with_an_example():
    message = refusal(per_process_gpu_memory_fraction=40)
    assert message.endswith("from 0 to 1 is needed, as --per_process_gpu_memory_fraction=0.4")
    message = refusal(gpu_memory_limit_mib=-1)
    assert message.endswith("of at least 0 is needed, as --gpu_memory_limit_mib=4096")


@pytest.mark.parametrize("pair", list(itertools.combinations(MEMORY, 2)))
def test_pairs_that_exclude_each_other(pair):
    assert refusal(**{name: MEMORY[name] for name in pair}) == (
        f"--{pair[0]} and --{pair[1]} exclude each other in TensorFlow: give one of them"
    )


@pytest.mark.parametrize("name", MEMORY)
def test_what_must_be_set_before_tensorflow_starts(name):
    options = GpuOptions(visible_gpus="1", allow_soft_placement=False, **{name: MEMORY[name]})
    assert options.demands() == {"visible_gpus": "1", name: MEMORY[name]}
    assert GpuOptions(allow_soft_placement=False).demands() == {}

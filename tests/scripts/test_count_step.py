"""scripts/count_step.py: what the steps of four models start and copy on GPUs."""

import itertools

import pytest

from scripts import count_step
from scripts.count_step import HOST
from tests.runs import rare
from towers import devices

pytestmark = pytest.mark.graph


@pytest.fixture(autouse=True, scope="module")
def cpus():
    devices.tower_devices(3, "cpu")


SMALL = "lstm", 2, "mixed_bfloat16"  # of convolutions and BatchNorm: the test of `fit`
MODELS = [SMALL] + [
    rare(*case)
    for case in itertools.product(count_step.MODELS, [1, 2], ["float32", "mixed_bfloat16"])
    if case != SMALL
]
MOST_COPIES, MOST_LAUNCHES = 4, 56  # from the host; of the update


@pytest.mark.run
@pytest.mark.parametrize(("model", "num_towers", "dtype"), MODELS)
def test_gpus_run_each_op_and_read_the_host_for_their_input_alone(model, num_towers, dtype):
    step = count_step.step_of(model, num_towers, "train", "replicated", dtype)
    assert step.without_kernel == step.undirected == []
    # What Keras' own loops copy in each iteration is apart: where it can, it calls cuDNN there.
    once = [copy for copy in step.copies if not copy.repeated]
    assert [copy for copy in once if copy.target == HOST] == []
    assert len([copy for copy in once if HOST in copy]) <= MOST_COPIES * num_towers
    assert step.launches(of_towers=False) <= MOST_LAUNCHES < step.launches(of_towers=True)
    cells = dict(zip(count_step.HEADER[3:], count_step.row(step), strict=True))
    assert cells["from host"] <= f"{MOST_COPIES}" and cells["to host"].split(" ")[0] == "0"
    if num_towers == 2 and model in ("cnn", "resnet20"):  # no weight is sent, nor rows of gradients
        assert 1 <= float(cells["bytes / least"]) < 1.1
        assert cells["all-reduces + gathers"][0] in "12"


@pytest.mark.run
@pytest.mark.parametrize(
    ("model", "num_towers"), [("cnn", 2), ("transformer", 2), rare("resnet20", 2), rare("cnn", 3)]
)
def test_fit_sends_gradients_alone_between_gpus(model, num_towers):
    step = count_step.step_of(model, num_towers, "fit", "default", "float32")
    cells = dict(zip(count_step.HEADER[3:], count_step.row(step), strict=True))
    assert cells["from host"] == "2" and cells["to host"] == "0"
    assert cells["all between GPUs"] <= 2 * (num_towers - 1)
    assert cells["all-reduces + gathers"][0] in "12" and 1 <= float(cells["bytes / least"]) <= 1.1

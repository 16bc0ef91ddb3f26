"""What a step of each kind of model does on GPUs: held on machines without one.

Logical CPUs stand in for GPUs. A failure names what came: the layer and the op, as `towers plan`
and `scripts/gpu_table.py` do for any model.
"""

import importlib
import itertools

import pytest

from tests.runs import rare
from towers import data
from towers.commands.plan import command
from towers.graphs.gpu_estimate import HOST
from towers.options.run import Options

pytestmark = pytest.mark.run

DATASETS = {
    "models.cnn:cnn": "shapes",
    "models.resnet:resnet20": "shapes",
    "tests.user_models:lstm": "tests.user_models:text",
    "tests.user_models:transformer": "tests.user_models:text",
}
SMALL = "tests.user_models:lstm", 2, "mixed_bfloat16"  # of convolutions and BatchNorm: test_gpu_fit
CASES = [SMALL] + [
    rare(*case)
    for case in itertools.product(DATASETS, [1, 2], ["float32", "mixed_bfloat16"])
    if case != SMALL
]
MOST_TRANSFERS = 4
# Of the update: some are there whatever the number of variables, as for the learning rate.
# So is what leaves a bad update out, where no branch may wait: some 10, and one a joined vector.
MOST_LAUNCHES_A_VARIABLE, FEWEST_ASKED_FOR = 2, 56


@pytest.mark.parametrize(("model", "num_towers", "dtype"), CASES)
def test_gpus_run_each_op_and_read_the_host_for_their_input_alone(model, num_towers, dtype):
    given = dict(model=model, dataset=DATASETS[model], batch_size=64, dtype=dtype)
    options = Options(**given, variables="replicated")
    view = command.estimate(options, num_towers, data.load(DATASETS[model]))
    # GPUs have a kernel for each op.
    assert [(op.type, op.dtype, op.name) for op in view.without_kernel] == []
    assert view.undirected == ()
    # A GPU touches the host for its input alone. What Keras' own loops copy in each iteration is
    # apart: where it can, it calls cuDNN there.
    for gpu in (f"/gpu:{i}" for i in range(num_towers)):
        transfers = [t for t in view.transfers(gpu=gpu) if not t.repeated]
        told = [(t.source, t.target, t.type, t.name) for t in transfers]
        assert len(told) <= MOST_TRANSFERS, told
        assert [way for way in told if way[1] == HOST] == []
    # The update starts few kernels.
    module, _, function = model.partition(":")
    built = getattr(importlib.import_module(module), function)(**options.model_keywords())
    most = max(MOST_LAUNCHES_A_VARIABLE * len(built.trainable_variables), FEWEST_ASKED_FOR)
    assert view.launches("gather", "update") <= most

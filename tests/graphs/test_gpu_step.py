"""What a step of each kind of model does on GPUs: held on machines without one.

Logical CPUs stand in for GPUs. A failure names what came: the layer and the op, as `towers plan`
and `scripts/gpu_table.py` do for any model.
"""

import functools
import importlib
import itertools

import pytest

from towers import data
from towers.commands.plan import gpus
from towers.graphs.gpu_nodes import HOST
from towers.options.run import Options

MODELS = {
    "models.cnn:cnn": "shapes",
    "models.resnet:resnet20": "shapes",
    "tests.user_models:lstm": "tests.user_models:text",
    "tests.user_models:transformer": "tests.user_models:text",
}
CASES = list(itertools.product(MODELS, (1, 2), ("float32", "mixed_bfloat16")))
MOST_TRANSFERS, MOST_TRANSPOSES = 4, 4
# Of the update: some are there whatever the number of variables, as for the learning rate.
# So is what leaves a bad update out, where no branch may wait: some 10, and one a joined vector.
MOST_LAUNCHES_A_VARIABLE, FEWEST_ASKED_FOR = 2, 56

of_all = pytest.mark.parametrize(("model", "num_towers", "dtype"), CASES)


@functools.cache
def view_of(model, num_towers, dtype):
    options = Options(
        model=model, dataset=MODELS[model], batch_size=64, dtype=dtype, variables="replicated"
    )
    return gpus.view(options, num_towers, data.load(options.dataset))


@of_all
def test_gpus_have_a_kernel_for_each_op(model, num_towers, dtype):
    view = view_of(model, num_towers, dtype)
    assert [(op.type, op.dtype, op.name) for op in view.without_kernel] == []
    assert view.undirected == ()


@of_all
def test_a_gpu_touches_the_host_for_its_input_alone(model, num_towers, dtype):
    """What Keras' own loops copy in each iteration is apart: where it can, it calls cuDNN there."""
    view = view_of(model, num_towers, dtype)
    for gpu in (f"/gpu:{i}" for i in range(num_towers)):
        transfers = [t for t in view.transfers(gpu=gpu) if not t.repeated]
        told = [(t.source, t.target, t.type, t.name) for t in transfers]
        assert len(told) <= MOST_TRANSFERS, told
        assert [way for way in told if way[1] == HOST] == []


@of_all
def test_batch_norm_does_not_exchange_by_the_host(model, num_towers, dtype):
    exchanged = view_of(model, num_towers, dtype).exchanged_by_host
    assert [(t.source, t.target, t.name) for t in exchanged] == []


@of_all
def test_the_update_starts_few_kernels(model, num_towers, dtype):
    view = view_of(model, num_towers, dtype)
    module, _, name = model.partition(":")
    num_variables = len(getattr(importlib.import_module(module), name)().trainable_variables)
    most = max(MOST_LAUNCHES_A_VARIABLE * num_variables, FEWEST_ASKED_FOR)
    assert view.launches("gather", "update") <= most


@of_all
def test_images_are_hardly_transposed(model, num_towers, dtype):
    view = view_of(model, num_towers, dtype)
    assert view.transposes <= MOST_TRANSPOSES, view.layout.transposes

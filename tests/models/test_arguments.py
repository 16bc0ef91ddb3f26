"""Bad arguments of the shipped models, as `--model_args` may give them."""

import pytest

from models.cnn import cnn
from models.resnet import resnet


@pytest.mark.parametrize(
    "build, argument, values",
    [
        (cnn, "num_classes", [0, -1, "x", 2.5, float("nan")]),
        (cnn, "weight_decay", [-1, "x", float("nan"), float("inf")]),
        (cnn, "lrn", [1, "x"]),
        (resnet, "num_classes", [0, "x"]),
        (resnet, "width", [0, "x", 2.5]),
        (resnet, "depth", ["x", float("nan"), float("inf")]),
    ],
)
def test_bad_arguments_are_said_by_the_model_itself(build, argument, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{argument}={value!r} must be"):
            build(**{argument: value})

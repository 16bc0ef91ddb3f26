"""Bad arguments of the shipped models, as `--model_args` may give them."""

import functools
import itertools

import pytest

from models.cnn import LocalResponseNormalization, cnn
from models.densenet import densenet_bc
from models.fast import fast
from models.preact_resnet import preact_resnet
from models.resnet import resnet
from models.resnext import resnext
from models.vgg import vgg16_bn
from models.vit import vit
from models.wide_resnet import wide_resnet

pytestmark = pytest.mark.unit
FAMILIES = (preact_resnet, wide_resnet, vgg16_bn, densenet_bc, resnext, vit)
NAN, INF = float("nan"), float("inf")


BAD = {
    "num_classes": (0, "x", [*FAMILIES, cnn, resnet, fast]),
    "drop_path": (1.5, NAN, [preact_resnet, wide_resnet, resnext, vit]),
    "dropout": (-0.1, "x", [wide_resnet, vgg16_bn, densenet_bc, vit]),
    "bottleneck": (1, "x", [preact_resnet]),
    "depth": (20.5, "x", [preact_resnet, wide_resnet, densenet_bc, resnext, resnet]),
    "heads": (0, "x", [vit]),
    "width": (0, 2.5, [resnet, fast]),
    "weight_decay": (-1, INF, [cnn]),
    "lrn": (1, "x", [cnn]),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_arguments_are_said_by_the_model_itself(argument):
    *values, builds = BAD[argument]
    for build, value in itertools.product(builds, values):
        with pytest.raises(ValueError, match=f"^{argument}={value!r} must be") as error:
            build(**{argument: value})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (functools.partial(preact_resnet, 21), "^depth=21 must be 6n . 2 .*; nearest: 20 or 26$"),
        (functools.partial(resnet, -4), "^depth=-4 must be 6n . 2 with n >= 1; nearest: 8$"),
        (functools.partial(vgg16_bn, image_shape=(31, 32, 3)), r"^image_shape=\(.*\) must have"),
        (functools.partial(vit, image_shape=(32, 30, 3)), r"^image_shape=\(.*\) must have"),
        (functools.partial(fast, image_shape=(11, 32, 3)), r"image_shape=\(11, 32, 3\) .*must be"),
        (functools.partial(fast, small_size=11, small_steps=1), "small_size=11: .*must be"),
        (functools.partial(LocalResponseNormalization, depth_radius=-1), "depth_radius=-1 .*must"),
    ],
)
def test_what_must_be_is_said_in_a_line(build, words):
    with pytest.raises(ValueError, match=words) as error:
        build()
    assert "\n" not in str(error.value)

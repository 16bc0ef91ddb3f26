"""The shipped families of models at their smallest: a stage has one block and few channels."""

from models.densenet import densenet_bc
from models.fast import fast
from models.preact_resnet import preact_resnet
from models.resnext import resnext
from models.vgg import vgg16_bn
from models.vit import vit
from models.wide_resnet import wide_resnet
from tests.zoo.entry import SAME, entry


def _family(function, why, *args, dataset="tests.tiny:images", **keywords):
    """Return a model function of a shipped one with these arguments."""

    @entry(SAME, why, dataset=dataset)
    def model(num_classes, image_shape):
        return function(*args, **keywords, num_classes=num_classes, image_shape=image_shape)

    return model


preact_basic = _family(preact_resnet, "two convolutions, stochastic depth", 8, 2, drop_path=0.5)
preact_bottleneck = _family(
    preact_resnet, "shortcuts by convolution of what is normalized", 11, 2, bottleneck=True
)
wide = _family(
    wide_resnet, "dropout in a branch that may be skipped", 10, 1, dropout=0.3, drop_path=0.5
)
vgg = _family(
    vgg16_bn, "BatchNorm of single pixels, and of none", width=1,
    dataset="tests.zoo.applications:images_32",
)  # fmt: skip
dense_net = _family(densenet_bc, "dropout in what is concatenated", 10, 2, dropout=0.2)
growing = _family(
    fast, "images that grow on the way", width=2, small_size=16, small_steps=2,
    dataset="tests.zoo.applications:images_32",
)  # fmt: skip
grouped = _family(resnext, "groups one by one, stochastic depth", 11, 2, 2, 2, drop_path=0.5)
transformer = _family(
    vit, "attention, stochastic depth of two branches", 1, 6, 2, 4, dropout=0.2, drop_path=0.5
)

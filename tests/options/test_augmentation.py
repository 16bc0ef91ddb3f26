"""What --augment may say."""

import pytest

from towers.errors import InputError
from towers.options import augmentation
from towers.options.run import Options


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("auto", "auto"),
        ("resnet,cutout", "resnet,cutout=16"),
        ("none, cutmix, color=0.1", "none,color=0.1,cutmix=1"),
        ("shift,mixup=.3,randaugment", "shift,randaugment=9,mixup=0.3"),
    ],
)
def test_a_run_says_it_in_one_way(text, meant):
    assert Options(augment=text).augment == Options(augment=meant).augment == meant


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tutorail", "allowed are auto, tutorial, resnet, shift, none, off, and after that parts,"),
        ("cutout=8", "allowed are auto, tutorial, resnet, shift, none, off, and after that parts,"),
        ("resnet,cutot=8", "there is no part 'cutot'; allowed are cutout, color, randaugment, "),
        ("resnet,", "there is no part ''; allowed are cutout, "),
        ("resnet,mixup,mixup=1", "there are two parts 'mixup'; allowed are cutout, "),
        ("none,cutout=2.5", "cutout takes a side in whole pixels from 1 to 4096, as cutout=16"),
        ("none,color=2", "color takes a strength from 0.01 to 1, as color=0.4"),
        ("none,randaugment=11", "randaugment takes a magnitude from 0.1 to 10, as randaugment=9"),
        ("none,mixup=nan", "mixup takes an alpha from 0.01 to 100, as mixup=0.2"),
        ("none,mixup=", "mixup takes an alpha from 0.01 to 100, as mixup=0.2"),
        ("off,mixup", "off takes images as they are; type --augment=none,mixup, which also "),
    ],
)
def test_what_is_not_known_is_one_line(text, line):
    with pytest.raises(InputError) as error:
        Options(augment=text)
    assert str(error.value).startswith(f"--augment={text}: {line}")
    assert "\n" not in str(error.value)


def test_what_is_given_may_leave_the_base_to_the_run():
    for given in "resnet,cutout=16", "auto,cutout", "resnet, cutout":
        assert augmentation.agree("resnet,cutout=16", given)
    for given in "auto", "none,cutout", "resnet,cutout=8", "resnet,cutout,color", "gone":
        assert not augmentation.agree("resnet,cutout=16", given)
    assert augmentation.agree("tutorial", "auto")

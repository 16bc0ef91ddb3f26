"""Values of --augment: a base, and perhaps a square to cut out.

plan = parse("resnet,cutout=8")
plan.base, plan.cutout      # "resnet", 8
str(plan)                   # "resnet,cutout=8"
"""

import functools
import re
from typing import NamedTuple

from towers.errors import InputError

BASES = ("tutorial", "resnet", "shift", "none", "off")
_CUTOUT = 16  # pixels, if no side is given


class Augmentation(NamedTuple):
    """A base, and the side of the square in pixels; 0: there is none."""

    base: str
    cutout: int = 0

    def __str__(self) -> str:
        """Return the value of --augment."""
        return f"{self.base},cutout={self.cutout}" if self.cutout else self.base


@functools.cache
def parse(text: str) -> Augmentation:
    """Parse a value of --augment; raise InputError if it is not valid."""
    match = re.fullmatch(rf"(auto|{'|'.join(BASES)})(\s*,\s*cutout(=0*[1-9]\d{{0,3}})?)?", text)
    if match is None:
        raise InputError(
            f"--augment={text}: allowed are auto, {', '.join(BASES)}, and after one of them "
            "cutout=SIDE, such as resnet,cutout=8; SIDE is in whole pixels, 1 to 9999"
        )
    base, cutout, side = match.groups()
    return Augmentation(base, int(side[1:]) if side else _CUTOUT if cutout else 0)


def agree(of_run: str, given: str) -> bool:
    """Return whether a value of --augment may stand for that of a run.

    Args:
        of_run: the run's value, in which "auto" is resolved.
        given: the other value; its base may be "auto".
    """
    try:
        plan, plan_of_run = parse(given), parse(of_run)
    except InputError:
        return False
    return plan.cutout == plan_of_run.cutout and plan.base in ("auto", plan_of_run.base)

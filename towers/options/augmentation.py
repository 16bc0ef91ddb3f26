"""Values of --augment: a base, then parts, each with a number or its default.

    plan = parse("resnet,cutout=8,mixup")
    plan.base, plan.cutout, plan.mixup      # "resnet", 8.0, 0.2
    str(plan)                               # "resnet,cutout=8,mixup=0.2"

`towers.data.augment` implements the bases, `towers.data.augment_ops` the parts.
"""

import contextlib
import dataclasses
import functools

from towers.errors import InputError

BASES = ("tutorial", "resnet", "shift", "none", "off")


@dataclasses.dataclass(frozen=True)
class Part:
    """The number of a part: its meaning, range and default."""

    unit: str
    low: float
    high: float
    usual: float


PARTS = {
    "cutout": Part("a side in whole pixels", 1, 4096, 16),
    "color": Part("a strength", 0.01, 1, 0.4),
    "randaugment": Part("a magnitude", 0.1, 10, 9),
    "mixup": Part("an alpha", 0.01, 100, 0.2),
    "cutmix": Part("an alpha", 0.01, 100, 1),
}


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """A base, and the number of each part; 0: not used."""

    base: str
    cutout: float = 0
    color: float = 0
    randaugment: float = 0
    mixup: float = 0
    cutmix: float = 0

    @property
    def parts(self) -> list[str]:
        """The parts as text, in the order in which they are applied."""
        return [f"{name}={value:g}" for name in PARTS if (value := getattr(self, name))]

    @property
    def mixes(self) -> bool:
        """Whether examples of a batch are mixed with each other."""
        return bool(self.mixup or self.cutmix)

    def __str__(self) -> str:
        """Return the value of --augment, with parts in a fixed order."""
        return ",".join([self.base, *self.parts])


@functools.cache
def parse(text: str) -> Augmentation:
    """Parse a value of --augment; raise InputError if it is not valid."""
    base, *parts = (part.strip() for part in text.split(","))
    if base not in ("auto", *BASES):
        raise InputError(
            f"--augment={text}: allowed are auto, {', '.join(BASES)}, and after that parts, as "
            "resnet,cutout=8,mixup"
        )
    numbers: dict[str, float] = {}
    for part in parts:
        name, equals, number = part.partition("=")
        if name not in PARTS or name in numbers:
            problem = "there are two parts" if name in numbers else "there is no part"
            raise InputError(
                f"--augment={text}: {problem} {name!r}; allowed are {', '.join(PARTS)}, each once"
            )
        known = PARTS[name]
        value = float("nan") if equals else known.usual
        with contextlib.suppress(ValueError):
            value = float(number)
        if not known.low <= value <= known.high or (name == "cutout" and value % 1):
            raise InputError(
                f"--augment={text}: {name} takes {known.unit} from {known.low:g} to "
                f"{known.high:g}, as {name}={known.usual:g}"
            )
        numbers[name] = value
    if base == "off" and numbers:
        raise InputError(
            f"--augment={text}: off takes images as they are; type --augment=none,"
            f"{text.partition(',')[2]}, which also standardises"
        )
    return Augmentation(base, **numbers)


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
    return plan.parts == plan_of_run.parts and plan.base in ("auto", plan_of_run.base)

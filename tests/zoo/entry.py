"""An entry of the zoo, the command line that tries it, and what that found."""

import dataclasses
import json

MODULES = "tests.zoo"
# What verify's cause begins with, before a colon, the layer's name and advice.
CAUSES = (
    "inexact", "random numbers", "random op", "python code", "state in Python", "local BatchNorm",
    "recomputation", "rounding", "initial weights", "unknown",
)  # fmt: skip
SAME, REFUSED = "same", "refused"


@dataclasses.dataclass(frozen=True)
class Entry:
    """The truth about a model.

    Attributes:
        expected: "same": N towers compute what one device computes; "refused": one line before
            training, exit code 2; or the one of CAUSES that verify must name.
        why: it is so, or is here.
        flags: further ones, of verify.
        quick: a normal run of the tests tries it, too.
        dataset: what it is tried on.
        under_fit: what `fit` has in its place, if that is something else.
        model: "norms:spectral" is tests.zoo.norms:spectral, as `--model` takes it.
    """

    expected: str
    why: str
    flags: str = ""
    quick: bool = False
    dataset: str = "tests.tiny:images"
    under_fit: str = ""
    model: str = ""

    @property
    def name(self) -> str:
        """Return what tells it from all others: the model, and the flags if it has some."""
        return f"{self.model} {self.flags}".strip()

    def command(self) -> list[str]:
        """Return the arguments of `towers` that try it on 2 and 3 towers."""
        usual = "--batch_size=7 --steps=2 --num_towers=2,3 --devices=cpu --json"
        own = [f"--model={MODULES}.{self.model}", f"--dataset={self.dataset}"]
        own.append("--augment=standardize")
        return ["verify", *own, *usual.split(), *self.flags.split()]


def entry(expected, why, flags="", **keywords):
    """Return a decorator that puts a model function into the zoo, with the truth about it."""

    def note(model):
        model.entries = [*getattr(model, "entries", []), Entry(expected, why, flags, **keywords)]
        return model

    return note


def found(code: int, out: str, err: str) -> tuple[str, float | None]:
    """Return what a command line found, in the words of `expected`, and the largest difference.

    Args:
        code: its exit code.
        out: what it wrote to standard output: the JSON of verify.
        err: what it wrote to standard error.
    """
    if not out.strip():
        *_, last = err.strip().splitlines() or ["nothing was said"]
        refused = code == 2 and last.startswith("towers: ") and "Traceback" not in err
        return (REFUSED if refused else f"exit code {code}: {last}"), None
    result = json.loads(out)
    largest = max(result["max_relative_difference"].values())
    if result["passed"]:
        return (SAME if code == 0 else f"passed with exit code {code}"), largest
    cause = result["first_difference"]["cause"]
    key = cause.partition(":")[0]
    return (key if key in CAUSES and code == 1 else cause), largest

"""What is said of a tower function that several towers may not compute as one device does."""

import re
from collections.abc import Iterable

import keras

from towers.builder.draws import SEEN, SEEN_OPS
from towers.builder.layers import NO_LAYER, layer_of

# Ops whose numbers do not follow the example, and those that run Python.
_RANDOM = re.compile(
    r"(Stateless|Stateful)?(Random(Uniform|Normal|StandardNormal|Shuffle|Gamma|Binomial|Poisson)"
    r"(?!Queue|Grad)|Multinomial|(Parameterized)?TruncatedNormal)"
    r"|Stateful(Uniform|StandardNormal)|Rng(ReadAnd)?Skip"
)
_PYTHON = re.compile(r"(Eager)?PyFunc")


def random_ops(ops: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each layer whose draws do not follow the example.

    Args:
        ops: (name, type) of those that run in a tower.
    """
    lines = set()
    for name, kind in ops:
        if _PYTHON.match(kind):
            lines.add(
                f"python code: layer {layer_of(name)} calls Python while it runs ({kind}), of "
                "which nothing is known; write it in TensorFlow or keras.ops"
            )
        elif _RANDOM.match(kind) and not (kind in SEEN_OPS and SEEN in name):
            lines.add(
                f"random op: layer {layer_of(name)} draws by {kind}, whose numbers do not follow "
                "the example; draw by keras.random.uniform, normal or dropout, from a "
                "keras.random.SeedGenerator"
            )
    return sorted(lines)


def ambiguous(layer: str, why: str = "") -> str:
    """Return the line for a draw whose layout cannot be told."""
    return (
        f"ambiguous draw: layer {layer} draws numbers of which it cannot be told to which example "
        f"they belong{why}; draw with the batch as the first axis, from a "
        "keras.random.SeedGenerator"
    )


UNFORESEEN_DRAW = ambiguous(
    NO_LAYER, "; it drew otherwise than for a few examples, or could not be traced for those"
)


def not_put_together(variable: keras.Variable, why: str = "") -> str:
    """Return the line for state of which it cannot be told how towers put it together."""
    return (
        f"state: the variable {variable.path} is assigned other values by other towers, and how "
        f'these make one cannot be told{why}; make it with aggregation="sum" (of the changes), '
        '"mean" (by examples) or "only_first_replica", or do not assign it in training'
    )

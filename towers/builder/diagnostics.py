"""Diagnostics: lines on what several towers may compute otherwise than one device."""

import re
from collections.abc import Iterable

import keras

from towers.builder.op_names import NO_LAYER, layer_of
from towers.builder.rng import SEEN, SEEN_OPS

# Ops whose random numbers do not depend on the example, and what to write in their place.
_USE_KERAS = "draw from a keras.random.SeedGenerator, by keras.random.uniform, normal or dropout"
_UNIFORM = "make them from numbers of keras.random.uniform or normal"
_OTHERS = {
    **dict.fromkeys(
        "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal RandomShuffle "
        "Multinomial RandomGamma RandomPoisson RandomPoissonV2 ParameterizedTruncatedNormal "
        "StatefulUniform StatefulUniformInt StatefulUniformFullInt StatefulStandardNormal "
        "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulRandomBinomial RngReadAndSkip "
        "RngSkip".split(),
        _USE_KERAS,
    ),
    **dict.fromkeys(
        "StatelessMultinomial StatelessRandomGammaV2 StatelessRandomGammaV3 "
        "StatelessRandomBinomial StatelessRandomPoisson StatelessParameterizedTruncatedNormal "
        "StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal".split(),
        _UNIFORM,
    ),
}
_TABLES = re.compile(
    r"LookupTable(Insert|Remove|Import)|Queue(Enqueue|Dequeue)|(Stage|Unstage|MapStage)$|Barrier"
)
_PYTHON = frozenset("PyFunc EagerPyFunc PyFuncStateless".split())


def random_ops(ops: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each layer whose random numbers ignore the example; `ops`: (name, type)."""
    layer_ops = {
        (layer_of(name), kind)
        for name, kind in ops
        if kind in _OTHERS or kind in _PYTHON or (kind in SEEN_OPS and SEEN not in name)
    }
    lines = []
    for layer, kind in sorted(layer_ops):
        if kind in _PYTHON:
            lines.append(
                f"python code: layer {layer} calls Python while it runs ({kind}), of which nothing "
                "is known; write it in TensorFlow or keras.ops"
            )
        else:
            lines.append(
                f"random op: layer {layer} draws by {kind}, whose numbers do not follow the "
                f"example; {_OTHERS.get(kind, _USE_KERAS)}"
            )
    return lines


def tables(ops: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each layer that changes a table or a queue; see `random_ops`."""
    layer_ops = {(layer_of(name), kind) for name, kind in ops if _TABLES.match(kind)}
    return [
        f"state: layer {layer} changes a table or a queue ({kind}), which each tower does for its "
        "slice, in an order of chance; keep what it holds in a keras.Variable, or change it "
        "outside of the towers"
        for layer, kind in sorted(layer_ops)
    ]


def ambiguous(layer: str, why: str = "") -> str:
    """Return the line for a draw of unknown layout.

    Args:
        layer: path of the layer that draws.
        why: is appended to the finding, with its own punctuation.
    """
    return (
        f"ambiguous draw: layer {layer} draws random numbers that cannot be matched to examples"
        f"{why}; draw with the batch as the first axis, from a "
        "keras.random.SeedGenerator"
    )


UNFORESEEN_DRAW = ambiguous(
    NO_LAYER, "; it drew otherwise than for a few examples, or could not be traced for those"
)
LOCAL_BATCH_NORM = (
    "local BatchNorm: outside of a tf.function towers run one after the other, and each takes the "
    "moments of its own examples: make a tf.function of the step, or leave BatchNorm local "
    "(batch_norm='local')"
)


def not_joined(holder: str) -> str:
    """Return the line for a tensor that towers leave; `holder`: where it is."""
    return (
        f"side output: {holder} holds what the last tower makes of its slice, and how such values "
        "make that of the batch cannot be told: do not use it outside of the towers, or return "
        "what it is computed from, with a row for each example"
    )


def unknown_aggregation(variable: keras.Variable, why: str = "") -> str:
    """Return the line for a variable of unknown aggregation.

    Args:
        variable: that towers assign.
        why: as for `ambiguous`.
    """
    return (
        f"state: the variable {variable.path} is assigned other values by other towers, and how "
        f'these make one cannot be told{why}; make it with aggregation="sum" (of the changes), '
        '"mean" (by examples) or "only_first_replica", or do not assign it in training'
    )


def unique_lookups(path: str) -> str:
    """Return the line for a weight that is looked up by the unique numbers of a batch."""
    return (
        f"sparse gradient: the weight {path} is looked up by the unique numbers of a batch, so its "
        "gradient has a row once on one device, and once from each tower; an optimizer that "
        "squares rows, such as Adam, then computes another update (SGD does not): look it up by "
        "the examples' own numbers"
    )


def added_loss(layer: str, reason: str) -> str:
    """Return the line for a layer's loss that is neither a mean nor a sum over examples.

    Args:
        layer: path of the layer that adds it.
        reason: why the analysis of the loss failed; "" if it did not.
    """
    if reason:
        return (
            f"added loss: layer {layer} adds a loss that could not be tried ({reason}), and is "
            "taken for a mean over the examples of a batch: if it is none, the result depends on "
            "the number of towers"
        )
    return (
        f"added loss: layer {layer} adds a loss that is neither a mean nor a sum over the examples "
        "of a batch, and a tower has only those of its slice; use keras.ops.mean over them"
    )

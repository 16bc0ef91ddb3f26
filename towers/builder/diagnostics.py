"""Diagnostics: messages on what several towers may compute otherwise than one device."""

import re
from collections.abc import Iterable

import keras

from towers.builder.op_names import NO_LAYER, layer_of
from towers.builder.rng import SEEN, SEEN_OPS

# Ops whose random numbers do not depend on the example.
_RANDOM = re.compile(
    r"(Stateless)?(Parameterized)?(Random(?!Get|Index|GammaGrad)|TruncatedNormal|Multinomial)|Rng|"
    r"Stateful(Uniform|Standard|Truncated|Random)"
)
_PYTHON = re.compile(r"(Eager)?PyFunc")
_TABLES = re.compile(
    r"LookupTable(Insert|Remove|Import)|Queue(Enqueue|Dequeue)|(Stage|Unstage|MapStage)$|Barrier"
)
_EFFECTS = re.compile(
    r".*(Mutable(Dense)?HashTable|Queue|Stage|Unstage|Write\w*Summary|WriteFile|Save|Restore|Iterator)"
)
NOT_CHECKED = "not checked: "
_ONE_DEVICE = 'or train on one device, exactly: on_inexact="one_device" (--on_inexact=one_device)'


def untried(ops: Iterable[tuple[str, str]]) -> list[str]:
    """Return messages on the ops because of which a function is not run on copies.

    Args:
        ops: (name, type) of each.
    """
    lines, effects = [], set()
    for layer, seen, kind in sorted({(layer_of(name), SEEN in name, kind) for name, kind in ops}):
        if _PYTHON.match(kind):
            lines.append(
                f"python code: layer {layer} calls Python while it runs ({kind}), of which nothing "
                "is known; write it in TensorFlow or keras.ops"
            )
        elif _RANDOM.match(kind) and not (seen and kind in SEEN_OPS):
            lines.append(
                f"random op: layer {layer} draws by {kind}, whose numbers do not follow the "
                "example; draw from a keras.random.SeedGenerator, by keras.random.uniform, normal "
                "or dropout"
            )
        elif _TABLES.match(kind):
            lines.append(
                f"state: layer {layer} changes a table or a queue ({kind}), which each tower does "
                "for its slice, in an order of chance; keep what it holds in a keras.Variable, or "
                "change it outside of the towers"
            )
        elif _EFFECTS.match(kind):
            effects.add(kind)
    if effects and not lines:
        return [not_checked(f"it would have effects ({', '.join(sorted(effects))})")]
    return lines


def unclear_draw(layer: str, why: str = "") -> str:
    """Return the message for random numbers of which the batch axis is unknown.

    Args:
        layer: path of the layer that draws them.
        why: is appended to the finding, with its own punctuation.
    """
    return (
        f"random numbers: it is not clear which random numbers of layer {layer} belong to which "
        f"example{why}; draw them with the batch as the first axis, from a "
        f"keras.random.SeedGenerator, {_ONE_DEVICE}"
    )


UNFORESEEN_DRAW = unclear_draw(
    NO_LAYER, " (it draws otherwise than for a few examples, or could not be traced for those)"
)
_REMEDIES = {
    "output": "Its result for an example depends on the rest of the batch, of which each tower has "
    "only its part: compute each example from itself",
    "rows": "An optimizer that squares rows, such as Adam, computes another update (SGD does not): "
    "look the weight up by each example's own numbers",
    "state": "Compute its value from each example by itself, or do not assign it in training",
}
_OF_GRADIENTS = (
    "Something in the forward or backward pass depends on the whole batch, of which each tower has "
    "only its part: for example, clip the summed gradient (clipnorm of the optimizer) in place of "
    "a clip in tf.custom_gradient"
)


def inexact(kind: str, where: str, by: float, how: str) -> str:
    """Return the message for something that towers compute otherwise than one device.

    Args:
        kind: as `check.Difference.kind`.
        where: the layer, output, gradient or variable.
        by: the difference, relative to the largest value.
        how: the trial that shows it.
    """
    size = "in its shape" if by == float("inf") else f"by {by:.0e} of the largest value"
    return (
        f"inexact: {where} differs between towers and one device {size}, {how}. "
        f"{_REMEDIES.get(kind, _OF_GRADIENTS)}, {_ONE_DEVICE}"
    )


def unknown_aggregation(variable: keras.Variable) -> str:
    """Return the message for a variable whose value on one device towers cannot make."""
    return (
        f"inexact: the variable {variable.path} gets different values from towers, and neither "
        "their mean, the sum of their changes, their maximum nor minimum is the value of one "
        'device. Create it with aggregation="sum", "mean" or "only_first_replica" to choose one, '
        f"hand its value over with the batch, {_ONE_DEVICE}"
    )


def added_loss(layer: str) -> str:
    """Return the message for an added loss that is neither a mean nor a sum over examples."""
    return (
        f"inexact: layer {layer} adds a loss that is neither a mean nor a sum over the examples of "
        "a batch, or that the loss function changes after it is added. A tower has only its part "
        f"of the examples. Use keras.ops.mean over examples, {_ONE_DEVICE}"
    )


def state_in_python(where: str) -> str:
    """Return the message for a function that computes something else when it is traced again."""
    return (
        f"state in Python: {where} computes something else each time it is traced, for example by "
        "random.random(), NumPy's random numbers or a counter, and each tower is traced by itself; "
        "use keras.random with a SeedGenerator, or a keras.Variable"
    )


def not_joined(holder: str) -> str:
    """Return the message for a tensor that towers leave; `holder`: where it is."""
    return (
        f"side output: {holder} holds a value that towers compute from their own parts of the "
        "batch, and these do not make the value of the whole batch. Do not use it outside of the "
        "towers, or return what it is computed from, with a row for each example"
    )


def not_checked(reason: str) -> str:
    """Return the message for a function that could not be compared with one device."""
    return (
        f"{NOT_CHECKED}{reason}. Whether towers compute what one device computes is therefore not "
        "known; `towers verify`, or builder.check on other rows, compares them"
    )


def is_unchecked(line: str) -> bool:
    """Return whether a message says that something was not checked."""
    return line.startswith(NOT_CHECKED)


def on_one_device(line: str) -> str:
    """Return the message for a function that runs on one device because towers would differ."""
    return f"runs on one device, as on_inexact asks for: {line}"


def made_for_towers(line: str) -> str:
    """Return the message for a tf.function that was traced for towers before they differed."""
    return (
        f"{line}. Only real rows show it, and the tf.function is already made for towers: make it "
        "with a TowerBuilder of one device"
    )

"""Checks that targets, final activation and metrics of an output match its loss.

Looked for is what would train silently, and wrong; Keras itself refuses what it cannot compute.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import keras
import numpy as np

from towers.errors import InputError
from towers.formatting import first_of
from towers.training.step.output_activation import OutputActivation

# Losses of probabilities, with the activation that makes them.
_PROBABILITIES = {
    "binary_crossentropy": "sigmoid",
    "binary_focal_crossentropy": "sigmoid",
    "categorical_crossentropy": "softmax",
    "categorical_focal_crossentropy": "softmax",
    "sparse_categorical_crossentropy": "softmax",
    "categorical_generalized_cross_entropy": "softmax",
    "kl_divergence": "softmax",
}
_WITHOUT_LOGITS = ("categorical_generalized_cross_entropy", "kl_divergence")
_SPARSE = ("sparse_categorical_crossentropy", "categorical_generalized_cross_entropy")
_ONE_HOT = ("categorical_crossentropy", "categorical_focal_crossentropy")
_BINARY = ("binary_crossentropy", "binary_focal_crossentropy")
_MASKS = ("dice", "tversky")
_NUMBERS = (
    "mean_squared_error",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_logarithmic_error",
    "huber",
    "log_cosh",
    "poisson",
)
# These broadcast silently.
_ELEMENTWISE = (*_NUMBERS, *_MASKS, "cosine_similarity", "kl_divergence", "hinge", "squared_hinge",
                "categorical_hinge")  # fmt: skip
_SLACK = 0.01  # rounding and resizing overshoot a little
_RANGES = {"softmax": (0, 1), "sigmoid": (0, 1), "tanh": (-1, 1), "relu": (0, float("inf"))}


@dataclasses.dataclass(frozen=True)
class LossInput:
    """The inputs of a loss. Shapes have a batch axis, and None for unknown sizes."""

    loss: keras.Loss
    target: int | None  # index of y among the leaves of the data's y; None: it is computed
    y: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    masked: bool

    @property
    def kind(self) -> str:
        """Name of the Keras function that the loss computes; "" for a loss of the user's."""
        function = getattr(self.loss, "fn", None)
        modules = type(self.loss).__module__, getattr(function, "__module__", None) or ""
        is_keras = all(module.partition(".")[0] == "keras" for module in modules)
        return function.__name__ if is_keras else ""


@dataclasses.dataclass(frozen=True)
class OutputCheck:
    """Checks one output, its targets and its loss."""

    named: str  # the flag at the beginning of messages
    name: str  # of the output, "" if it is the only one
    inputs: LossInput
    ending: OutputActivation
    values: np.ndarray | None  # targets of a batch, None if they are unknown or no numbers
    weighted: bool  # whether sample weights or a mask may exclude targets
    num_classes: int = 0  # of all targets, 0 if unknown
    no_classes: str = ""  # why integer targets are no classes, see `Data`
    class_names: Sequence[str] = ()
    warnings: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> list[str]:
        """Return warnings; raise InputError for a certain mistake."""
        kind, values = self.inputs.kind, self.values
        if kind and self.ending.activation == "softmax" and self.inputs.outputs[1:][-1:] == (1,):
            self._refuse(
                f"{self.output} is a softmax of 1 unit, which always gives 1: take "
                'activation="sigmoid", or more units'
            )
        if kind in _ELEMENTWISE:
            self._check_shapes()
        if kind in _PROBABILITIES:
            self._check_activation()
        if values is not None:
            if kind in _SPARSE:
                self._check_classes(values)
            elif kind in (*_BINARY, *_MASKS):
                self._check_zeros_and_ones(values)
            if kind in (*_ONE_HOT, *_BINARY):
                self._check_several_labels(values)
            if kind in _NUMBERS:
                self._check_numbers(values)
        return self.warnings

    @property
    def output(self) -> str:
        """Name of the output in messages."""
        return f"output {self.name!r}" if self.name else "the output"

    def _refuse(self, reason: str) -> None:
        raise InputError(f"{self.named}: {reason}")

    def _warn(self, reason: str) -> None:
        self.warnings.append(f"{self.named}: {reason}")

    def _check_shapes(self) -> None:
        """Raise InputError for targets that would be broadcast."""
        y, outputs = self.inputs.y, self.inputs.outputs
        if len(y) == len(outputs) + 1 and y[-1] == 1:  # Keras takes an axis of size 1 away
            outputs = (*outputs, 1)
        elif len(outputs) == len(y) + 1 and outputs[-1] == 1:
            y = (*y, 1)
        pairs = zip(y[1:], outputs[1:], strict=False)
        if len(y) != len(outputs) or not all(None in pair or pair[0] == pair[1] for pair in pairs):
            advice = "let the model give outputs of the targets' shape"
            if len(y) == 2 >= len(outputs) and y[1] != 1:
                advice = f"give the last layer {y[1]} units"
            elif len(y) <= 2 == len(outputs):
                advice = "give the last layer 1 unit, or a target for each of its units"
            self._refuse(
                f"targets of shape {shape_of(self.inputs.y)}, and {self.output} has shape "
                f"{shape_of(self.inputs.outputs)}; {self.inputs.kind} needs both the same: {advice}"
            )

    def _check_activation(self) -> None:
        """Check that the output has probabilities or logits as the loss needs them."""
        kind, activation, layer = self.inputs.kind, self.ending.activation, self.ending.layer
        wanted = _PROBABILITIES[kind]
        if getattr(self.inputs.loss, "from_logits", False):
            if activation in ("softmax", "sigmoid"):
                self._warn(
                    f"{self.output} ends in a {activation}, and the loss has from_logits=True, so "
                    f"it takes the {wanted} itself: it will learn badly; take the {activation} off "
                    "the last layer, or from_logits=True off the loss"
                )
        elif activation == "linear" and layer:
            change = f'give it activation="{wanted}"'
            if kind not in _WITHOUT_LOGITS:
                name = "".join(part.title() for part in kind.split("_"))
                change += f", or the loss from_logits=True: keras.losses.{name}(from_logits=True)"
                if self.named.startswith("--loss") and kind == _SPARSE[0]:
                    change += ", which is the loss without --loss"
            self._refuse(
                f"{self.output}, of layer {layer}, has no activation, and {kind} takes "
                f"probabilities: {change}"
            )
        elif activation in ("relu", "tanh") and layer:
            self._warn(
                f"{self.output}, of layer {layer}, ends in a {activation}, and {kind} takes "
                f'probabilities: give it activation="{wanted}"'
            )
        elif activation == "sigmoid" and wanted == "softmax" and kind != "kl_divergence":
            self._warn(
                f"{self.output} ends in a sigmoid, and {kind} takes probabilities that add up to "
                '1: take activation="softmax", or, where an example has several labels, '
                "binary_crossentropy"
            )

    def _check_classes(self, values: np.ndarray) -> None:
        """Raise InputError for class numbers without an output."""
        kind, size = self.inputs.kind, self.inputs.outputs[-1]
        if size is None:
            return
        if values.dtype.kind == "f" and np.any(broken := values != np.floor(values)):
            self._refuse(
                f"targets of {self.output} such as {values[broken][0]:g} are no whole numbers, and "
                f"{kind} takes the number of the class: for numbers take mean_squared_error"
            )
        ignored = getattr(self.inputs.loss, "ignore_class", None)
        bad = np.unique(values[(values < 0) | (values >= size)]).astype(np.int64)
        bad = bad[bad != ignored]
        if bad.size:
            advice = f"give the last layer {bad[-1] + 1} units or more"
            if bad[0] < 0 or bad[-1] == 255:
                advice = f"if {bad[0]} means no class, give the loss ignore_class={bad[0]}"
            elif bad[0] == size and values.min() == 1:
                advice = f"count them from 0, or give the last layer {size + 1} units"
            self._refuse(
                f"there are targets {', '.join(map(str, bad[:3]))}{', ...' * (bad.size > 3)}, and "
                f"{self.output} has {size} units, for classes 0..{size - 1}: {advice}"
            )
        if self.num_classes > size and ignored is None:
            self._refuse(
                f"the targets are of {self.num_classes} classes, and {self.output} has {size} "
                f"units: give the last layer {self.num_classes}"
            )
        if self.no_classes and ignored is None:
            self._refuse(self.no_classes)

    def _check_zeros_and_ones(self, values: np.ndarray) -> None:
        """Raise InputError for targets outside of 0..1, unless they may be excluded."""
        kind, least, most = self.inputs.kind, float(values.min()), float(values.max())
        if self.weighted or not np.isfinite([least, most]).all() or (least >= 0 and most <= 1):
            return
        advice = "bring them there, or take a loss for numbers, such as mean_squared_error"
        if most == 255:
            advice = "divide masks by 255"
        elif kind in _BINARY and least == 0 and np.array_equal(values, np.floor(values)):
            advice = (
                "for numbers of classes take sparse_categorical_crossentropy, "
                f"and {int(most) + 1} units"
            )
        self._refuse(
            f"targets of {self.output} go from {least:g} to {most:g}, and {kind} takes 0..1: "
            f"{advice}"
        )

    def _check_several_labels(self, values: np.ndarray) -> None:
        """Warn of multi-label targets of a softmax."""
        one_class = self.inputs.kind in _ONE_HOT or self.ending.activation == "softmax"
        if not one_class or getattr(self.inputs.loss, "axis", -1) != -1 or values.ndim < 2:
            return
        if np.isin(values, (0, 1)).all() and (values.sum(axis=-1) > 1).any():
            self._warn(
                f"{self.output} has targets with several ones in a row; a softmax gives one "
                'class: take activation="sigmoid" with binary_crossentropy'
            )

    def _check_numbers(self, values: np.ndarray) -> None:
        """Warn of targets outside of the activation's range, or that stand for texts."""
        activation, names = self.ending.activation, self.class_names
        low, high = _RANGES.get(activation or "", (-np.inf, np.inf))
        least, most = float(values.min()), float(values.max())
        if not self.weighted and (least < low - _SLACK or most > high + _SLACK):
            reach = f"{low} or more" if high == np.inf else f"{low} to {high}"
            self._warn(
                f"targets of {self.output} go from {least:g} to {most:g}, and its {activation} "
                f"gives {reach}: take the {activation} off the last layer, or scale the targets"
            )
        if not all(name.isdecimal() for name in names):
            self._warn(
                f"the targets are the classes {first_of(names)}, and {self.inputs.kind} learns "
                f"their numbers, 0 to {len(names) - 1}: take {_SPARSE[0]} with {len(names)} units"
            )


_COUNTING = (
    keras.metrics.Accuracy,
    keras.metrics.BinaryAccuracy,
    keras.metrics.CategoricalAccuracy,
    keras.metrics.SparseCategoricalAccuracy,
)
# Metrics that take probabilities: their arguments, by default, and what to give for logits.
_OF_LOGITS = {
    keras.metrics.AUC: ("from_logits", False, "from_logits=True"),
    keras.metrics.BinaryAccuracy: ("threshold", 0.5, "threshold=0"),
    keras.metrics.Precision: ("thresholds", None, "thresholds=0"),
    keras.metrics.Recall: ("thresholds", None, "thresholds=0"),
}


def doubtful_metrics(one: OutputCheck, metrics: Iterable[keras.Metric]) -> list[str]:
    """Return a warning for each metric that does not suit the output.

    Args:
        one: the only output of a model, with its targets and loss.
        metrics: of the model.
    """
    kind, values, lines = one.inputs.kind, one.values, []
    broken = np.zeros(0)
    if kind in _NUMBERS and values is not None and values.dtype.kind == "f":
        broken = values[values != np.floor(values)]
    logits = one.ending.activation == "linear" and kind in _BINARY
    for metric in metrics:
        argument, default, remedy = _OF_LOGITS.get(type(metric), ("", None, ""))
        if broken.size and type(metric) in _COUNTING:
            lines.append(
                f"{one.named}: the metric {metric.name} counts classes, and the targets are "
                f"numbers such as {broken[0]:g}: take mean_absolute_error"
            )
        elif logits and remedy and metric.get_config().get(argument) == default:
            lines.append(
                f"{one.named}: the metric {metric.name} takes probabilities, and the model gives "
                f"logits: take keras.metrics.{type(metric).__name__}({remedy})"
            )
    return lines


def shape_of(shape: Sequence[int | None]) -> str:
    """Return a shape as text: "(batch, 3)"."""
    return f"({', '.join(['batch', *(str(n or '?') for n in shape[1:])])})"

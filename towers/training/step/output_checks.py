"""Checks that targets, final activation and metrics of an output match its loss."""

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
_LARGE = 100.0  # mean size of targets that take long to reach
_SLACK = 0.01  # rounding and resizing overshoot a little
_RANGES = {"softmax": (0, 1), "sigmoid": (0, 1), "tanh": (-1, 1), "relu": (0, float("inf"))}


@dataclasses.dataclass(frozen=True)
class LossInput:
    """The inputs of a loss. Shapes have a batch axis, and None for unknown sizes."""

    loss: keras.Loss
    target: int | None  # index of y among the leaves of the data's y; None: it is computed
    y: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    weights: tuple[int | None, ...] | None
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
        if not kind:
            return []
        self._check_shapes()
        self._check_weights()
        if kind in _PROBABILITIES:
            self._check_activation()
        if kind == "poisson" and self.ending.activation in ("linear", "tanh"):
            self._warn(
                f"{self.output} may be below 0, and poisson takes its logarithm: "
                'take activation="softplus"'
            )
        if values is not None:
            if kind in _SPARSE:
                self._check_classes(values)
            elif kind in (*_BINARY, *_MASKS):
                self._check_zeros_and_ones(values)
            if kind in (*_ONE_HOT, *_BINARY):
                self._check_several_labels(values)
            if kind in _NUMBERS:
                self._check_range(values)
                self._check_class_names()
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
        kind, y, outputs = self.inputs.kind, self.inputs.y, self.inputs.outputs
        both = f"targets of shape {shape_of(y)}, and {self.output} has shape {shape_of(outputs)}"
        of_classes = getattr(self.inputs.loss, "axis", -1) == -1
        if len(outputs) > 1 and outputs[-1] == 1:
            if kind in (*_SPARSE, *_ONE_HOT) and of_classes:
                self._refuse(
                    f"{self.output} has 1 unit, and {kind} needs one for each class: take more "
                    'units, or for two classes activation="sigmoid" with binary_crossentropy'
                )
            if self.ending.activation == "softmax":
                self._refuse(
                    f"{self.output} is a softmax of 1 unit, which always gives 1: take "
                    'activation="sigmoid", or more units'
                )
        if kind not in _SPARSE:
            y, outputs = _squeezed(y, outputs)
        same = _alike(y, outputs)
        numbers = _alike(y, outputs[:-1]) or _alike(y, (*outputs[:-1], 1))
        if kind in _SPARSE and same and (outputs[-1] or 0) > 1:
            sums = None if self.values is None else self.values.sum(axis=-1, dtype=np.float64)
            if sums is None or self.values.ndim < 2 or np.isclose(sums, 1).all():
                advice = f"take {_ONE_HOT[0]}"
            else:
                advice = (
                    "these have several ones in a row, or none: with binary_crossentropy and "
                    'activation="sigmoid" each output is a label of its own'
                )
            self._refuse(f"{both}; {kind} takes the number of the class: {advice}")
        elif kind in _SPARSE and not numbers:
            self._refuse(
                f"{both}; {kind} takes the number of the class, of shape "
                f"{shape_of(outputs[:-1])}: let the model give a place for each target"
            )
        elif kind in _ONE_HOT and of_classes and not same:
            advice = f"these are numbers of classes: take sparse_{_ONE_HOT[0]}"
            advice = advice if numbers else "give both the same"
            self._refuse(f"{both}; {kind} takes a number for each output: {advice}")
        elif kind in (*_BINARY, *_ELEMENTWISE) and not same:
            self._refuse(f"{both}; {kind} needs both the same: {self._same_shape(y, outputs)}")

    def _same_shape(self, y: tuple, outputs: tuple) -> str:
        """Return a remedy for targets and outputs of different shapes."""
        if max(len(y), len(outputs)) > 2:
            return "let the model give outputs of the targets' shape"
        if len(y) >= len(outputs) and y[-1:] != (1,):
            return f"give the last layer {y[-1]} units"
        if self.inputs.kind in _BINARY:
            return (
                "give the model 1 unit; or, if the targets are numbers of classes, take "
                'activation="softmax" with sparse_categorical_crossentropy'
            )
        return "give the last layer 1 unit, or a target for each of its units"

    def _check_weights(self) -> None:
        outputs = self.inputs.outputs
        if not self.inputs.weights or self.inputs.kind in _MASKS:
            return
        if self.inputs.kind not in _SPARSE:
            _, outputs = _squeezed(self.inputs.y, outputs)
        losses = outputs[:-1] if len(outputs) > 1 else outputs
        loss_shape, weights = _squeezed(losses, self.inputs.weights)
        sizes = zip(loss_shape[1:], weights[1:], strict=False)
        fit = all(weight in (1, size) or None in (size, weight) for size, weight in sizes)
        if len(loss_shape) != len(weights) or not fit:
            self._refuse(
                f"sample weights of shape {shape_of(self.inputs.weights)}, and the losses of "
                f"{self.output} have shape {shape_of(losses)}: give one weight for each of them"
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
        if (ignored := getattr(self.inputs.loss, "ignore_class", None)) is not None:
            values = values[values != ignored]
        bad = np.unique(values[(values < 0) | (values >= size)]).astype(np.int64)
        if not bad.size:
            if self.num_classes > size and ignored is None:
                self._refuse(
                    f"the targets are of {self.num_classes} classes, and {self.output} has {size} "
                    f"units: give the last layer {self.num_classes}"
                )
            if self.no_classes and ignored is None:
                self._refuse(self.no_classes)
            return
        one, first = bad.size == 1, bad[0]
        if set(np.unique(values)) <= {0, 255}:
            advice = "divide masks of 0 and 255 by 255"
        elif one and first == size and values.min() == 1:
            advice = f"count them from 0, or give the last layer {size + 1} units"
        elif one and (first < 0 or first == 255):
            advice = f"if {first} means no class, give the loss ignore_class={first}"
            advice += "" if first > 0 else "; else count from 0"
        elif first < 0:
            advice = "count them from 0"
        else:
            advice = f"give the last layer {bad[-1] + 1} units or more"
        self._refuse(
            f"there are targets {', '.join(map(str, bad[:3]))}{', ...' * (bad.size > 3)}, and "
            f"{self.output} has {size} units, for classes 0..{size - 1}: {advice}"
        )

    def _check_zeros_and_ones(self, values: np.ndarray) -> None:
        """Raise InputError for targets outside of 0..1, unless they may be excluded."""
        kind, least, most = self.inputs.kind, float(values.min()), float(values.max())
        finite = np.isfinite([least, most]).all()
        if self.weighted or not finite or (least >= 0 and most <= 1):
            return
        distinct = set(np.unique(values).tolist())
        if distinct <= {-1.0, 1.0} and kind in _BINARY:
            advice = "write 0 for -1, or take keras.losses.Hinge"
        elif distinct <= {0.0, 255.0} or (least >= 0 and most == 255):
            advice = "divide masks by 255"
        elif least >= 0 and distinct == set(map(float, range(int(most) + 1))) and kind in _BINARY:
            advice = (
                "for numbers of classes take sparse_categorical_crossentropy, "
                f"and {int(most) + 1} units"
            )
        else:
            advice = "bring them there, or take a loss for numbers, such as mean_squared_error"
        self._refuse(
            f"targets of {self.output} go from {least:g} to {most:g}, and {kind} takes 0..1: "
            f"{advice}"
        )

    def _check_several_labels(self, values: np.ndarray) -> None:
        """Warn of multi-label targets of a softmax."""
        one_class = self.inputs.kind in _ONE_HOT or self.ending.activation == "softmax"
        if not one_class or getattr(self.inputs.loss, "axis", -1) != -1:
            return
        if values.ndim > 1 and values.shape[-1] > 1 and np.isin(values, (0, 1)).all():
            if (values.sum(axis=-1) > 1).any():
                self._warn(
                    f"{self.output} has targets with several ones in a row; a softmax gives one "
                    'class: take activation="sigmoid" with binary_crossentropy'
                )

    def _check_range(self, values: np.ndarray) -> None:
        """Warn of targets outside of the activation's range."""
        activation, infinity = self.ending.activation, float("inf")
        low, high = _RANGES.get(activation or "", (-infinity, infinity))
        if self.weighted or not np.isfinite(values).all():
            return
        least, most = float(values.min()), float(values.max())
        if least < low - _SLACK or most > high + _SLACK:
            reach = f"{low} or more" if high == infinity else f"{low} to {high}"
            self._warn(
                f"targets of {self.output} go from {least:g} to {most:g}, and its {activation} "
                f"gives {reach}: take the {activation} off the last layer, or scale the targets"
            )
        size = float(np.abs(values).mean())
        if self.inputs.kind in _NUMBERS[:2] and activation == "linear" and size > _LARGE:
            self._warn(
                f"targets of {self.output} are {size:.3g} in the mean, and outputs begin near 0, "
                "which takes long to learn: divide the targets, or let a last layer, as "
                f"keras.layers.Rescaling({10 ** round(np.log10(size))}), multiply the outputs"
            )

    def _check_class_names(self) -> None:
        """Warn of a loss for numbers whose targets stand for texts."""
        names = self.class_names
        if not all(name.isdecimal() for name in names):
            self._warn(
                f"the targets are the classes {first_of(names)}, and {self.inputs.kind} learns "
                f"their numbers, 0 to {len(names) - 1}: take {_SPARSE[0]} with {len(names)} units, "
                "or, in a table, a column of numbers by --target"
            )


_COUNTING = (
    keras.metrics.Accuracy,
    keras.metrics.BinaryAccuracy,
    keras.metrics.CategoricalAccuracy,
    keras.metrics.SparseCategoricalAccuracy,
)
# Metrics that take probabilities unless this argument is given.
_OF_LOGITS = {
    keras.metrics.AUC: "from_logits=True",
    keras.metrics.BinaryAccuracy: "threshold=0",
    keras.metrics.Precision: "thresholds=0",
    keras.metrics.Recall: "thresholds=0",
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
        if broken.size and type(metric) in _COUNTING:
            lines.append(
                f"{one.named}: the metric {metric.name} counts classes, and the targets are "
                f"numbers such as {broken[0]:g}: take mean_absolute_error"
            )
        elif logits and type(metric) in _OF_LOGITS and _takes_probabilities(metric):
            lines.append(
                f"{one.named}: the metric {metric.name} takes probabilities, and the model gives "
                f"logits: take keras.metrics.{type(metric).__name__}({_OF_LOGITS[type(metric)]})"
            )
    return lines


def _takes_probabilities(metric: keras.Metric) -> bool:
    config = metric.get_config()
    if isinstance(metric, keras.metrics.AUC):
        return not config.get("from_logits")
    threshold = config.get("threshold", config.get("thresholds"))
    return threshold in (0.5, [0.5], None) and config.get("top_k") is None


def shape_of(shape: Sequence[int | None]) -> str:
    """Return a shape as text: "(batch, 3)"."""
    return f"({', '.join(['batch', *(str(n or '?') for n in shape[1:])])})"


def _alike(a: Sequence[int | None], b: Sequence[int | None]) -> bool:
    """Return whether shapes are compatible, apart from the batch axis."""
    pairs = zip(a[1:], b[1:], strict=False)
    return len(a) == len(b) and all(None in pair or pair[0] == pair[1] for pair in pairs)


def _squeezed(a: tuple, b: tuple) -> tuple[tuple, tuple]:
    """Return shapes of equal rank, squeezed or expanded at a last axis of size 1 as in Keras."""
    if len(a) == len(b) + 1 and a[-1] == 1:
        return (a, (*b, 1)) if len(b) == 1 else (a[:-1], b)
    if len(b) == len(a) + 1 and b[-1] == 1:
        return ((*a, 1), b) if len(a) == 1 else (a, b[:-1])
    return a, b

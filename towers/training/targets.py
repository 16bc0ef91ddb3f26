"""Whether the targets of one output fit its loss, and what the output ends in."""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np

from towers.errors import InputError
from towers.training.logits import Ending

# Losses whose outputs are probabilities, with the activation that makes them; the last three know
# no `from_logits`.
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
# These broadcast without a word.
_ELEMENTWISE = (*_NUMBERS, *_MASKS, "cosine_similarity", "kl_divergence", "hinge", "squared_hinge",
                "categorical_hinge")  # fmt: skip
_SLACK = 0.01  # rounding and resizing overshoot a little
_RANGES = {"softmax": (0, 1), "sigmoid": (0, 1), "tanh": (-1, 1), "relu": (0, float("inf"))}


@dataclasses.dataclass(frozen=True)
class Pair:
    """What a loss is computed of: shapes have the batch axis, None where it is not known.

    `target` is the place of y among the leaves of the data's y; None: it is made on the way.
    """

    loss: keras.Loss
    target: int | None
    y: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    weights: tuple[int | None, ...] | None
    masked: bool

    @property
    def kind(self) -> str:
        """The name of Keras' own function that the loss computes; "" if it is the user's."""
        function = getattr(self.loss, "fn", None)
        modules = type(self.loss).__module__, getattr(function, "__module__", None) or ""
        own = all(module.partition(".")[0] == "keras" for module in modules)
        return function.__name__ if own else ""


@dataclasses.dataclass(frozen=True)
class OneOutput:
    """One output with its loss and its targets.

    `named` is the flag that a message begins with, `name` that of the output, "" if there is one.
    `values` are the targets of a batch, None if they are not known; `weighted` tells whether there
    are sample weights. `num_classes` are those of all targets, 0 if that is not known, and
    `no_classes` says why these are none, see `Data`.
    """

    named: str
    name: str
    pair: Pair
    ending: Ending
    values: np.ndarray | None
    weighted: bool
    num_classes: int = 0
    no_classes: str = ""

    def check(self) -> list[str]:
        """Return what is doubtful; raise what cannot be."""
        kind, activation = self.pair.kind, self.ending.activation
        from_logits = getattr(self.pair.loss, "from_logits", False)
        lines: list[str] = []
        if not kind:
            return lines
        self._check_shapes()
        if kind in _PROBABILITIES and not from_logits:
            lines += self._check_probabilities()
        elif kind in _PROBABILITIES and activation in ("softmax", "sigmoid"):
            lines.append(
                f"{self.named}: {self.output} ends in a {activation}, and the loss has "
                f"from_logits=True, so it takes the {_PROBABILITIES[kind]} itself: it will learn "
                f"badly; take the {activation} off the last layer, or from_logits=True off the loss"
            )
        if kind == "poisson" and activation in ("linear", "tanh"):
            lines.append(
                f"{self.named}: {self.output} may be below 0, and poisson takes its logarithm: "
                'take activation="softplus"'
            )
        if self.values is None or not self.values.size or self.values.dtype.kind not in "iufb":
            return lines
        if kind in _SPARSE:
            self._check_classes()
        elif kind in (*_BINARY, *_MASKS):
            self._check_zeros_and_ones()
        if kind in (*_ONE_HOT, *_BINARY):
            lines += self._several_labels()
        if kind in _NUMBERS:
            lines += self._out_of_reach()
        return lines

    @property
    def output(self) -> str:
        """What messages call it."""
        return f"output {self.name!r}" if self.name else "the output"

    def _refuse(self, reason: str) -> None:
        raise InputError(f"{self.named}: {reason}")

    def _check_shapes(self) -> None:
        kind, y, outputs = self.pair.kind, self.pair.y, self.pair.outputs
        axis = getattr(self.pair.loss, "axis", -1)
        both = f"targets of shape {shape_of(y)}, and {self.output} has shape {shape_of(outputs)}"
        size = outputs[-1]
        if kind in (*_SPARSE, *_ONE_HOT) and axis == -1 and len(outputs) > 1 and size == 1:
            self._refuse(
                f"{self.output} has 1 unit, and {kind} needs one for each class: take more units, "
                'or for two classes activation="sigmoid" with binary_crossentropy'
            )
        if self.ending.activation == "softmax" and len(outputs) > 1 and size == 1:
            self._refuse(
                f"{self.output} is a softmax of 1 unit, which always gives 1: take "
                'activation="sigmoid", or more units'
            )
        if kind in _SPARSE:
            if _alike(y, outputs) and (size or 0) > 1:
                other = kind.removeprefix("sparse_") if kind == _SPARSE[0] else _ONE_HOT[0]
                advice = f"take {other}"
                if self._are_one_hot() is False:
                    advice = (
                        "these have several ones in a row, or none: with binary_crossentropy and "
                        'activation="sigmoid" each output is a label of its own'
                    )
                self._refuse(f"{both}; {kind} takes the number of the class: {advice}")
            if not _alike(y, outputs[:-1]) and not _alike(y, (*outputs[:-1], 1)):
                self._refuse(
                    f"{both}; {kind} takes the number of the class, of shape "
                    f"{shape_of(outputs[:-1])}: let the model give a place for each target"
                )
        elif kind in _ONE_HOT and axis == -1:
            y, outputs = _squeezed(y, outputs)
            if not _alike(y, outputs):
                numbers = _alike(y, outputs[:-1]) or _alike(y, (*outputs[:-1], 1))
                advice = (
                    "these are numbers of classes: take sparse_" + _ONE_HOT[0] if numbers
                    else "give both the same"
                )  # fmt: skip
                self._refuse(f"{both}; {kind} takes a number for each output: {advice}")
        elif kind in (*_BINARY, *_ELEMENTWISE):
            y, outputs = _squeezed(y, outputs)
            if not _alike(y, outputs):
                self._refuse(f"{both}; {kind} needs both the same: {self._same_shape(y, outputs)}")
        self._check_weights()

    def _same_shape(self, y: tuple, outputs: tuple) -> str:
        """Return what to change where targets and outputs are not of one shape."""
        if max(len(y), len(outputs)) > 2:
            return "let the model give outputs of the targets' shape"
        if len(y) < len(outputs) or y[-1:] == (1,):
            if self.pair.kind in _BINARY:
                return (
                    "give the model 1 unit; or, if the targets are numbers of classes, take "
                    'activation="softmax" with sparse_categorical_crossentropy'
                )
            return "give the last layer 1 unit, or a target for each of its units"
        return f"give the last layer {y[-1]} units"

    def _check_weights(self) -> None:
        """Refuse sample weights that are no numbers for the losses."""
        y, outputs, weights = self.pair.y, self.pair.outputs, self.pair.weights
        if weights is None or not weights or self.pair.kind in ("", *_MASKS):
            return
        y, outputs = _squeezed(y, outputs) if self.pair.kind not in _SPARSE else (y, outputs)
        losses = outputs[:-1] if len(outputs) > 1 else outputs
        own, weights = _squeezed(losses, weights)
        same_rank = len(own) == len(weights)
        if same_rank and all(
            b in (1, a) or None in (a, b) for a, b in zip(own[1:], weights[1:], strict=True)
        ):
            return
        self._refuse(
            f"sample weights of shape {shape_of(self.pair.weights)}, and the losses of "
            f"{self.output} have shape {shape_of(losses)}: give one weight for each of them"
        )

    def _check_probabilities(self) -> list[str]:
        """Look at what ends in no probabilities where the loss takes these."""
        kind, activation, layer = self.pair.kind, self.ending.activation, self.ending.layer
        wanted = _PROBABILITIES[kind]
        if activation in ("linear", "relu", "tanh") and layer:
            is_linear = activation == "linear"
            what = "has no activation" if is_linear else f"ends in a {activation}"
            take = f"{kind} takes probabilities"
            change = f'give it activation="{wanted}"'
            if kind not in _WITHOUT_LOGITS and is_linear:
                name = "".join(part.title() for part in kind.split("_"))
                change += f", or the loss from_logits=True: keras.losses.{name}(from_logits=True)"
                if self.named.startswith("--loss") and kind == _SPARSE[0]:
                    change += ", which is the loss without --loss"
            line = f"{self.output}, of layer {layer}, {what}, and {take}: {change}"
            if is_linear:
                self._refuse(line)
            return [f"{self.named}: {line}"]
        if activation == "sigmoid" and wanted == "softmax" and kind != "kl_divergence":
            return [
                f"{self.named}: {self.output} ends in a sigmoid, and {kind} takes probabilities "
                'that add up to 1: take activation="softmax", or, where an example has several '
                "labels, binary_crossentropy"
            ]
        return []

    def _check_classes(self) -> None:
        """Refuse numbers of classes that the model has no output for."""
        kind, values, size = self.pair.kind, self.values, self.pair.outputs[-1]
        if size is None:
            return
        if values.dtype.kind == "f" and np.any(broken := values != np.floor(values)):
            self._refuse(
                f"targets of {self.output} such as {values[broken][0]:g} are no whole numbers, and "
                f"{kind} takes the number of the class: for numbers take mean_squared_error"
            )
        if (ignored := getattr(self.pair.loss, "ignore_class", None)) is not None:
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
        shown = f"{', '.join(map(str, bad[:3]))}{', ...' if bad.size > 3 else ''}"
        one, least = bad.size == 1, int(values.min())
        if set(np.unique(values)) <= {0, 255}:
            advice = "divide masks of 0 and 255 by 255"
        elif least == 1 and bad[0] == size and one:
            advice = f"count them from 0, or give the last layer {size + 1} units"
        elif one and (bad[0] < 0 or bad[0] == 255):
            advice = f"if {bad[0]} means no class, give the loss ignore_class={bad[0]}"
            advice += "" if bad[0] > 0 else "; else count from 0"
        elif bad[0] < 0:
            advice = "count them from 0"
        else:
            advice = f"give the last layer {bad[-1] + 1} units or more"
        self._refuse(
            f"there are targets {shown}, and {self.output} has {size} units, for classes "
            f"0..{size - 1}: {advice}"
        )

    def _check_zeros_and_ones(self) -> None:
        """Refuse targets outside of 0..1, unless their weight or mask may be 0."""
        kind, values = self.pair.kind, self.values
        least, most = float(values.min()), float(values.max())
        if self.weighted or self.pair.masked or (least >= 0 and most <= 1):
            return
        if not np.isfinite([least, most]).all():
            return
        found = set(np.unique(values).tolist()) if values.size else set()
        if found <= {-1.0, 1.0} and kind in _BINARY:
            advice = "write 0 for -1, or take keras.losses.Hinge"
        elif found <= {0.0, 255.0} or (least >= 0 and most == 255):
            advice = "divide masks by 255"
        elif least >= 0 and found == set(map(float, range(int(most) + 1))) and kind in _BINARY:
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

    def _are_one_hot(self) -> bool | None:
        """Tell whether each row of the targets has one 1; None if it is not known."""
        if self.values is None or not self.values.size or self.values.ndim < 2:
            return None
        return bool(np.all(np.isclose(self.values.sum(axis=-1, dtype=np.float64), 1.0)))

    def _several_labels(self) -> list[str]:
        """Tell where rows with several ones meet a softmax."""
        values = self.values
        if getattr(self.pair.loss, "axis", -1) != -1 or values.ndim < 2 or values.shape[-1] < 2:
            return []
        if not np.isin(values, (0, 1)).all() or not (values.sum(axis=-1) > 1).any():
            return []
        if self.pair.kind in _ONE_HOT or self.ending.activation == "softmax":
            return [
                f"{self.named}: {self.output} has targets with several ones in a row; a softmax "
                'gives one class: take activation="sigmoid" with binary_crossentropy'
            ]
        return []

    def _out_of_reach(self) -> list[str]:
        """Tell where an activation cannot give what the targets are."""
        bounds = _RANGES.get(self.ending.activation or "")
        values = self.values
        if bounds is None or self.weighted or self.pair.masked or not np.isfinite(values).all():
            return []
        low, high = bounds
        least, most = float(values.min()), float(values.max())
        if least >= low - _SLACK and most <= high + _SLACK:
            return []
        reach = f"{low} or more" if high == float("inf") else f"{low} to {high}"
        return [
            f"{self.named}: targets of {self.output} go from {least:g} to {most:g}, and its "
            f"{self.ending.activation} gives {reach}: take the {self.ending.activation} off the "
            "last layer, or scale the targets"
        ]


_COUNTING = (
    keras.metrics.Accuracy,
    keras.metrics.BinaryAccuracy,
    keras.metrics.CategoricalAccuracy,
    keras.metrics.SparseCategoricalAccuracy,
)
# What takes probabilities unless it is told otherwise, and how it is told.
_OF_LOGITS = {
    keras.metrics.AUC: "from_logits=True",
    keras.metrics.BinaryAccuracy: "threshold=0",
    keras.metrics.Precision: "thresholds=0",
    keras.metrics.Recall: "thresholds=0",
}


def doubtful_metrics(one: "OneOutput", metrics: Sequence[keras.Metric]) -> list[str]:
    """Return a line for each metric of an output whose figures would mean nothing."""
    kind, values, lines = one.pair.kind, one.values, []
    broken = np.zeros(0)
    if kind in _NUMBERS and values is not None and values.dtype.kind == "f":
        broken = values[values != np.floor(values)]
    logits = one.ending.activation == "linear" and kind in _BINARY
    for metric in metrics:
        change = _OF_LOGITS.get(type(metric))
        if broken.size and type(metric) in _COUNTING:
            lines.append(
                f"{one.named}: the metric {metric.name} counts classes, and the targets are "
                f"numbers such as {broken[0]:g}: take mean_absolute_error"
            )
        elif logits and change and _takes_probabilities(metric):
            lines.append(
                f"{one.named}: the metric {metric.name} takes probabilities, and the model gives "
                f"logits: take keras.metrics.{type(metric).__name__}({change})"
            )
    return lines


def _takes_probabilities(metric: keras.Metric) -> bool:
    config = metric.get_config()
    threshold = config.get("threshold", config.get("thresholds"))
    if isinstance(metric, keras.metrics.AUC):
        return not config.get("from_logits")
    return threshold in (0.5, [0.5], None) and config.get("top_k") is None


def shape_of(shape: Sequence[int | None]) -> str:
    """Return "(batch, 3)", whatever the size of the batch."""
    return f"({', '.join(['batch', *(str(n or '?') for n in shape[1:])])})"


def _alike(a: Sequence[int | None], b: Sequence[int | None]) -> bool:
    """Tell whether shapes may be the same, but for the number of examples."""
    pairs = zip(a[1:], b[1:], strict=False)
    return len(a) == len(b) and all(None in pair or pair[0] == pair[1] for pair in pairs)


def _squeezed(a: tuple, b: tuple) -> tuple[tuple, tuple]:
    """Return shapes as Keras makes them to be of one rank, where the last size of one is 1."""
    if len(a) == len(b) + 1 and a[-1] == 1:
        return (a, (*b, 1)) if len(b) == 1 else (a[:-1], b)
    if len(b) == len(a) + 1 and b[-1] == 1:
        return ((*a, 1), b) if len(a) == 1 else (a, b[:-1])
    return a, b

"""What a run's model is trained to do: the seam between a run and the kinds of models.

A run's loop, its checkpoints and its pages know a task, and not what the loss is:

* `classification.Classification`: a model that gives logits, and labels. Each example has its loss,
  and nothing but gradients leaves the towers.
* `compiled.Compiled`: a compiled Keras model is the whole specification. Its own `train_step` and
  `test_step` are traced over towers.

A batch is (example, draws): what the data set gives out, (x, y) or (x, y, sample_weight), each any
structure of tensors with an axis for the examples.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.builder.tower import TowerBuilder
from towers.data import Data, Split, augment
from towers.errors import InputError
from towers.options.run import Options
from towers.training.evaluation import Evaluation
from towers.training.masters import VARIABLES, Masters

Stop = Callable[[], bool]
_DIRECTIONS = ("max", "min")


class Task(abc.ABC):
    """What a model is trained to do, and how that is measured.

    Attributes:
        masters: what a step changes.
        placements: where the masters may lie, see `Options.variables`.
        on_update: is told, while a step is traced, of (gradients, weights) of each update.
    """

    masters: Masters
    placements: Sequence[str] = VARIABLES
    on_update: Callable[[list[Any], Sequence[Any]], None] | None = None

    def __init__(self, builder: TowerBuilder, model: keras.Model, options: Options, data: Data):
        """Set the parts of the run."""
        self.builder, self.model, self.options, self.data = builder, model, options, data

    @abc.abstractmethod
    def make_train_step(self, learning_rate: Callable) -> Callable:
        """Return `train_step(example, draws, measured=None)`: one update, to be compiled.

        It returns a dict of tensors with the scalars that `step_names` has; with `measured`, a bool
        scalar that tells whether norms are wanted, also what `tower_stats.measured_shapes` and
        `timed_shapes` name. And the gathered gradients of the data's loss, in the order of the
        trainable variables; None where they are not to be had. `learning_rate` gives that after a
        number of examples.
        """

    @property
    @abc.abstractmethod
    def step_names(self) -> Sequence[str]:
        """What a step returns in any case; "loss", "learning_rate" among it."""

    @property
    @abc.abstractmethod
    def rate_is_set(self) -> bool:
        """Whether the run sets the learning rate in each step; else its optimizers have it."""

    def num_skipped(self) -> int | None:
        """Return how many of all steps made no update; None where none is ever left out.

        Of a model's own step that makes several updates it is not known, and 0.
        """
        optimizers = self.masters.optimizers
        scaled = any(getattr(own, "dynamic_scale", None) is not None for own in optimizers)
        if not scaled and self.masters.loss_scale is None and self.options.on_nan != "skip":
            return None
        made = optimizers[0].iterations if optimizers else self.masters.step
        return max(int(self.masters.step.numpy()) - int(made.numpy()), 0)

    def finish(self) -> bool:
        """Do what comes after the last step, once; return whether a master variable changed."""
        return False

    @abc.abstractmethod
    def tower_function(self, *batch: Any) -> Any:
        """Return rows, one for each example, of what a tower computes of (*example, draws)."""

    @abc.abstractmethod
    def loss(self, *batch: Any) -> tf.Tensor:
        """Return the loss of (*example, draws) on one device: a scalar, or one of each example."""

    @abc.abstractmethod
    def gradients(self, *batch: Any) -> list[Any]:
        """Return the gradients of the data's loss, gathered from all towers; nothing is assigned.

        They come in the order of the trainable variables, None for one that the loss does not use.
        """

    @abc.abstractmethod
    def make_evaluator(self, split: Split) -> Callable[[Stop], Evaluation | None]:
        """Return `evaluator(stop)`, which evaluates the master variables as they are at the call.

        `stop` is asked before each batch; when it says True, the evaluator returns None. What is
        compiled is made once and kept.
        """

    @abc.abstractmethod
    def eval_arrays(self, example: Any, counted: tf.Tensor) -> dict[str, np.ndarray]:
        """Return what an evaluation of one batch adds up, by name, to be compared."""

    @abc.abstractmethod
    def about(self) -> str:
        """Return in a few words what the model is trained to do."""

    @abc.abstractmethod
    def about_update(self) -> dict[str, str]:
        """Return what the rule book says of this run: "decay", "scale", "clips" and "clock"."""

    @abc.abstractmethod
    def metric_directions(self) -> Mapping[str, str | None]:
        """Return {metric: "max" or "min", whichever is better, or None if nobody knows}."""

    def inputs(self, x: Any, draws: tf.Tensor | None) -> Any:
        """Return what the model is called with: of images for training, if there are draws.

        Images become floats, also if nothing else happens to them; other data stay as they are, but
        for the precision of floats.
        """
        kind, dtype = self.options.augment, self.options.input_dtype
        if self.data.image_shape is None:
            return self.cast(x)
        if draws is None:
            return augment.eval_images(x, kind, dtype)
        return augment.train_images(x, draws, kind, dtype)

    def image_dtype(self) -> tf.DType | str | None:
        """Return what images become before the model sees them; None: they stay what they are."""
        return self.options.input_dtype

    def cast(self, structure: Any) -> Any:
        """Return a structure of tensors whose floats are of the run's precision for losses."""
        dtype = tf.as_dtype(self.options.input_dtype)
        return tf.nest.map_structure(
            lambda t: tf.cast(t, dtype) if t.dtype.is_floating and t.dtype != dtype else t,
            structure,
        )

    def objective(self) -> tuple[str, str]:
        """Return the metric that says which evaluation is best, and "max" or "min".

        Raises:
            InputError: `options.objective` is no metric of this task, or nobody knows whether it is
                better when it is higher.
        """
        known = self.metric_directions()
        if not self.options.objective:
            found = [name for name in known if name != "loss" and known[name]]
            rest = "loss" if "loss" in known else next(iter(known))
            name = "accuracy" if "accuracy" in found else next(iter(found), rest)
            return name, known[name] or "min"
        given, _, name = self.options.objective.rpartition(":")
        name = name.removeprefix("val_").removeprefix("validation_").removeprefix("test_")
        name = {n.lower(): n for n in known}.get(name.lower(), name)  # Keras calls one AUC, or auc
        if given not in ("", *_DIRECTIONS) or name.removesuffix("_ema") not in known:
            raise InputError(
                f"--objective={self.options.objective}: allowed are {', '.join(known)}, with max: "
                "or min: before it if need be"
            )
        direction = given or known[name.removesuffix("_ema")]
        if direction is None:
            raise InputError(
                f"--objective={name}: whether more of it is better is not known; type "
                f"--objective=max:{name} or min:{name}"
            )
        return name, direction

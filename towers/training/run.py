"""What training and evaluation both stand on: towers, data, model and master variables of a run."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from towers import data, devices, tf_private
from towers.builder.rehearsal import Rehearsal
from towers.builder.tower import TowerBuilder
from towers.data import Data, augment
from towers.errors import InputError, RunError
from towers.graphs.placement import Op, short
from towers.options.run import Options
from towers.training import model
from towers.training.masters import Masters, Replica, copy, move, shard
from towers.training.step import make_loss_fn, make_train_loop, make_train_step
from towers.training.update import make_optimizer

DEFAULT_EPOCHS = 10.0


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run, built from its options.

    Attributes:
        builder: where the towers are.
        data: training and test set.
        masters: model, optimizer and all else that changes.
        total_epochs: what the schedules go over.
        total_examples: where the run ends, unless `max_steps` ends it before.
        doubts: what the builder says of the towers' function, while it is traced.
    """

    options: Options
    builder: TowerBuilder
    data: Data
    masters: Masters
    total_epochs: float
    total_examples: int
    doubts: list[str] = dataclasses.field(default_factory=list)

    def train_loop(self, *, telemetry: bool = True) -> Callable:
        """Return `step.make_train_loop` of this run."""
        self._check_compiled()
        return make_train_loop(
            self.builder,
            self.masters,
            self.options,
            train_size=self.data.train.size,
            total_epochs=self.total_epochs,
            telemetry=telemetry,
        )

    def train_step(self) -> Callable:
        """Return `step.make_train_step` of this run."""
        self._check_compiled()
        return make_train_step(
            self.builder,
            self.masters,
            self.options,
            train_size=self.data.train.size,
            total_epochs=self.total_epochs,
        )

    def rehearse(self, batch: Sequence[tf.Tensor]) -> Rehearsal:
        """Return what is known of the towers' function, tried on a batch of a step.

        To be called before the step is traced, which else tries it on made-up examples.
        """
        if len(self.builder.devices) * self.builder.accumulate_steps == 1:
            return Rehearsal()
        return self.builder.rehearse(make_loss_fn(self.masters, self.options), *batch)

    def _check_compiled(self) -> None:
        """Refuse BatchNorm over all towers where each is compiled; evaluation never is.

        Raises:
            InputError: the model has such a layer.
        """
        if not self.builder.jit_compile or len(self.builder.devices) == 1:
            return
        sync = self.options.batch_norm == "sync"
        for layer in tf_private.layers_of(self.masters.model):
            is_norm = isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
            if is_norm and (sync or layer.synchronized):
                alone = f"build layer {layer.path} without synchronized=True"
                raise InputError(
                    "--jit_compile: each tower is compiled as a whole, and BatchNorm over all "
                    f"towers meets in its middle: {'type --batch_norm=local' if sync else alone}"
                )

    def master_devices(self) -> list[str]:
        """Return the devices on which master variables may be."""
        towers = {"sharded": self.builder.devices, "replicated": self.builder.devices[:1]}
        return [self.builder.gather_device, *towers.get(self.options.variables, [])]

    def steps_left(self, step: int, examples: int) -> int:
        """Return how many steps remain after `step` steps and `examples` examples."""
        left = math.ceil((self.total_examples - examples) / self.options.batch_size)
        if self.options.max_steps:
            left = min(left, self.options.max_steps - step)
        return max(left, 0)


def prepare(options: Options) -> Run:
    """Build what `options` describe.

    Raises:
        InputError: a device, the data or the model cannot be had as the options say.
        RunError: the data set cannot be read, or a GPU does not compute.
    """
    names, dataset = find(options)
    return assemble(options, names, dataset)


def find(options: Options) -> tuple[list[str], Data]:
    """Return the towers' devices and the data set.

    Raises:
        InputError: a device or the data cannot be had as the options say.
        RunError: the data set cannot be read, or a GPU does not compute.
    """
    devices.configure(**dataclasses.asdict(options.gpu_options()))
    devices.try_out()
    return devices.tower_devices(options.num_towers, options.devices), load_data(options)


def load_data(options: Options, say: Callable[[str], None] | None = None) -> Data:
    """Return the data set.

    Args:
        options: of the run.
        say: prints a line. With it nothing is downloaded: images drawn in code stand in for
            CIFAR-10 where that is not at hand, since what is to be found out depends on no image.

    Raises:
        InputError: the data set cannot be had.
        RunError: the data set cannot be read.
    """
    name, folder = options.dataset, options.data_dir or None
    with one_line_errors(options):
        if say and not data.is_there(name, folder):
            say("data        cifar10 is not at hand: shapes, drawn in code, stand in for it")
            return data.load("shapes")
        return data.load(name, folder, options.image_height_width())


def assemble(
    options: Options,
    device_names: Sequence[str],
    dataset: Data,
    *,
    loss_scaling: bool | None = None,
    exact: bool = False,
) -> Run:
    """Build a run on these devices with this data.

    Args:
        options: of the run.
        device_names: one for each tower.
        dataset: what it trains on.
        loss_scaling: whether there is a loss scale; None: if the precision needs one.
        exact: in float64, layers that ask for another floating type get float64, too.

    Raises:
        InputError: the model cannot be had as the options say.
    """
    doubts: list[str] = []
    builder = TowerBuilder(
        device_names,
        batch_norm=options.batch_norm,
        accumulate_steps=options.accumulate_steps,
        gather_at_variables=options.variables == "sharded",
        jit_compile=options.jit_compile,
        on_doubt=doubts.append,
    )
    image_shape = augment.output_shape(dataset.image_shape, options.augment)
    with one_line_errors(options), tf_private.named_as_in_a_new_process():
        network = model.build(
            options.model,
            options.model_keywords(),
            num_classes=dataset.num_classes,
            image_shape=image_shape,
            dtype=options.dtype,
            seed=options.seed,
            exact=exact,
        )
        _check_model(network, options.model)
        if loss_scaling is None:
            loss_scaling = options.dtype == "mixed_float16"
        masters = _make_masters(network, device_names, options, loss_scaling)
    size = dataset.train.size
    if options.num_epochs or not options.max_steps:
        total_epochs = options.num_epochs or DEFAULT_EPOCHS
        total_examples = max(round(total_epochs * size), 1)
    else:
        total_examples = options.max_steps * options.batch_size
        total_epochs = total_examples / size
    return Run(options, builder, dataset, masters, total_epochs, total_examples, doubts)


def _make_masters(
    network: keras.Model, device_names: Sequence[str], options: Options, loss_scaling: bool
) -> Masters:
    """Put the master variables where `options.variables` says, with their optimizer."""
    weights, copies = network.trainable_variables, []
    if options.variables == "sharded":
        shard(weights, device_names)
    if options.variables == "replicated":
        for weight in weights:
            move(weight, device_names[0])
    optimizer = make_optimizer(weights, options)  # it knows variables by where they are now
    if options.variables == "replicated":
        for name in device_names[1:]:
            twins = copy(weights, name)
            copies.append(Replica(twins, make_optimizer(twins, options), name))
    return Masters(
        network,
        optimizer,
        ema=options.ema_decay > 0,
        loss_scaling=loss_scaling,
        copies=copies,
    )


# What TensorFlow puts around the sentence that says what is wrong.
_NOISE = re.compile(
    r"(?m)^Graph execution error.*|^Detected at node.*|^<stack.*|.*root error\(s\) found.*"
    r"|\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*|\(\d\) [A-Z_]+:|assertion failed:"
    r"|InputError: |Error in user-defined function passed to .*? with iterator: \S+ "
)


# TensorFlow's own words without soft placement, of an op in a graph or of one that runs at once.
_DEVICE_REFUSED = re.compile(
    r"Cannot assign a device for operation (?P<op>\S+?):.*explicitly assigned to (?P<device>\S+)"
    r"|Could not satisfy device specification '(?P<specification>\S+)'",
    re.DOTALL,
)

# XLA's own words of an op that it has not.
_XLA_REFUSED = re.compile(
    r"unsupported operations .*?: (?P<op>\w+) \(.*?\{\{node (?P<name>\S+?)\}\}"
)


def _no_device(refusal: re.Match) -> str:
    """Return the line for a device that does not exist, with those that do."""
    there = [short(device.name) for device in tf.config.list_logical_devices()]
    name = refusal["op"] or ""
    what = f"layer {Op(name, '', '', '').layer}" if name else "the model"
    asked = short(refusal["device"] or refusal["specification"])
    return (
        f"--allow_soft_placement=false: {what} asks for {asked}, which is not there or cannot run "
        f"it; TensorFlow has {', '.join(there)}: let the model choose no device, or leave the flag "
        "out"
    )


@contextlib.contextmanager
def one_line_errors(options: Options) -> Iterator[None]:
    """Turn TensorFlow's errors that the user can mend into one line.

    Raises:
        InputError: the model asks for a device that does not exist, without soft placement.
        RunError: the data set, which may be a pipeline of the user's own, cannot be read, the
            event files cannot be written, or XLA cannot compile the model.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if refusal := _DEVICE_REFUSED.search(str(error)):
            raise InputError(_no_device(refusal)) from None
        if refusal := _XLA_REFUSED.search(str(error)):
            layer = Op(refusal["name"], "", "", "").layer
            raise RunError(
                f"--jit_compile: XLA cannot compile {refusal['op']}, of layer {layer}: leave the "
                "flag out, or do it without that op"
            ) from None
        if "IteratorGetNext" in str(error):
            what = f"--dataset={options.dataset} cannot be read"
        elif "SummaryWriter" in str(error):
            what = f"--train_dir={options.train_dir} cannot be written"
        elif "tf2xla" in str(error):
            what = "--jit_compile: XLA cannot compile the towers"
        else:
            raise
        lines = [line.strip() for line in _NOISE.sub("", str(error)).splitlines()]
        reason = next(filter(None, lines), type(error).__name__)
        raise RunError(f"{what}: {reason[:300]}") from None


def _check_model(network: keras.Model, name: str) -> None:
    """Refuse a model that cannot be trained.

    Raises:
        InputError: it has no weights to train.
    """
    if not network.trainable_variables:
        raise InputError(f"--model={name} has no trainable weights: there is nothing to train")

"""The options of a run in parts: what each part of the library is given of them.

Each field is a flag of the command line. `run.Options` has all of them, checked; `Options.part`
makes one of these classes from it.
"""

import contextlib
import dataclasses
import functools
import re
from typing import Any, NamedTuple

from towers.errors import InputError
from towers.options.fields import check_values, group, parse_numbers

SCHEDULES = ("constant", "step", "linear", "cosine", "onecycle")
DTYPES = ("float32", "float64", "mixed_bfloat16", "mixed_float16")
OPTIMIZERS = (
    "sgd", "momentum", "nesterov", "adam", "adamw", "adamax", "nadam", "lion", "lamb", "rmsprop",
    "adagrad", "adadelta", "muon",
)  # fmt: skip

AUGMENTATIONS = ("tutorial", "resnet", "shift", "none", "off")
_CUTOUT = 16  # pixels, if no side is given
MOST_SKIPPED = 10  # steps in a row that are not finite, with --on_nan=skip

_MEMORY = ("per_process_gpu_memory_fraction", "gpu_memory_limit_mib", "allow_growth")
MANY_MACHINES = "More than one machine"
MACHINES_OPTION = "workers"  # the option that names machines to connect to
PLACEMENT = (  # options of where the towers of a run or an evaluation stand
    "num_towers", "devices", MACHINES_OPTION, "towers_per_worker", "worker_timeout_seconds",
    "min_workers",
)  # fmt: skip

_model, _data = group("Model"), group("Data")
_towers = group("Towers", affects="speed")
_workers = group(MANY_MACHINES, affects="machine")
_gpus = group("GPUs", affects="machine", minimum=0)
_length, _update = group("Length", minimum=0), group("Update", minimum=0)
_when = group("When", affects="report", minimum=0)
_wrong = group("What may go wrong")
_tensorboard = group("TensorBoard", affects="report", minimum=0)


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The model, its precision, loss and metrics."""

    model: str = _model(
        "models.cnn:cnn", "Function, as module:function, that returns a Keras model: a compiled "
        "one, with its own loss, metrics and optimizer, or a classifier that returns logits.",
    )  # fmt: skip
    model_args: str = _model("", "Keyword arguments of the model function: depth=20,width=16.")
    init_from: str = _model(
        "", "Folder of another run, which gives a new run the initial weights that fit."
    )
    dtype: str = _model(
        "float32", "Precision of the towers; master weights are float32 at least.", choices=DTYPES
    )
    loss: str = _model(
        "", "Loss in place of cross entropy: a name of Keras, such as mean_squared_error, or "
        "module:function. A compiled model has its own.",
    )  # fmt: skip
    metrics: str = _model(
        "", "Metrics to report beside the loss: names of Keras, such as mae,auc, or "
        "module:function. A compiled model has its own.",
    )  # fmt: skip
    monitor: str = _model(
        "", "Metric that chooses the best evaluation, such as accuracy or max:my_score. Default: "
        "accuracy, else the first metric, else loss.",
    )  # fmt: skip

    @property
    def input_dtype(self) -> str:
        """Dtype of the images and the loss: float64 or float32."""
        return "float64" if self.dtype == "float64" else "float32"

    def model_keywords(self) -> dict[str, Any]:
        """Return `model_args` as keyword arguments: numbers, booleans or strings."""
        keywords = {}
        for part in filter(None, self.model_args.split(",")):
            name, equals, value = part.partition("=")
            if not equals or not name.strip().isidentifier():
                raise InputError(
                    f"--model_args={self.model_args}: {part!r} is not name=value, "
                    "as in --model_args=depth=20,width=16"
                )
            if name.strip() in keywords:
                raise InputError(f"--model_args={self.model_args} has two values of {name.strip()}")
            keywords[name.strip()] = _parse_argument(value.strip())
        return keywords


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """The data set, its batches, and how images are prepared."""

    dataset: str = _data(
        "shapes", "Training and test set: shapes (drawn in code), cifar10 "
        "(files in data_dir, else downloaded), FILE.npz (x_train, y_train, x_test, "
        "y_test), module:function, or folder (images in data_dir: train/CLASS/*.png, "
        "test/CLASS/*.png; jpg, bmp, gif).",
    )  # fmt: skip
    data_dir: str = _data("", "Folder of the data files.", affects="machine")
    image_size: str = _data(
        "", "Size to which the images of folder are resized: 64, or height x width, 48x64."
    )
    augment: str = _data(
        "auto", "Augmentation of training images. tutorial: crop to 3/4, flip, brightness, "
        "contrast. resnet: pad 4, crop, flip. shift: by 2 pixels, flip in every other epoch; not "
        "standardised. none: standardised only. off: as they are. auto: tutorial for shapes and "
        "cifar10; otherwise none, or off with a compiled model. resnet,cutout=8 also cuts a "
        "square of 8 pixels out of each image (16 without a number).",
    )  # fmt: skip
    test_time_flip: bool = _data(
        False, "Average the model's outputs for an image and its mirror image in evaluations and "
        "predictions.", affects="result",
    )  # fmt: skip
    validation_fraction: float = _data(
        0.0, "Part of the training set that is kept for evaluations during training. The test set "
        "is then used once, at the end.", minimum=0, maximum=0.9,
    )  # fmt: skip
    batch_size: int = _data(
        128, "Examples of one step, over all towers: the GLOBAL batch.", minimum=1
    )

    def image_height_width(self) -> tuple[int, int] | None:
        """Return `image_size` as (height, width), or None."""
        if not self.image_size:
            return None
        match = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", self.image_size, re.ASCII)
        if not match:
            raise InputError(
                f"--image_size={self.image_size}: a size in pixels is needed, as 64, or height x "
                "width, as 48x64"
            )
        return int(match[1]), int(match[2] or match[1])


@dataclasses.dataclass(frozen=True)
class DeviceOptions:
    """The towers, their variables, and the machines that they stand on."""

    num_towers: int = _towers(
        0, "Number of towers. 0: one for each visible GPU, else one on the CPU. N: exactly N GPUs, "
        "or without any GPU N logical CPU devices; with --num_gpus that is an error.", minimum=0,
        maximum=1000, alias="num_gpus",
    )  # fmt: skip
    devices: str = _towers(
        "", "Devices to use, such as /gpu:0,/gpu:2. cpu: logical CPUs. gpu: GPUs only; fail if "
        "there are none. any: GPUs if TensorFlow can use some, else two CPUs.",
    )  # fmt: skip
    placement: str = _towers(
        "report", "Ops of a tower that run elsewhere: report lists them before the first step, "
        "strict makes them an error.", affects="report", choices=("report", "strict"),
    )  # fmt: skip
    variables: str = _towers(
        "default", "Where weights are. replicated: on every tower. cpu: on the host, for a model "
        "that does not fit on one GPU. default: replicated on GPUs of this machine, spread over "
        "--workers, otherwise cpu.", choices=("default", "cpu", "replicated"),
    )  # fmt: skip
    jit_compile: bool = _towers(
        False, "Let XLA compile each tower, forward and backward; BatchNorm in more than one tower "
        "needs --batch_norm=local.",
    )  # fmt: skip
    log_device_placement: bool = _towers(
        False, "Print which device runs how many ops of each type, and write every op to "
        "train_dir/placement.tsv.", affects="report",
    )  # fmt: skip
    batch_norm: str = _towers(
        "sync", "BatchNorm's moments: sync over the global batch, the same at any number of "
        "towers; local over a tower's slice.", affects="result", choices=("sync", "local"),
    )  # fmt: skip
    accumulate_steps: int = _towers(
        1, "Number of parts in which the batch of a step is computed, one after the other: less "
        "memory, and the same update.", affects="result", minimum=1,
    )  # fmt: skip
    steps_per_loop: int = _towers(
        10, "Steps inside one call of TensorFlow; changes no number.", minimum=1
    )
    workers: str = _workers(
        "", "Machines that run `towers worker`, as host1:2222,host2:2222; or slurm, kubernetes, "
        "TF_CONFIG: those that these name. The towers are on their devices.",
    )  # fmt: skip
    towers_per_worker: int = _workers(
        0, "Towers of each worker. 0: one on each of its GPUs, else one. N: exactly N GPUs, or "
        "without any GPU N logical CPU devices.", minimum=0,
    )  # fmt: skip
    worker_timeout_seconds: float = _workers(
        15.0, "Seconds without an answer after which a worker is lost, and without contact to "
        "this program after which it is free for others.", minimum=1, maximum=86_400,
    )  # fmt: skip
    min_workers: int = _workers(
        0, "Least number of workers to train with; with fewer the run ends with code 75. 0: a new "
        "run starts with all of them, and continues with one.", minimum=0,
    )  # fmt: skip

    @property
    def elsewhere(self) -> bool:
        """Whether the towers are on other machines."""
        return bool(self.workers)


@dataclasses.dataclass(frozen=True)
class GpuOptions:
    """Which GPUs a process uses, and how. The fields are flags of the same name."""

    visible_gpus: str = _gpus(
        "", "GPUs to use, by the driver's numbers in PCI bus order: 0,2; or by name: GPU-...; "
        "none for no GPU. The rest is hidden. Default: what CUDA_VISIBLE_DEVICES leaves.",
    )  # fmt: skip
    per_process_gpu_memory_fraction: float = _gpus(
        0.0, "Part of each visible GPU's total memory to take; 0: all that is free.", maximum=1,
        example=0.4,
    )  # fmt: skip
    gpu_memory_limit_mib: int = _gpus(
        0, "MiB of each visible GPU's memory to take; 0: all that is free.", example=4096
    )
    allow_growth: bool = _gpus(
        False, "Take GPU memory as it is needed, and not all of it at the start."
    )
    allow_soft_placement: bool = _gpus(
        True, "Let TensorFlow choose another device for an op that cannot run on its own."
    )
    tf32: bool = _gpus(
        True, "Let GPUs of compute capability 8.0 and above round float32 products to TF32, as "
        "TensorFlow does by default.", affects="result",
    )  # fmt: skip
    deterministic: bool = _gpus(
        False, "Same bits for the same inputs, by slower kernels on GPUs; an op without one is an "
        "error, and seconds of towers are not measured.", affects="result",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raise InputError for values out of range and pairs that exclude each other."""
        check_values(self)
        self.chosen()

    def chosen(self) -> list[str] | None:
        """Return the entries of `visible_gpus`: [] for "none", None for ""."""
        if not self.visible_gpus:
            return None
        if self.visible_gpus.lower() == "none":
            return []
        entries = [entry.strip() for entry in self.visible_gpus.split(",")]
        if not all(re.fullmatch(r"\d+|GPU-[\w-]+", e, re.ASCII) for e in entries):
            raise InputError(
                f"--visible_gpus={self.visible_gpus}: numbers of GPUs are needed, as "
                "--visible_gpus=0,2, names as nvidia-smi -L shows them, or --visible_gpus=none"
            )
        entries = [str(int(entry)) if entry.isdecimal() else entry for entry in entries]
        return list(dict.fromkeys(entries))

    def demands(self) -> dict[str, object]:
        """Return {option: value} to set before TensorFlow starts, without defaults."""
        names = ("visible_gpus", *_MEMORY)
        return {name: value for name in names if (value := getattr(self, name))}


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
    """How long a run is, the optimizer, its schedule, and all else that an update does."""

    num_epochs: float = _length(
        0.0,
        "Passes over the training set, up to a full batch; 0: as max_steps says, else 10.",
        maximum=10**9,
    )
    max_steps: int = _length(
        0, "Step at which the run stops; 0: as num_epochs says. If both are set, whichever comes "
        "first; schedules go by num_epochs.",
    )  # fmt: skip

    optimizer: str = _update(
        "momentum", "Optimizer, of Keras; muon for kernels of any rank; or module:function that "
        "returns one.", choices=OPTIMIZERS, own=True,
    )  # fmt: skip
    learning_rate: float = _update(0.05, "Highest learning rate of the run.")
    schedule: str = _update(
        "cosine", "Schedule of the learning rate, over the epochs of the run.", choices=SCHEDULES
    )
    warmup_epochs: float = _update(
        0.0, "Epochs of the learning rate's linear rise at the start; onecycle: 0 means a quarter "
        "of the run.",
    )  # fmt: skip
    decay_epochs: str = _update(
        "", "Epochs at which schedule step multiplies the learning rate: 80,120.", numbers=True
    )
    decay_factor: float = _update(
        0.1, "Factor by which schedule step multiplies the learning rate.", maximum=1
    )
    momentum: float = _update(
        0.9, "Momentum of the optimizers momentum, nesterov and muon.", maximum=1
    )
    weight_decay: float = _update(
        0.0, "Decay of weights of two or more dimensions: added to the gradient (L2), or decoupled "
        "in adamw, lion, lamb and muon.",
    )  # fmt: skip
    ema_decay: float = _update(
        0.0, "Decay, for each 128 examples, of the weights' moving average, which is evaluated "
        "beside them; 0: no average.", maximum=1,
    )  # fmt: skip
    label_smoothing: float = _update(
        0.0, "Part of each label that is spread over all classes.", maximum=1
    )
    clip_norm: float = _update(0.0, "Largest norm of each variable's gathered gradient; 0: any.")
    clip_value: float = _update(0.0, "Largest absolute value in a gathered gradient; 0: any.")
    clip_global_norm: float = _update(
        0.0, "Largest norm of all gathered gradients together; 0: any."
    )
    on_nan: str = _wrong(
        "stop", "After an infinite or NaN loss or gradient, which makes no update: stop, and save "
        "the batch in train_dir/nan; or skip the step, at most 10 in a row.",
        choices=("stop", "skip"),
    )  # fmt: skip

    @property
    def makes_own_optimizer(self) -> bool:
        """Whether a user's function makes the optimizer, with a learning rate of its own."""
        return ":" in self.optimizer

    @property
    def most_nonfinite(self) -> int:
        """Number of steps in a row that are not finite at which the run ends."""
        return MOST_SKIPPED if self.on_nan == "skip" else 1

    def decay_boundaries(self) -> list[float]:
        """Return `decay_epochs` as numbers."""
        return parse_numbers("decay_epochs", self.decay_epochs)


@dataclasses.dataclass(frozen=True)
class DueOptions:
    """What is due when: lines, evaluations, checkpoints, histograms."""

    callbacks: str = _when(
        "", "module:function that returns a list of keras.callbacks.Callback, such as those of "
        "W&B and MLflow; several with commas. Each call then makes one step.",
    )  # fmt: skip
    log_every_steps: int = _when(
        100, "Steps from one terminal line and TensorBoard point to the next.", minimum=1
    )
    evaluate_every_epochs: float = _when(
        1.0, "Epochs from one evaluation over the whole test set to the next; 0: only at the end."
    )
    early_stopping_epochs: float = _when(
        0.0, "Epochs without a better value of the monitored metric on validation data after which "
        "the run ends; 0: never.", affects="result",
    )  # fmt: skip
    keep_best: bool = _when(
        False, "Also keep the checkpoint of the best evaluation on validation data, and test, "
        "evaluate, export and load that one.", affects="result",
    )  # fmt: skip
    checkpoint_every_steps: int = _when(
        1000, "Steps from one checkpoint to the next; there is also one after 5 minutes, at the "
        "end, and on Ctrl-C or SIGTERM; 0: only at the end and on signals.",
    )  # fmt: skip
    keep_checkpoints: int = _when(3, "Number of the newest checkpoints to keep.", minimum=1)
    stall_seconds: float = _when(
        300.0, "Seconds without a step after which the run says what it waits for; 0: never."
    )
    on_stall: str = _when(
        "wait", "What a stalled run does: wait; or stop, after saving, with exit code 76.",
        choices=("wait", "stop"),
    )  # fmt: skip
    check: str = _wrong(
        "once", "When towers are compared with one device, on examples of the run. once: after "
        "steps 1 and 100. always: after steps 1, 10, 100, 1000 and so on, if that takes less than "
        "1 % of the time. off: never.", affects="report", choices=("once", "always", "off"),
    )  # fmt: skip
    on_inexact: str = _wrong(
        "warn", "What to do if towers differ from one device. warn: say so and continue. stop: end "
        "the run. one_device: train on the first device only, which is exact. With stop and "
        "one_device the first comparison is made before the first step.",
        affects="report", choices=("warn", "stop", "one_device"),
    )  # fmt: skip
    histogram_every_epochs: float = _tensorboard(
        0.0, "Epochs from one set of histograms of the weights to the next; 0: none.",
    )  # fmt: skip
    profile_steps: str = _tensorboard(
        "", "First and last step of a profile, such as 100:110.",
    )  # fmt: skip

    def profile_range(self) -> tuple[int, int] | None:
        """Return `profile_steps` as (steps done at its start, at its end), or None."""
        if not self.profile_steps:
            return None
        match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", self.profile_steps, re.ASCII)
        if not match or int(match[1]) >= int(match[2]):
            raise InputError(
                f"--profile_steps={self.profile_steps}: two steps are needed, the first before the "
                "last, as 100:110"
            )
        return int(match[1]), int(match[2])


def _parse_argument(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


class Augmentation(NamedTuple):
    """A value of --augment: a base, and the side of a square to cut out; 0: there is none."""

    base: str
    cutout: int = 0  # pixels

    def __str__(self) -> str:
        """Return the value of --augment."""
        return f"{self.base},cutout={self.cutout}" if self.cutout else self.base


@functools.cache
def parse_augment(text: str) -> Augmentation:
    """Parse a value of --augment, such as "resnet,cutout=8"; raise InputError if it is wrong."""
    bases = "|".join(AUGMENTATIONS)
    match = re.fullmatch(rf"(auto|{bases})(\s*,\s*cutout(=0*[1-9]\d{{0,3}})?)?", text)
    if match is None:
        raise InputError(
            f"--augment={text}: allowed are auto, {', '.join(AUGMENTATIONS)}, and after one of "
            "them cutout=SIDE, such as resnet,cutout=8; SIDE is in whole pixels, 1 to 9999"
        )
    base, cutout, side = match.groups()
    return Augmentation(base, int(side[1:]) if side else _CUTOUT if cutout else 0)

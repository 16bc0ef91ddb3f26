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

AUGMENTATIONS = ("tutorial", "resnet", "shift", "standardize", "none")
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
_length = group("Length", minimum=0)
_update = group("Optimizer and schedule", minimum=0)
_when = group("Checkpoints and evaluation", affects="report", minimum=0)
_wrong = group("Failures", affects="report")
_tensorboard = group("TensorBoard", affects="report", minimum=0)


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The model, its precision, loss and metrics."""

    model: str = _model(
        "models.cnn:cnn", "module:function that returns a Keras model: a compiled one, with its "
        "own loss, metrics and optimizer, or a classifier that returns logits.",
    )  # fmt: skip
    model_args: str = _model("", "Keyword arguments for the model function: depth=20,width=16.")
    init_from: str = _model(
        "", "Folder of another run. Start with those of its weights that fit this model."
    )
    dtype: str = _model(
        "float32", "Keras' dtype policy. Weights are stored in float32 or float64.", choices=DTYPES
    )
    loss: str = _model(
        "", "Loss instead of cross entropy: a Keras name, such as mean_squared_error, or "
        "module:function. A compiled model has its own.",
    )  # fmt: skip
    metrics: str = _model(
        "", "Metrics to report besides the loss: Keras names, such as mae,auc, or "
        "module:function. A compiled model has its own.",
    )  # fmt: skip
    monitor: str = _model(
        "", "Metric that decides which evaluation is best, such as accuracy or max:my_score. "
        "Default: accuracy, otherwise the first metric, otherwise the loss.",
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
        "shapes", "Training and test set.\n"
        "shapes: synthetic images\n"
        "cifar10: the files in --data_dir, or a download\n"
        "folder: images in --data_dir, as train/CLASS/*.png and test/CLASS/*.png\n"
        "FILE.npz: arrays x_train, y_train, x_test, y_test\n"
        "module:function: your own",
    )  # fmt: skip
    data_dir: str = _data("", "Folder of the data files.", affects="machine")
    image_size: str = _data(
        "", "Size of the images for --dataset=folder: 64, or height x width, 48x64."
    )
    augment: str = _data(
        "auto", "Augmentation of training images.\n"
        "tutorial: crop to 3/4, flip, change brightness and contrast, standardize\n"
        "resnet: pad by 4 pixels, crop, flip, standardize\n"
        "shift: move by up to 2 pixels, flip in every other epoch\n"
        "standardize: only scale each image to mean 0 and variance 1\n"
        "none: leave images as they are\n"
        "auto: tutorial for shapes and cifar10, otherwise standardize, or none for a compiled "
        "model\n"
        "resnet,cutout=8 also sets a random square of 8 pixels to 0 (of 16 without a number).",
    )  # fmt: skip
    test_time_flip: bool = _data(
        False, "In evaluations and predictions, average the outputs for each image and its mirror "
        "image.", affects="result",
    )  # fmt: skip
    validation_fraction: float = _data(
        0.0, "Fraction of the training set to hold out for evaluations during training. The test "
        "set is then used once, at the end.", minimum=0, maximum=0.9,
    )  # fmt: skip
    batch_size: int = _data(
        128, "Examples in one step, divided among all towers: the global batch.", minimum=1
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
        0, "Number of towers.\n"
        "0: one on each visible GPU, or one on the CPU if there is no GPU\n"
        "N: on exactly N GPUs, or N logical CPU devices if there is no GPU; --num_gpus=N requires "
        "GPUs", minimum=0, maximum=1000, alias="num_gpus",
    )  # fmt: skip
    devices: str = _towers(
        "", "Devices to use, such as /gpu:0,/gpu:2. The other GPUs are hidden.\n"
        "cpu: logical CPU devices\n"
        "gpu: GPUs only; fail if there are none\n"
        "any: GPUs, or two CPU devices if TensorFlow can use no GPU",
    )  # fmt: skip
    placement: str = _towers(
        "report", "What to do if ops of a tower run on another device.\n"
        "report: list them before the first step\n"
        "strict: fail", affects="report", choices=("report", "strict"),
    )  # fmt: skip
    variables: str = _towers(
        "default", "Where the weights are stored.\n"
        "replicated: on every tower\n"
        "cpu: on the host, for a model that does not fit on one GPU\n"
        "default: replicated on GPUs, cpu without GPUs, spread over the machines of --workers",
        choices=("default", "cpu", "replicated"),
    )  # fmt: skip
    jit_compile: bool = _towers(
        False, "Compile the forward and backward pass of each tower with XLA. With several towers, "
        "BatchNorm requires --batch_norm=local.",
    )  # fmt: skip
    log_device_placement: bool = _towers(
        False, "Print how many ops of each type run on which device, and write the device of every "
        "op to train_dir/placement.tsv.", affects="report",
    )  # fmt: skip
    batch_norm: str = _towers(
        "sync", "Batch statistics of BatchNorm.\n"
        "sync: of the global batch, the same on any number of towers\n"
        "local: of each tower's examples", affects="result", choices=("sync", "local"),
    )  # fmt: skip
    accumulate_steps: int = _towers(
        1, "Number of microbatches in a step (gradient accumulation). They need less memory, and "
        "give the same update.", affects="result", minimum=1,
    )  # fmt: skip
    steps_per_loop: int = _towers(
        10, "Steps in one TensorFlow call. Does not change the results.", minimum=1
    )
    workers: str = _workers(
        "", "Machines that run `towers worker`, such as host1:2222,host2:2222. The towers run on "
        "their devices. slurm, kubernetes and TF_CONFIG stand for the machines of the job.",
    )  # fmt: skip
    towers_per_worker: int = _workers(
        0, "Towers on each worker.\n"
        "0: one on each of its GPUs, or one on the CPU if it has no GPU\n"
        "N: on exactly N GPUs, or N logical CPU devices if it has no GPU", minimum=0,
    )  # fmt: skip
    worker_timeout_seconds: float = _workers(
        15.0, "A worker that does not answer for this many seconds is lost. A worker that does not "
        "hear from this program for as long becomes free for others.", minimum=1, maximum=86_400,
    )  # fmt: skip
    min_workers: int = _workers(
        0, "Smallest number of workers to train with. With fewer, the run ends with exit code 75. "
        "0: a new run needs all of them to start, and continues with one.", minimum=0,
    )  # fmt: skip

    @property
    def elsewhere(self) -> bool:
        """Whether the towers are on other machines."""
        return bool(self.workers)


@dataclasses.dataclass(frozen=True)
class GpuOptions:
    """Which GPUs a process uses, and how. The fields are flags of the same name."""

    visible_gpus: str = _gpus(
        "", "GPUs to use, by number in PCI bus order (0,2) or by name (GPU-...), or none. The "
        "other GPUs are hidden. Default: CUDA_VISIBLE_DEVICES.",
    )  # fmt: skip
    per_process_gpu_memory_fraction: float = _gpus(
        0.0, "Fraction of each visible GPU's memory to use. 0: all that is free.", maximum=1,
        example=0.4,
    )  # fmt: skip
    gpu_memory_limit_mib: int = _gpus(
        0, "MiB of each visible GPU's memory to use. 0: all that is free.", example=4096
    )
    allow_growth: bool = _gpus(
        False, "Allocate GPU memory as needed, instead of all of it at the start."
    )
    allow_soft_placement: bool = _gpus(
        True, "Let TensorFlow choose another device for an op that cannot run on the requested one."
    )
    tf32: bool = _gpus(
        True, "Use TensorFloat-32 for float32 products on GPUs of compute capability 8.0 and "
        "above, as TensorFlow does by default.", affects="result",
    )  # fmt: skip
    deterministic: bool = _gpus(
        False, "Use only deterministic kernels, which are slower on GPUs. An op that has none is "
        "an error. The time of each tower is not measured.", affects="result",
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
    """How long a run is, the optimizer, its schedule, and everything else about an update."""

    num_epochs: float = _length(
        0.0,
        "Passes over the training set, rounded up to a full batch. 0: 10, unless max_steps is set.",
        maximum=10**9,
    )
    max_steps: int = _length(
        0, "Step at which the run stops. 0: set by num_epochs. If both are set, the run stops at "
        "whichever comes first; learning-rate schedules use num_epochs.",
    )  # fmt: skip

    optimizer: str = _update(
        "momentum", "A Keras optimizer, or module:function that returns one. muon is for kernels "
        "of any rank.", choices=OPTIMIZERS, own=True,
    )  # fmt: skip
    learning_rate: float = _update(0.05, "Highest learning rate of the run.")
    schedule: str = _update(
        "cosine", "Learning-rate schedule over the epochs of the run.", choices=SCHEDULES
    )
    warmup_epochs: float = _update(
        0.0, "Epochs in which the learning rate rises linearly at the start. With onecycle, 0 "
        "means a quarter of the run.",
    )  # fmt: skip
    decay_epochs: str = _update(
        "", "Epochs after which --schedule=step multiplies the learning rate: 80,120.", numbers=True
    )
    decay_factor: float = _update(
        0.1, "Factor by which --schedule=step multiplies the learning rate.", maximum=1
    )
    momentum: float = _update(
        0.9, "Momentum for the optimizers momentum, nesterov and muon.", maximum=1
    )
    weight_decay: float = _update(
        0.0, "Weight decay for weights of two or more dimensions. It is added to the gradient "
        "(L2); adamw, lion, lamb and muon decouple it.",
    )  # fmt: skip
    ema_decay: float = _update(
        0.0, "Decay, per 128 examples, of a moving average of the weights, which is evaluated too. "
        "0: no average.", maximum=1,
    )  # fmt: skip
    label_smoothing: float = _update(
        0.0, "Fraction of each label to spread over all classes.", maximum=1
    )
    clip_norm: float = _update(0.0, "Largest norm of each variable's summed gradient. 0: no limit.")
    clip_value: float = _update(0.0, "Largest absolute value in a summed gradient. 0: no limit.")
    clip_global_norm: float = _update(
        0.0, "Largest norm of all summed gradients together. 0: no limit."
    )
    on_nan: str = _wrong(
        "stop", "What to do if the loss or a gradient is infinite or NaN. The weights are not "
        "updated.\n"
        "stop: end the run, and save the batch in train_dir/nan\n"
        "skip: skip the step, up to 10 in a row", affects="result", choices=("stop", "skip"),
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
    """When things are due: lines, evaluations, checkpoints, histograms."""

    callbacks: str = _when(
        "", "module:function that returns a list of Keras callbacks, such as those of W&B and "
        "MLflow; separate several with commas. TensorFlow then makes one step per call.",
    )  # fmt: skip
    log_every_steps: int = _when(
        0,
        "Print a line and write a point to TensorBoard every this many steps. 0: every 100, and "
        "at least 20 times in a run.",
    )
    evaluate_every_epochs: float = _when(
        1.0, "Evaluate every this many epochs. 0: only at the end."
    )
    early_stopping_epochs: float = _when(
        0.0, "Stop if the monitored metric has not improved on validation data for this many "
        "epochs. 0: never.", affects="result",
    )  # fmt: skip
    keep_best: bool = _when(
        False, "Keep the checkpoint of the best evaluation on validation data, and use it for the "
        "final test, evaluate, predict and export.", affects="result",
    )  # fmt: skip
    checkpoint_every_steps: int = _when(
        1000, "Save a checkpoint every this many steps, and also every 5 minutes, at the end, and "
        "on Ctrl-C or SIGTERM. 0: only at the end and on signals.",
    )  # fmt: skip
    keep_checkpoints: int = _when(3, "How many of the newest checkpoints to keep.", minimum=1)
    stall_seconds: float = _wrong(
        300.0, "After this many seconds without a step, report what the run waits for. 0: never.",
        minimum=0,
    )  # fmt: skip
    on_stall: str = _wrong(
        "wait", "What to do if the run stalls.\n"
        "wait: keep waiting\n"
        "stop: save, and end with exit code 76", choices=("wait", "stop"),
    )  # fmt: skip
    check: str = _wrong(
        "once", "When to compare the towers with one device, on examples of the run.\n"
        "once: after steps 1 and 100\n"
        "always: after steps 1, 10, 100, 1000 and so on, if that takes less than 1 % of the time\n"
        "off: never", choices=("once", "always", "off"),
    )  # fmt: skip
    on_inexact: str = _wrong(
        "warn", "What to do if towers differ from one device.\n"
        "warn: print a warning and continue\n"
        "stop: end the run\n"
        "one_device: train on the first device only, which is exact\n"
        "With stop and one_device, the first comparison is made before the first step.",
        choices=("warn", "stop", "one_device"),
    )  # fmt: skip
    histogram_every_epochs: float = _tensorboard(
        0.0, "Write histograms of the weights every this many epochs. 0: never.",
    )  # fmt: skip
    profile_steps: str = _tensorboard(
        "", "First and last step to profile, such as 100:110.",
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
    """A value of --augment: a base, and the side of a square to cut out (0 for none)."""

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
        renamed = "; type none for images as they are" if text.startswith("off") else ""
        raise InputError(
            f"--augment={text}: allowed are auto, {', '.join(AUGMENTATIONS)}, and after one of "
            "them cutout=SIDE, such as resnet,cutout=8; SIDE is in whole pixels, 1 to 9999"
            f"{renamed}"
        )
    base, cutout, side = match.groups()
    return Augmentation(base, int(side[1:]) if side else _CUTOUT if cutout else 0)

"""The options of a run: names, defaults, ranges and help, in this one place.

The command line makes a flag of each field, `flags.cfg` holds them, and a program of your own
gives them as keyword arguments:

    from towers.options import Options
    from towers.train import train

    train(Options(train_dir="runs/mine", model="my_package.net:build", num_towers=2))
"""

import dataclasses
import numbers
import re
from typing import Any

from towers.errors import InputError

OPTIMIZERS = ("sgd", "momentum", "nesterov", "adamw")
SCHEDULES = ("constant", "step", "cosine", "onecycle")
AUGMENTATIONS = ("tutorial", "resnet", "none")
DTYPES = ("float32", "float64", "mixed_bfloat16", "mixed_float16")


def _option(default: Any, group: str, help: str, **metadata: Any) -> Any:
    return dataclasses.field(default=default, metadata=dict(group=group, help=help, **metadata))


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run is made of. Each field is a flag of the same name; its help says what it means."""

    train_dir: str = _option(
        "runs/train", "The run", "Folder of the run: checkpoints, events, flags.cfg, result.json."
    )
    overwrite: bool = _option(
        False, "The run", "Move an existing train_dir aside and start anew; else it is continued."
    )
    seed: int = _option(
        0,
        "The run",
        "Of initial weights, shuffling and augmentation.",
        minimum=0,
        maximum=2**31 - 1,
    )
    json: bool = _option(
        False, "The run", "Print the result alone, as JSON, to standard output; the rest to stderr."
    )

    model: str = _option(
        "models.cnn:cnn", "Model", "module:function that returns a Keras model giving logits."
    )
    model_args: str = _option("", "Model", "Keyword arguments of that function: depth=20,width=16.")
    dtype: str = _option(
        "float32", "Model", "Precision of the towers; master weights are float32 at least.",
        choices=DTYPES,
    )  # fmt: skip

    dataset: str = _option(
        "shapes", "Data", "shapes (drawn in code), cifar10, or module:function of your own."
    )
    data_dir: str = _option(
        "", "Data", "Where data files lie or go; default: the user's cache folder."
    )
    augment: str = _option(
        "tutorial", "Data",
        "Of training images: tutorial (crop to 3/4, flip, brightness, contrast), resnet (pad 4, "
        "crop, flip), none. Each standardises.", choices=AUGMENTATIONS,
    )  # fmt: skip
    batch_size: int = _option(
        128, "Data", "GLOBAL: all examples of one step, over all towers.", minimum=1
    )

    num_towers: int = _option(
        0, "Towers", "0: one for each visible GPU, else one on the CPU. N: exactly N GPUs, or "
        "without any GPU N logical CPU devices.", minimum=0, alias="num_gpus",
    )  # fmt: skip
    devices: str = _option(
        "", "Towers", "Devices in place of the first ones: /gpu:0,/gpu:2; or cpu for logical CPUs."
    )
    steps_per_loop: int = _option(
        10, "Towers", "Steps inside one call of TensorFlow; changes no number.", minimum=1
    )

    num_epochs: float = _option(
        0.0,
        "Length",
        "Passes over the training set; 0: as max_steps says, else 10.",
        minimum=0,
        maximum=10**9,
    )
    max_steps: int = _option(
        0, "Length", "Stop at this step; 0: as num_epochs says. With both the first ends the run, "
        "and schedules go by num_epochs.", minimum=0,
    )  # fmt: skip

    optimizer: str = _option("momentum", "Update", "Keras' own.", choices=OPTIMIZERS)
    learning_rate: float = _option(0.05, "Update", "The highest of the run.", minimum=0)
    schedule: str = _option(
        "cosine", "Update", "Of the learning rate, over the epochs of the run.", choices=SCHEDULES
    )
    warmup_epochs: float = _option(
        0.0,
        "Update",
        "Linear rise at the start; onecycle: 0 means a quarter of the run.",
        minimum=0,
    )
    decay_epochs: str = _option(
        "", "Update", "Schedule step: epochs at which the rate is multiplied: 80,120.",
        numbers=True,
    )  # fmt: skip
    decay_factor: float = _option(
        0.1, "Update", "Schedule step: what it is multiplied by.", minimum=0, maximum=1
    )
    momentum: float = _option(0.9, "Update", "Of momentum and nesterov.", minimum=0, maximum=1)
    weight_decay: float = _option(
        0.0, "Update", "On weights of two or more dimensions: added to the gradient (L2), or "
        "decoupled in adamw.", minimum=0,
    )  # fmt: skip
    ema_decay: float = _option(
        0.0, "Update", "Moving average of the weights, evaluated beside them: decay for each 128 "
        "examples; 0: none.", minimum=0, maximum=1,
    )  # fmt: skip
    clip_norm: float = _option(
        0.0, "Update", "Largest norm of each variable's gathered gradient; 0: any.", minimum=0
    )
    clip_value: float = _option(
        0.0, "Update", "Largest absolute value in a gathered gradient; 0: any.", minimum=0
    )
    clip_global_norm: float = _option(
        0.0, "Update", "Largest norm of all gathered gradients together; 0: any.", minimum=0
    )

    log_every_steps: int = _option(100, "When", "Terminal line and TensorBoard point.", minimum=1)
    evaluate_every_epochs: float = _option(
        1.0, "When", "Over the whole test set; 0: only at the end.", minimum=0
    )
    checkpoint_every_steps: int = _option(
        1000, "When", "Also at the end and on Ctrl-C or SIGTERM; 0: only then.", minimum=0
    )
    keep_checkpoints: int = _option(3, "When", "The newest ones are kept.", minimum=1)

    def __post_init__(self) -> None:
        """Refuse values out of range, by the flag's name.

        Raises:
            InputError: one line: what was given and what is allowed.
        """
        for field in dataclasses.fields(self):
            check_value(field, getattr(self, field.name))
        clips = [n for n in ("clip_norm", "clip_value", "clip_global_norm") if getattr(self, n)]
        if len(clips) > 1:
            raise InputError(
                f"--{clips[0]} and --{clips[1]} exclude each other: give one of them, 0 is off"
            )
        if self.schedule == "step" and not self.decay_epochs:
            raise InputError("--schedule=step needs --decay_epochs, such as --decay_epochs=80,120")
        self.model_keywords()

    def to_flagfile(self) -> str:
        """Return the text of a flagfile that repeats the run.

        What concerns one call only, `overwrite` and `json`, is left out.
        """
        lines = [f"--{f.name}={_text(getattr(self, f.name))}" for f in dataclasses.fields(self)]
        kept = [line for line in lines if not line.startswith(("--overwrite=", "--json="))]
        return "# towers train --flagfile=THIS_FILE repeats the run\n" + "\n".join(kept) + "\n"

    def decay_boundaries(self) -> list[float]:
        """Return `decay_epochs` as numbers."""
        return parse_numbers("decay_epochs", self.decay_epochs)

    def model_keywords(self) -> dict[str, Any]:
        """Return `model_args` as keyword arguments: numbers, booleans, else strings.

        Raises:
            InputError: a part is not `name=value`.
        """
        keywords = {}
        for part in filter(None, self.model_args.split(",")):
            name, equals, value = part.partition("=")
            if not equals or not name.strip().isidentifier():
                raise InputError(
                    f"--model_args={self.model_args}: {part!r} is not name=value, "
                    "as in --model_args=depth=20,width=16"
                )
            keywords[name.strip()] = _parse_argument(value.strip())
        return keywords


def check_value(field: dataclasses.Field, value: Any) -> None:
    """Raise a one-line InputError if `value` is not allowed for the option `field`."""
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise InputError(f"--{field.name}={value}: allowed are {', '.join(choices)}")
    if field.type in (int, float):
        _check_number(field, value)
    elif not isinstance(value, field.type):
        kind = "a string" if field.type is str else "True or False"
        raise InputError(f"{field.name}={value!r}: {kind} is needed")
    elif field.type is str:
        if field.default and not value:
            raise InputError(
                f"--{field.name}= is empty: give a value, as --{field.name}={field.default}"
            )
        if value != value.strip() or not value.isprintable():  # flags.cfg could not repeat it
            raise InputError(
                f"--{field.name}={value!r}: text in one line, without spaces at its ends, is needed"
            )
        if field.metadata.get("numbers"):
            parse_numbers(field.name, value)


def _check_number(field: dataclasses.Field, value: Any) -> None:
    """Raise a one-line InputError if `value` is no finite number, or out of range."""
    kind = "a whole number" if field.type is int else "a number"
    types = (numbers.Integral, field.type)
    if not isinstance(value, types) or isinstance(value, bool) or not abs(value) < float("inf"):
        raise InputError(f"--{field.name}={value}: {kind} is needed")
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    if (low is not None and value < low) or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InputError(f"--{field.name}={value}: {kind} {limits} is needed")


def parse_numbers(name: str, text: str) -> list[float]:
    """Return the numbers of a comma-separated option.

    Raises:
        InputError: a part is not a number of at least 0, or they do not rise.
    """
    try:
        values = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        values = [float("nan")]
    if not all(0 <= value < float("inf") for value in values):
        raise InputError(f"--{name}={text}: numbers with commas are needed, as 80,120")
    if values != sorted(set(values)):
        raise InputError(f"--{name}={text}: each number must be greater than the one before")
    return values


def _text(value: Any) -> str:
    """Return an option's value as a flag takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse_argument(text: str) -> Any:
    """Return a model argument as int, float or bool where it looks like one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text

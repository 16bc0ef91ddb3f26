"""The options of a run: names, defaults, ranges and help.

Each field is a flag of the command line, a line of `flags.cfg`, and a keyword argument in Python.
There, functions and data may replace names: model=build, dataset=((x, y), (x_test, y_test)).
"""

import dataclasses
from typing import Any, TypeVar

from towers.errors import InputError
from towers.options.fields import check_values, group
from towers.options.functions import option_text
from towers.options.parts import (
    DataOptions,
    DeviceOptions,
    DueOptions,
    GpuOptions,
    ModelOptions,
    UpdateOptions,
    parse_augment,
)

# Options that a compiled model sets itself.
OF_COMPILED = (
    "loss", "metrics", "optimizer", "learning_rate", "schedule", "warmup_epochs", "decay_epochs",
    "decay_factor", "momentum", "weight_decay", "label_smoothing", "clip_norm", "clip_value",
    "clip_global_norm",
)  # fmt: skip

_Part = TypeVar("_Part")
_run = group("The run", affects="call")


@dataclasses.dataclass(frozen=True)
class _RunOptions:
    """The folder of a run, and how it is called this time."""

    train_dir: str = _run(
        "runs/train", "Folder of the run: checkpoints, events, flags.cfg, result.json."
    )
    overwrite: bool = _run(
        False,
        "Rename an existing train_dir and start a new run. Without it, the run is resumed. The "
        "same command again resumes the new run.",
    )
    seed: int = _run(
        0, "Seed for initial weights, shuffling and augmentation.", affects="result", minimum=0,
        maximum=2**31 - 1,
    )  # fmt: skip
    json: bool = _run(
        False, "Print only the result, as JSON, to standard output, and the rest to standard error."
    )
    quiet: bool = _run(False, "Print only the result; warnings go to standard error.")
    trust: bool = _run(
        False, "Run the functions named in the flags.cfg of a run that is not yours: made by "
        "somebody else, on another machine, or changed by hand."
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(  # a dataclass has the fields of its last base first
    DueOptions, UpdateOptions, GpuOptions, DeviceOptions, DataOptions, ModelOptions, _RunOptions
):
    """All options of a run. Each field is a flag of the same name.

        options = towers.Options(model="my_net:build", num_towers=2, train_dir="runs/mine")

    Functions and data may be passed in place of their names.
    """

    def __post_init__(self) -> None:
        """Raise InputError for values out of range and pairs that exclude each other."""
        for field in dataclasses.fields(self):
            if field.type is str:
                text = option_text(field.name, getattr(self, field.name))
                object.__setattr__(self, field.name, text)
        check_values(self)
        object.__setattr__(self, "augment", str(parse_augment(self.augment)))
        if self.schedule == "step" and not self.decay_epochs:
            raise InputError("--schedule=step needs --decay_epochs, such as --decay_epochs=80,120")
        self.model_keywords()
        self.image_height_width()
        self.profile_range()
        self.gpu_options()

    def part(self, kind: type[_Part]) -> _Part:
        """Return those options that are fields of another dataclass, such as `UpdateOptions`."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    def gpu_options(self) -> GpuOptions:
        """Return the GPU options; no GPU is visible if the towers are on other machines."""
        gpus = self.part(GpuOptions)
        if self.elsewhere and not self.visible_gpus:  # they may be lent to others from here
            gpus = dataclasses.replace(gpus, visible_gpus="none")
        return gpus

    def to_flagfile(self) -> str:
        """Return a flagfile that repeats the run, without the options of one call."""
        names = ["train_dir", *names_that_affect("result", "speed", "machine", "report")]
        lines = [f"--{name}={text_of(getattr(self, name))}" for name in names]
        return "# towers train --flagfile=THIS_FILE repeats the run\n" + "\n".join(lines) + "\n"


def names_that_affect(*effects: str) -> list[str]:
    """Return the names of options with these values of `affects`; see `fields.option`."""
    return [f.name for f in dataclasses.fields(Options) if f.metadata["affects"] in effects]


def text_of(value: Any) -> str:
    """Return an option's value as a flag takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)

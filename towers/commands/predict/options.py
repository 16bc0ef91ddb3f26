"""The options of `towers predict`."""

import dataclasses
from typing import ClassVar

from towers.options.fields import CheckedOptions, option
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class PredictOptions(CheckedOptions):
    """Options of `towers predict`: the run and the files."""

    EXAMPLES: ClassVar[str] = """\
Examples:
  towers predict --train_dir=runs/a photos/
  towers predict --train_dir=runs/a photo.png more.npz --num_towers=2
FILE is an image (.png, .jpg, .bmp, .gif) or arrays (.npy; .npz with x or x_test). FOLDER means all
images in it, sorted by name."""

    run: Options = dataclasses.field(default_factory=Options)
    files: tuple = option(
        (), "Predict", "Files and folders.", positional="FILE|FOLDER ...",
        required="towers predict needs files or folders: towers predict --train_dir=RUN FILE",
    )  # fmt: skip
    averages: bool = option(False, "Predict", "Use the moving averages of the weights.")

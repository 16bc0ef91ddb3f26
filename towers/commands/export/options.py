"""The options of `towers export`."""

import dataclasses
from typing import ClassVar

from towers.errors import InputError
from towers.options.fields import check_values, option
from towers.options.run import Options

# File name endings; a saved_model is a folder.
ENDINGS = {"keras": ".keras", "saved_model": ""}


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Options of `towers export`: the run, the format and the file."""

    EXAMPLES: ClassVar[str] = """\
Examples:
  towers export --train_dir=runs/a --format=keras
  towers export --train_dir=runs/a --format=saved_model --output=served/1 --averages
A file .keras and a saved_model take the images of the data set as they are stored, any number at a
time: cropping and standardising are part of the model."""

    run: Options = dataclasses.field(default_factory=Options)
    format: str = option(
        "keras", "Export", "Kind of the file: keras, for keras.models.load_model without towers; "
        "saved_model, for TensorFlow alone.",
        choices=tuple(ENDINGS),
    )  # fmt: skip
    output: str = option(
        "", "Export", "File, or folder of a saved_model; default: in train_dir, model.keras or "
        "saved_model.",
    )  # fmt: skip
    averages: bool = option(
        False, "Export", "Take the moving averages of the weights in place of the weights."
    )
    overwrite: bool = option(False, "Export", "Replace what is there.")

    def __post_init__(self) -> None:
        """Raise InputError for a value out of range."""
        check_values(self)
        if self.output and not self.output.endswith(ENDINGS[self.format]):
            raise InputError(f"--output={self.output}: the name of a Keras file ends in .keras")

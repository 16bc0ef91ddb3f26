"""The options of `towers export`."""

import dataclasses
from typing import ClassVar

from towers.errors import InputError
from towers.options.fields import option
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Options of `towers export`: the run and the file."""

    EXAMPLES: ClassVar[str] = """\
Examples:
  towers export --train_dir=runs/a
  towers export --train_dir=runs/a --output=a.keras --averages
The file is for keras.models.load_model, without towers. It takes the images of the data set as they
are stored, any number at a time: cropping and standardising are part of the model."""

    run: Options = dataclasses.field(default_factory=Options)
    output: str = option("", "Export", "File; default: model.keras in train_dir.")
    averages: bool = option(
        False, "Export", "Take the moving averages of the weights in place of the weights."
    )
    overwrite: bool = option(False, "Export", "Replace what is there.")

    def __post_init__(self) -> None:
        """Raise InputError for a file of another ending."""
        if self.output and not self.output.endswith(".keras"):
            raise InputError(f"--output={self.output}: the name of a Keras file ends in .keras")

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
Load the file with keras.models.load_model; it does not need towers. The model takes images as they
are stored in the data set, any number at a time: it crops and standardizes them itself."""

    run: Options = dataclasses.field(default_factory=Options)
    output: str = option("", "Export", "File to write. Default: model.keras in train_dir.")
    averages: bool = option(False, "Export", "Save the moving averages of the weights.")
    overwrite: bool = option(False, "Export", "Replace an existing file.")

    def __post_init__(self) -> None:
        """Raise InputError for a file of another ending."""
        if self.output and not self.output.endswith(".keras"):
            raise InputError(f"--output={self.output}: name a file that ends in .keras")

"""The options of verbs that try several numbers of towers."""

import dataclasses

from towers.errors import InputError
from towers.options.fields import option, parse_tower_numbers
from towers.options.run import Options


@dataclasses.dataclass(frozen=True)
class ListOptions(Options):
    """The options of a run, but for a list of numbers of towers."""

    num_towers: str = option("1,2,4", "Towers", "Numbers of towers.", alias="num_gpus")

    def __post_init__(self) -> None:
        """Refuse values out of range, by the flag's name.

        Raises:
            InputError: one line: what was given and what is allowed.
        """
        super().__post_init__()
        if self.variables == "auto":
            raise InputError(
                "--variables=auto is a run's own trial: name cpu, sharded or replicated here"
            )
        self.tower_numbers()

    def tower_numbers(self) -> list[int]:
        """Return `num_towers` as numbers.

        Raises:
            InputError: a part is no whole number of at least 1, or they do not rise.
        """
        return parse_tower_numbers(self.num_towers)

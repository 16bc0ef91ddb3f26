"""`towers init`: writes a model, data and flags to start from, as three files that run."""

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from towers.errors import InputError
from towers.options.fields import option

# my_net.py and my_data.py lie beside this module.
_FLAGS = """\
# The flags of a run: towers train --flagfile=my_run.cfg
# A flag typed after it overrides the one here; towers train --help lists all.
--train_dir=runs/mine
--devices=any
--model=my_net:build
--dataset=my_data:load
--augment=standardize
--batch_size=50
--num_epochs=3
--learning_rate=0.05
"""


@dataclasses.dataclass(frozen=True)
class InitOptions:
    """Options of `towers init`: the folder to write to."""

    EXAMPLES: ClassVar[str] = """\
It writes my_net.py (a model), my_data.py (its data) and my_run.cfg (the flags of a run) to FOLDER,
by default the current one. They work as they are. Replace the model and the data with yours."""

    folders: tuple = option((), "Init", "Folder for the files.", positional="[FOLDER]")

    def __post_init__(self) -> None:
        """Raise InputError for more than one folder."""
        if len(self.folders) > 1:
            raise InputError("towers init takes one folder: towers init FOLDER")


def run(options: InitOptions, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Write the files, and print what to type next; return {}; see `flags.Verb`.

    Raises:
        InputError: a file exists, or cannot be written.
    """
    folder = Path(options.folders[0] if options.folders else ".")
    package, names = Path(__file__).parent, ("my_net.py", "my_data.py")
    texts = {name: (package / name).read_text(encoding="utf-8") for name in names}
    texts["my_run.cfg"] = _FLAGS
    for path in (folder / name for name in texts):
        if path.exists():
            raise InputError(f"{path} already exists; name another folder: towers init FOLDER")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    say(f"wrote {', '.join(str(folder / name) for name in texts)}")
    say("next:")
    if folder.resolve() != Path.cwd():
        say(f"  cd {shlex.quote(str(folder))}")
    say("  towers train --flagfile=my_run.cfg")
    say("  towers evaluate --train_dir=runs/mine")
    say("  towers export --train_dir=runs/mine")
    say("  towers verify --flagfile=my_run.cfg --steps=3")
    return {}

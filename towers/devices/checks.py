"""Results of the checks of this machine."""

import dataclasses

OK, PROBLEM, NOTE = "ok", "problem", "note"


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check; each part is one line."""

    name: str
    status: str  # OK, PROBLEM or NOTE
    detail: str
    remedy: str = ""  # what to type or to do

"""One finding of `towers doctor`."""

import dataclasses

OK, PROBLEM, NOTE = "ok", "problem", "note"


@dataclasses.dataclass(frozen=True)
class Check:
    """What was looked at and found.

    Attributes:
        name: of what was looked at.
        status: OK; PROBLEM, something to mend; NOTE, something to know.
        detail: what was found, in one line.
        remedy: what to type or to do, "" if nothing.
    """

    name: str
    status: str
    detail: str
    remedy: str = ""

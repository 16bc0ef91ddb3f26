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


def found(name: str, good: object, detail: str, remedy: str, otherwise: str = PROBLEM) -> Check:
    """Return a check that is OK, or has a remedy if not all is good.

    Args:
        name: of the check.
        good: true if all is good.
        detail: what was found, in one line.
        remedy: what to type or to do, left out if all is good.
        otherwise: status if not all is good: PROBLEM or NOTE.
    """
    return Check(name, OK, detail) if good else Check(name, otherwise, detail, remedy)

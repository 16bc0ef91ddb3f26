"""Findings of a check of this machine."""

import dataclasses

OK, PROBLEM, NOTE = "ok", "problem", "note"  # a note is something to know, nothing to mend


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check; each part is one line."""

    name: str
    status: str  # OK, PROBLEM or NOTE
    detail: str
    remedy: str = ""  # what to type or to do

"""The options of a call from Python, as `towers.train(model=build, num_towers=2)`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from towers.options import flags
from towers.options.fields import check_value
from towers.options.given import as_text
from towers.options.run import Options


def options_of(
    options: Options | None, fields: Mapping[str, Any], *, verb: str = "train"
) -> Options:
    """Return the options that a call gives, whole or by their fields.

    As on the command line, what is not given is as in the flags.cfg of an existing run.

    Args:
        options: all of them; None: as `fields` say.
        fields: that differ from these.
        verb: "train", whose run may be a new one, or another, which needs one.

    Raises:
        InputError: there is no such option, a value is not allowed, or there is no run.
    """
    given = {flags.option_name(name): value for name, value in fields.items()}
    if options is not None:
        return dataclasses.replace(options, **given)
    for field in dataclasses.fields(Options):
        if field.name in given:
            if field.type is str:
                given[field.name] = as_text(field.name, given[field.name])
            check_value(field, given[field.name])
    return flags.complete(given, flags.Verb(verb, completes=True, begins=verb == "train"))

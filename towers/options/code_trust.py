"""Signs a run's flags.cfg, so that the code which it names is called only if the user wrote it.

The last line of flags.cfg is a comment with an HMAC of the text under a key in the user's
configuration folder. A run that is copied or moved stays the user's own; one that was downloaded
does not become so, whoever owns its files.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from towers.errors import InputError
from towers.options.functions import PREFIX, is_shipped
from towers.options.parts import MACHINES_OPTION

# Options that may name a function.
CODE = "model", "dataset", "loss", "metrics", "optimizer", "callbacks"
_MARK = "# made by the user whose key gives: "
_KEY_BYTES = 32


def signed(text: str) -> str:
    """Return the text of a flags.cfg with this user's checksum, if a key can be stored."""
    text, _, _ = text.partition(_MARK)
    key = _key(make=True)
    return f"{text}{_MARK}{_checksum(key, text)}\n" if key else text


def is_own(text: str) -> bool:
    """Return whether this user's towers wrote a flags.cfg, and nobody changed it."""
    text, marked, checksum = text.partition(_MARK)
    key = _key() if marked else None
    return key is not None and hmac.compare_digest(
        checksum.encode(), f"{_checksum(key, text)}\n".encode()
    )


def is_foreign(path: str, text: str) -> bool:
    """Return whether a flagfile is a run's, or a copy, and not written by this user's towers.

    Args:
        path: of the flagfile, which may be a link.
        text: the whole text.
    """
    names = {os.path.basename(path), os.path.basename(os.path.realpath(path))}
    return (_MARK in text or "flags.cfg" in names) and not is_own(text)


def check(source: str, text: str, of_run: Mapping[str, object]) -> None:
    """Raise InputError if a flags.cfg of another user names code or machines.

    Args:
        source: name of the file, with which the message begins.
        text: content of the flags.cfg.
        of_run: {option: value} taken from it.

    Raises:
        InputError: it names code to run or machines to connect to, and is not this user's own.
    """
    named = [n for n in CODE if any(map(_is_code, str(of_run.get(n, "")).split(",")))]
    named += ["model_args"] if "model" in named and of_run.get("model_args") else []
    named += [MACHINES_OPTION] if of_run.get(MACHINES_OPTION) else []
    if named and not is_own(text):
        flags = " ".join(f"--{name}={of_run[name]}" for name in named)
        raise InputError(
            f"{source} was not written by your towers on this machine, or was changed, and names "
            f"code to run or machines to connect to: {flags}; check these, then type --trust, or "
            "type these flags yourself"
        )


def _is_code(name: str) -> bool:
    return ":" in name and not name.startswith(PREFIX) and not is_shipped(name)


def _checksum(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key(make: bool = False) -> bytes | None:
    """Return this user's key, or None if there is none and none can be made."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = Path(folder, "towers", "key")
    with contextlib.suppress(OSError):
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                with open(path, "xb", opener=lambda name, how: os.open(name, how, 0o600)) as file:
                    file.write(secrets.token_bytes(_KEY_BYTES))
        key = path.read_bytes()
        return key if len(key) == _KEY_BYTES else None
    return None

"""What the subcommands' arguments have in common: numbers with bounds, errors of one line."""

from __future__ import annotations

import argparse
import errno
import math
import os
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Parser", "made_folder", "natural", "positive", "rate", "there", "wrong_file"]


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in a line, and where the flags are listed.

    >>> Parser(prog="zfunc train").parse_args(["--steps"])
    Traceback (most recent call last):
    SystemExit: 2
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists what there is)\n")


def _number(kind: type, least: int, what: str, text: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected {what}")
    return number


positive = partial(_number, int, 1, "a whole number, at least 1")
natural = partial(_number, int, 0, "a whole number, at least 0")
rate = partial(_number, float, 0, "a number, 0 or more")


def there(text: str) -> Path:
    """A path of something; one of nothing is told before any argument that is missing.

    >>> there("nosuch")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: nosuch: no such file or folder
    """
    if not (path := Path(text)).exists():
        raise argparse.ArgumentTypeError(f"{text}: no such file or folder")
    return path


def made_folder(flag: str, folder: Path) -> None:
    """Make the folder that results go to, if need be, before there are any.

    Raises:
        ValueError: it cannot be made, or nothing can be written there.

    >>> made_folder("--out", Path("/proc/nosuch"))
    Traceback (most recent call last):
    ValueError: --out /proc/nosuch: no such file or directory
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileExistsError:
        raise ValueError(f"{flag} {folder}: a file, and no folder") from None
    except OSError as error:
        raise ValueError(wrong_file(flag, folder, error)) from None


def wrong_file(flag: str, path: str | Path, error: OSError) -> str:
    """Why a file cannot be read, in the words of the operating system but without its number.

    >>> wrong_file("--data", "nosuch.txt", FileNotFoundError(2, "No such file or directory"))
    '--data nosuch.txt: no such file or directory'
    """
    why = error.strerror or str(error)
    return f"{flag} {path}: {why[:1].lower()}{why[1:]}"

"""Values of flags as numbers, and what to say of words that are no flags."""

import argparse
import math
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from rwkv_batch import packages
from rwkv_batch.translation.glossary import GlossaryError, parse

DAY = 86400  # seconds
# What sends spans (routes/callers/tracing.py), of packages of their own.
SENDS_SPANS = (
    "opentelemetry.sdk.trace.export",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.trace.propagation.tracecontext",
)
MOST, MOST_FLOAT = 2**31 - 1, 1e30  # that flags take where no other limit is named


class CommandLine(argparse.ArgumentParser):
    """A parser whose errors are one sentence, as those of the server's start.

    argparse has its list of all flags in front of one, which is a screen long here.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def number(least: int, unit: int = 1, most: int = MOST) -> dict[str, Any]:
    """How a flag takes a whole number of `unit`, at least `least` and at most `most`."""
    return {"type": lambda text: _within(text, least, most) * unit, "metavar": "N"}


def number_or_auto(least: int, text: str) -> int | None:
    return None if text == "auto" else _within(text, least, MOST, ", or auto")


def _within(text: str, least: int, most: int, otherwise: str = "") -> int:
    number = _whole(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} is too small; use {least} or more{otherwise}")
    if number > most:
        raise argparse.ArgumentTypeError(f"{text} is too large; use {most} or less{otherwise}")
    return number


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} is not finite")
    if abs(number) > MOST_FLOAT:
        raise argparse.ArgumentTypeError(f"{text} is too large; use {MOST_FLOAT:.0e} or less")
    return number


def seconds(text: str) -> float:
    """At most a day."""
    number = finite(text)
    if not 0 <= number <= DAY:
        raise argparse.ArgumentTypeError(f"{text} is no time of at most {DAY} seconds; use 0 for no limit")
    return number


def collector(url: str) -> str:
    """Where spans are sent, if what sends them can be loaded.

    Front ends load it too, each of which would end, and be started again, for ever.
    """
    if not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{url!r} is no URL, such as http://127.0.0.1:4318/v1/traces")
    try:
        packages.load("this needs", packages.TRACES, *SENDS_SPANS)
    except packages.PackageError as error:
        if error.missing:
            sentence = f"OpenTelemetry is missing; pip install {packages.TRACES}"
            raise argparse.ArgumentTypeError(sentence) from None
        raise argparse.ArgumentTypeError(str(error)) from None
    return url


def named(path: str) -> str:
    """A path, or a name. An empty one would be the folder in which the server is started."""
    if not path:
        raise argparse.ArgumentTypeError("this is empty; name one, or leave the flag out")
    return path


def glossary(path: str) -> str:
    """The text of a file of terms that can be read; of no file none."""
    if not path:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        parse(text)
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(_unreadable(path, error)) from None
    except GlossaryError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from None
    return text


def secret(path: str) -> str:
    """The one line of a file, which only its owner need be able to read."""
    try:
        lines = Path(named(path)).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(_unreadable(path, error)) from None
    if len(lines) != 1 or not lines[0]:
        raise argparse.ArgumentTypeError(f"{path} must hold one line, and nothing else")
    return lines[0]


def password(parser: argparse.ArgumentParser, name: str, about: str) -> None:
    """A flag for a password, and one for the file that has it, as others see the flags of a process."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(name, metavar="W", help=about)
    file = f"a file whose one line is {name}; other users of the machine see the flags of a process"
    place = name.removeprefix("--").replace("-", "_")
    either.add_argument(f"{name}-file", type=secret, dest=place, metavar="FILE", help=file)


def _unreadable(path: str, error: OSError | UnicodeDecodeError) -> str:
    why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
    return f"{path} cannot be read ({why}); name a file of text that the server may read"


def port(text: str) -> int:
    number = _whole(text)
    if not 1 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; use 1 to 65535")
    return number


def not_understood(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """What to say of words that are no flags, nor values of flags."""
    wrong = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not wrong:
        return f"{' '.join(words)} belongs to no flag; a value follows its flag, as in --model-path P"
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    near: list[str] = []
    for name in (word.lower().replace("_", "-") for word in wrong):
        near += [flag for flag in flags if flag.startswith(name)] or get_close_matches(name, flags, 2)
    ways = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "--help lists them all"
    return f"there is no flag {' or '.join(wrong)}; {ways}"

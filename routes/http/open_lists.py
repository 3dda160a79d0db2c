"""Lists that clients and protocols extend: members of a kind that is not known here are left out.

The reply names them in the header X-Ignored, as "tools[1] (web_search)".
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidatorFunctionWrapHandler, WrapValidator

MOST_NAMED = 64
LONGEST_NAME = 40  # characters

Member = TypeVar("Member")


class Ignored(BaseModel):
    """A member of a list that is left out."""

    type: str


def open_to(*known: str | None) -> WrapValidator:
    """Annotates the members of a list: those with a `type` that is not among `known` become Ignored."""

    def check(value: object, parse: ValidatorFunctionWrapHandler) -> object:
        kind = unknown_type(value, *known)
        return parse(value) if kind is None else Ignored(type=kind)

    return WrapValidator(check)


def unknown_type(value: object, *known: str | None) -> str | None:
    """The type of a member that is to be left out; None: it is to be read."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) and kind and kind not in known else None


def taken(members: Sequence[Member]) -> list[Member]:
    """Those that are not left out."""
    return [member for _, member in taken_with_places(members)]


def taken_with_places(members: Sequence[Member]) -> list[tuple[int, Member]]:
    """Those that are not left out, and where each stands."""
    return [(i, member) for i, member in enumerate(members) if not isinstance(member, Ignored)]


def ignored(field: str, members: Iterable[Any]) -> list[str]:
    """The places and types of those that are left out of a field."""
    found = ((i, member) for i, member in enumerate(members) if isinstance(member, Ignored))
    return [named(f"{field}[{i}]", member.type) for i, member in found]


def named(place: str, kind: str) -> str:
    """A member that is left out."""
    return f"{place} ({kind})"


def as_header(names: Sequence[str]) -> str:
    """The names in a form that may stand in a header, where there is room for them."""
    shown = [_plain(name) for name in names[:MOST_NAMED]]
    more = len(names) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more > 0 else [])])


def _plain(name: str) -> str:
    place, _, kind = name.partition(" (")
    text = f"{place} ({kind.removesuffix(')')[:LONGEST_NAME]})"
    return "".join(c if " " <= c <= "~" and c != "," else "?" for c in text)

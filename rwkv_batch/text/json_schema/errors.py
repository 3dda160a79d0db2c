"""What is wrong with a schema."""


class SchemaError(ValueError):
    """A schema that cannot be enforced; the message names the keyword by its place, without a full stop."""

    def __init__(self, place: str, why: str) -> None:
        """place: a JSON pointer in a fragment, `#/properties/a/pattern`. why: goes on behind it."""
        super().__init__(f"{place} {why}")


def inside(place: str, *keys: str | int) -> str:
    """The place of what lies there, as RFC 6901 writes it."""
    return "/".join([place, *(str(key).replace("~", "~0").replace("/", "~1") for key in keys)])

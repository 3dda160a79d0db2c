"""What a body holds: the bytes behind its Content-Encoding, and the parts of a form."""

import zlib

from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from routes.http.errors import ApiError

WINDOWS = {
    "gzip": (31,),
    "x-gzip": (31,),
    "deflate": (15, -15),
}  # of zlib; some clients send deflate without a head
MOST_CODINGS = 4
# Bytes that are decoded at once: what they have behind a member is copied, and members may be short.
PIECE = 1 << 14
MOST_PARTS = 64


def decode(body: bytes, encodings: str, most: int) -> bytes:
    """`body` as it was before `encodings`, a Content-Encoding, were applied; it may have `most` bytes then.

    Raises ApiError 413, 415 for an encoding that is not known, 400 for a body that is not encoded so.
    """
    if not encodings:
        return body
    names = [name.strip().lower() for name in encodings.split(",") if name.strip()]
    names = [name for name in names if name != "identity"]
    if len(names) > MOST_CODINGS or any(name not in WINDOWS for name in names):
        raise ApiError(
            415,
            f"Content-Encoding {encodings[:100]} is not known here; send gzip or deflate, or leave it out.",
        )
    for name in reversed(names):
        body = _inflate(body, name, most)
    return body


def _inflate(body: bytes, name: str, most: int) -> bytes:
    problem = ApiError(400, f"The body is not what its Content-Encoding {name} says.")
    for window in WINDOWS[name]:
        found, whole, at = bytearray(), memoryview(body), 0
        try:
            while True:  # over the members of gzip
                reader = zlib.decompressobj(window)
                while not reader.eof:
                    piece = whole[at : at + PIECE]
                    if not piece:  # it is cut short
                        raise problem
                    found += reader.decompress(piece, most + 1 - len(found))
                    if len(found) > most:
                        raise ApiError(
                            413,
                            f"The body has more than {most} bytes when decoded, the most that are taken.",
                        )
                    at += len(piece) - len(reader.unused_data)
                if at == len(body):
                    return bytes(found)
        except zlib.error:
            continue
    raise problem


def read_form(content_type: str, body: bytes) -> tuple[dict[str, bytes], dict[str, list[str]]]:
    """The files of a form by the names that the client gives them, and all texts of each other field.

    Raises ApiError 400 for a form that is not complete. What is no form has neither.
    """
    kind, options = parse_options_header(content_type)
    if not kind.startswith("multipart/"):
        return {}, {}
    files: dict[str, bytes] = {}
    fields: dict[str, list[str]] = {}
    try:
        with PushMultipartParser(options.get("boundary") or "", max_segment_count=MOST_PARTS) as parser:
            segment, data = None, bytearray()
            for event in parser.parse(body):
                if isinstance(event, MultipartSegment):
                    segment, data = event, bytearray()
                elif event:
                    data += event
                elif segment and segment.filename is not None:
                    if segment.filename in files:
                        raise ValueError(f"it has two files of the name {segment.filename[:100]}")
                    files[segment.filename] = bytes(data)
                elif segment:
                    fields.setdefault(segment.name, []).append(data.decode())
    except (MultipartError, UnicodeError, ValueError) as error:
        raise ApiError(400, f"The form cannot be read: {_reason(error)}.") from None
    return files, fields


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeError):
        return "a field is not UTF-8"
    return str(error).rstrip(".").replace("\n", " ")[:200] or "it is not complete"

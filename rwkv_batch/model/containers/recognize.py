"""What a file is, by its first bytes and not by its name."""

import codecs
import re
from pathlib import Path
from typing import Literal

Container = Literal["torch", "old torch", "safetensors"]
"""Of tensors. "torch": a zip archive of torch.save. "old torch": what it wrote before version 1.6."""

READ_BYTES = 1 << 20  # at a time
FIRST_BYTES = 512
LONGEST_HEADER = 100_000_000  # bytes, of a .safetensors file, as its library has it
# The first number in a file of torch.save before version 1.6, as its pickle holds it.
OLD_TORCH = b"\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
GIVE = "give a .pth or .safetensors file"
AGAIN = "download it again"
UNPACK = "unpack it first"
CONVERT = "give the .pth or .safetensors file that it was made from"
SIGNATURES = (  # where it stands, what stands there, what such a file is, and the way out
    (
        0,
        b"version https://git-lfs",
        "a pointer of Git LFS in place of the file",
        "fetch it with git lfs pull",
    ),
    (0, b"GGUF", "a GGUF file", CONVERT),
    (0, b"fmgg", "a file of rwkv.cpp", CONVERT),
    (0, b"lmgg", "a GGML file", CONVERT),
    (0, b"tjgg", "a GGML file", CONVERT),
    (0, b"\x1f\x8b", "compressed by gzip", UNPACK),
    (0, b"BZh", "compressed by bzip2", UNPACK),
    (0, b"\xfd7zXZ\0", "compressed by xz", UNPACK),
    (0, b"\x28\xb5\x2f\xfd", "compressed by zstd", UNPACK),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", UNPACK),
    (257, b"ustar", "a tar archive", UNPACK),
    (0, b"\x93NUMPY", "an array of NumPy", GIVE),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", GIVE),
    (0, b"SQLite format 3\0", "a database of SQLite", GIVE),
    (0, b"RWKV7SN\n", "a session exported from a server", "import it as a session, or " + GIVE),
    (0, b"RWKV7ST\n", "a state of a session on a server", GIVE),
)
MARKUP = re.compile(rb"<(!--|!doctype|\?xml|html|head|body|error|svg)", re.IGNORECASE)


class Unreadable(Exception):
    """A file is no container of tensors that can be read.

    Its text continues a sentence that begins with the file's name: what is wrong and the way out.
    """


def recognize(file: Path) -> Container:
    """Which container of tensors a file is. Raises Unreadable for every other file."""
    try:
        if file.is_dir():
            raise Unreadable(f"is a directory; {GIVE}")
        if not file.is_file():  # a pipe would keep its reader waiting
            raise Unreadable(
                f"is no ordinary file; {GIVE}" if file.exists() else "is missing; check the path"
            )
        with file.open("rb") as stream:
            head = stream.read(FIRST_BYTES)
        size = file.stat().st_size
    except OSError as error:
        raise Unreadable(cannot_be_read(error)) from error
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "torch"
    if head.startswith(b"\x80") and OLD_TORCH in head[:32]:
        return "old torch"
    header = int.from_bytes(head[:8], "little")
    if head[8:9] == b"{" and header <= LONGEST_HEADER:
        if 8 + header > size:
            raise Unreadable(f"is cut short; {AGAIN}")
        return "safetensors"
    raise Unreadable(_what_it_is(head, size))


def check_bytes(file: Path) -> None:
    """Read all of a file. Raises Unreadable where the operating system does not give it."""
    try:
        with file.open("rb", buffering=0) as stream:
            while stream.read(READ_BYTES):
                pass
    except OSError as error:
        raise Unreadable(cannot_be_read(error)) from error


def cannot_be_read(error: OSError) -> str:
    """What Unreadable says where the operating system refuses a file."""
    return f"cannot be read ({error.strerror or type(error).__name__}); check it and its disk"


def _what_it_is(head: bytes, size: int) -> str:
    if not size:
        return f"is empty; {AGAIN}"
    for place, signature, kind, way_out in SIGNATURES:
        if head[place:].startswith(signature):
            return f"is {kind}; {way_out}"
    if not any(head):
        return f"begins with zeros, as one whose download has not ended; {AGAIN}"
    if re.match(rb"\x80[\x00-\x05]", head):
        return f"is a pickle of Python objects, and not of torch.save; {GIVE}"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if MARKUP.match(text):
        return f"is a page of HTML or XML, as a failed download leaves; {AGAIN}"
    if _is_text(text):
        return f"is {'a JSON text' if text[:1] in (b'{', b'[') else 'a text'}; {GIVE}"
    return f"is neither a file of torch.save nor .safetensors; {GIVE}"


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter.isspace() for letter in text)

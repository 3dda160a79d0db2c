"""Malformed and unusual HTTP requests as bytes, the same ones for the same seed."""

import gzip
import random
import zlib
from dataclasses import dataclass

PATHS = (
    "/v1/chat/completions",
    "/v2/chat/completions",
    "/v1/messages",
    "/api/chat",
    "/v1/state/upload",
    "/v1/state/import?session_id=s",
    "/health",
    "/nowhere",
    "/",
)
CHAT = b'{"messages": [{"role": "user", "content": "hello"}], "model": "fake-rwkv", "max_tokens": 4}'
BODIES = (
    CHAT,
    CHAT[:-1] + b', "stream": true}',
    b"{}",
    b"",
    b"[",
    b"\xff\xfe",
    b'{"contents": ["a"]}',
    b" " * 5000,
)
TARGETS = (
    "http://x/health", "*", "health", "//health", "/health/../x", "/%", "/%ff%00?%=%&&=", "/v1/models/{}:*", "/?" + "a" * 3000,
    "/\u00e9", "/#x", "/v1/models/%2e%2e%2fx", "",
)  # fmt: skip
METHODS = (
    "GET",
    "PUT",
    "DELETE",
    "PATCH",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PURGE",
    "post",
    "P@ST",
    "",
    "M" * 300,
)
VERSIONS = (
    "HTTP/1.0",
    "HTTP/1.0",
    "HTTP/0.9",
    "HTTP/1.2",
    "HTTP/2.0",
    "HTTP/11",
    "http/1.1",
    "HTTP/1.1 ",
    "",
)
CODINGS = (
    "gzip, chunked",
    "identity",
    "chunked, chunked",
    "xchunked",
    "chunked;q=1",
    "\tchunked",
    "",
    "gzip",
)
LENGTHS = (
    "-1",
    "+2",
    "0x2",
    "2, 2",
    "",
    "99999999999999999999",
    "18446744073709551615",
    "2 2",
    "1e1",
    "\u0662",
)
FIELDS = (
    b"X-A: \xe9", b"X-A: \xc3\xa9", b"X-A: \x01", b"X-A: \x00", b"X-A: a\r\n b", b"X-A : b", b": b", b"no colon", b"X\xe9: a",
    b"Host: y", b"Host: \xff", b"Host:", b"Forwarded: host=\xff;;", b"X-Forwarded-For: \xff, 1", b"X-A: " + b"a" * 9000,
    b"Expect: 100-continue", b"Expect: other", b"Upgrade: websocket\r\nConnection: Upgrade", b"Cookie: \xff=;;", b"TE: trailers",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__", b"Connection: close",
    b"Connection: keep-alive, \xff", b"Authorization: Bearer \xff", b"X-Request-Id: \xff", b"Accept-Encoding: \xff;q=9",
    b"Content-Type: ;;;", b"Content-Type: \xff", b"If-None-Match: \xff", b"Range: bytes=9-1", b"Origin: \xff",
    b"\r\n".join(b"X-%d: 1" % i for i in range(150)), b"X-Note-0: {}", b"Trailer: X", b"Access-Control-Request-Headers: \xff,a",
)  # fmt: skip


@dataclass(frozen=True)
class Odd:
    """Bytes that a client sends."""

    data: bytes
    whole: bool  # it has all that it says, so it is answered though the client goes on listening and sending
    kind: str


def requests(seed: int, count: int) -> list[Odd]:
    draw = random.Random(seed)
    kinds = (_chunks, _chunks, _lengths, _heads, _encodings, _forms, _forms, _mutated, _pipelined)
    return [kinds[i % len(kinds)](draw) for i in range(count)]


def request(
    body: bytes = b"",
    *fields: bytes,
    method: str = "POST",
    path: str = "/v2/chat/completions",
    version: str = "HTTP/1.1",
) -> bytes:
    line = f"{method} {path} {version}".encode()
    return b"\r\n".join((line, b"Host: localhost", *fields, b"", body))


def sized(body: bytes, *fields: bytes, **options: str) -> bytes:
    return request(body, b"Content-Length: %d" % len(body), *fields, **options)


def chunked(body: bytes, draw: random.Random, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    """`body` in chunks of any lengths."""
    parts = []
    while body:
        size = min(len(body), draw.choice((1, 2, 3, 16, 100, 4096)))
        parts.append(
            draw.choice((b"%x", b"%X", b"%04x")) % size + extension + b"\r\n" + body[:size] + b"\r\n"
        )
        body = body[size:]
    return b"".join(parts) + b"0" + extension + b"\r\n" + trailers + b"\r\n"


def _chunks(draw: random.Random) -> Odd:
    body = draw.choice(BODIES)
    extension = draw.choice((b"", b"", b";a=b", b' ; a="b;c"', b";" + b"a" * 900))
    trailers = draw.choice(
        (b"", b"X: 1\r\n", b"X: 1\r\nY: \xff\r\n", b"Digest:\r\n", b"X: " + b"a" * 2000 + b"\r\n")
    )
    data = chunked(body, draw, extension, trailers)
    fields = [
        draw.choice(
            (b"Transfer-Encoding: chunked", b"transfer-encoding:CHUNKED", b"Transfer-Encoding:  Chunked ")
        )
    ]
    path, method = draw.choice(PATHS), draw.choice(("POST", "POST", "POST", "GET", "PUT", "OPTIONS"))
    if draw.random() < 0.3:
        return Odd(request(data, *fields, path=path, method=method), True, "chunks")
    broken = draw.randrange(9)
    if broken == 0:
        data = (
            draw.choice(
                (b"ZZ", b"-2", b"0x2", b" 2", b"", b"F" * 20, b"F" * 16, b"7FFFFFFFFFFFFFFF", b"2;\x00")
            )
            + b"\r\n"
            + data
        )
    elif broken == 1:
        data = data.replace(b"\r\n", draw.choice((b"\n", b"\r", b"\r\r\n", b"")), draw.choice((1, 2, -1)))
    elif broken == 2:
        data = data[: draw.randrange(len(data))]
    elif broken == 3:
        data = data[:-2] + draw.choice(
            (b"no field\r\n\r\n", b": x\r\n\r\n", b"X: " + b"a" * 40000 + b"\r\n\r\n", b"X : 1\r\n\r\n")
        )
    elif broken == 4:
        fields.append(b"Content-Length: %d" % draw.choice((0, 2, len(data), len(body))))
    elif broken == 5:
        fields[0] = b"Transfer-Encoding: " + draw.choice(CODINGS).encode()
    elif broken == 6:
        fields.append(
            draw.choice((fields[0], b"Expect: 100-continue", b"Upgrade: x", b"Transfer-Encoding: gzip"))
        )
    elif broken == 7:
        return Odd(request(data, *fields, path=path, version="HTTP/1.0"), False, "chunks of HTTP/1.0")
    else:
        data = _mutate(data, draw)
    return Odd(request(data, *fields, path=path, method=method), False, "broken chunks")


def _lengths(draw: random.Random) -> Odd:
    body, path = draw.choice(BODIES), draw.choice(PATHS)
    if draw.random() < 0.4:
        wrong = max(0, len(body) + draw.choice((-1000, -1, 1, 7, 100000)))
        return Odd(request(body, b"Content-Length: %d" % wrong, path=path), False, "another length")
    if draw.random() < 0.3:
        pair = (b"Content-Length: 2", b"content-length: %d" % draw.choice((2, 3)))
        return Odd(request(b"{}", *pair, path=path), False, "two lengths")
    return Odd(
        request(body, f"Content-Length: {draw.choice(LENGTHS)}".encode(), path=path), False, "no length"
    )


def _heads(draw: random.Random) -> Odd:
    choice = draw.randrange(6)
    if choice == 0:
        return Odd(sized(b"{}", method=draw.choice(METHODS), path=draw.choice(PATHS)), False, "methods")
    if choice == 1:
        return Odd(
            sized(b"", method=draw.choice(("GET", "POST", "OPTIONS")), path=draw.choice(TARGETS)),
            False,
            "targets",
        )
    if choice == 2:
        version = draw.choice(VERSIONS)
        data = sized(draw.choice(BODIES), path=draw.choice(PATHS), version=version)
        return Odd(data, version == "HTTP/1.0", "versions")
    if choice == 3:
        data = sized(draw.choice(BODIES), path=draw.choice(PATHS))
        return Odd(
            data.replace(b"\r\n", draw.choice((b"\n", b"\r", b"\r\r\n")), draw.choice((1, 2, 3, -1))),
            False,
            "line ends",
        )
    if choice == 4:
        return Odd(
            draw.choice((b"\r\n", b"\n\n\r\n", b" ", b"\x16\x03\x01\x02\x00\x01", b"\x00")) + sized(b"{}"),
            False,
            "first bytes",
        )
    fields = draw.sample(FIELDS, draw.choice((1, 1, 2, 4)))
    return Odd(sized(draw.choice(BODIES), *fields, path=draw.choice(PATHS)), False, "fields")


def _encodings(draw: random.Random) -> Odd:
    raw = zlib.compressobj(wbits=-15)
    bomb = gzip.compress(b" " * (1 << 20))
    bodies = (
        (b"gzip", gzip.compress(CHAT)), (b"x-gzip", gzip.compress(b"{") + gzip.compress(b"}")), (b"deflate", zlib.compress(CHAT)),
        (b"deflate", raw.compress(CHAT) + raw.flush()), (b"gzip, deflate", zlib.compress(gzip.compress(CHAT))), (b"gzip", bomb),
        (b"gzip", gzip.compress(CHAT)[:-3]), (b"gzip", CHAT), (b"gzip", b""), (b"deflate", b"\xff\xff"), (b"br", CHAT),
        (b"zstd", b"\x28\xb5\x2f\xfd"), (b"identity", CHAT), (b"\xff", CHAT), (b",".join([b"gzip"] * 99), bomb), (b"", CHAT),
    )  # fmt: skip
    name, body = draw.choice(bodies)
    field, path = b"Content-Encoding: " + name, draw.choice(PATHS)
    if draw.random() < 0.3:
        return Odd(
            request(chunked(body, draw), field, b"Transfer-Encoding: chunked", path=path),
            True,
            "encoded chunks",
        )
    return Odd(sized(body, field, path=path), True, "encodings")


def _forms(draw: random.Random) -> Odd:
    name = draw.choice((b'name="a"', b'name="file"; filename="f.pth"', b'name="\xff"', b'name="a"; filename="\xff"', b"name=", b"",
                        b"name=\"a\"; filename*=UTF-8''%zz", b'name="a"; filename="' + b"x." + b"y" * 600 + b'"',
                        b'name="file"; filename="../../etc/passwd"', b'name="file"; filename="a\x01b"'))  # fmt: skip
    head = b"Content-Disposition: form-data; " + name
    head = draw.choice(
        (
            head,
            head,
            head,
            b"X: y",
            b"no colon",
            head + b"\r\nContent-Length: 99",
            head + b"\r\nContent-Type: ;;\xff",
            b"",
        )
    )
    part = (
        b"--B\r\n"
        + head
        + b"\r\n\r\n"
        + draw.choice((b"x", b"", b"\xff", b"a" * 3000, b"--B", b"\r\n--"))
        + b"\r\n"
    )
    closed = draw.choice((b"--B--\r\n", b"--B--", b"--B", b"", b"--C--\r\n", b"--B--\r\nafter", b"--B\r\n"))
    body = draw.choice((b"", b"before\r\n")) + part * draw.choice((1, 1, 2, 70)) + closed
    kind = draw.choice((b"form-data; boundary=B", b"form-data; boundary=B", b'form-data; boundary="B"', b"mixed; boundary=B", b"form-data",
                        b"form-data; boundary=", b"form-data; boundary=" + b"B" * 300, b"form-data; boundary=\xff", b"; boundary=B"))  # fmt: skip
    field = b"Content-Type: " + draw.choice((b"multipart/", b"Multipart/")) + kind
    path = draw.choice((*PATHS, "/v1/state/upload", "/v1/state/upload"))
    if draw.random() < 0.3:
        return Odd(
            request(chunked(body, draw), field, b"Transfer-Encoding: chunked", path=path),
            True,
            "forms in chunks",
        )
    return Odd(sized(body, field, path=path), True, "forms")


def _pipelined(draw: random.Random) -> Odd:
    first = draw.choice(
        (
            sized(CHAT),
            request(method="GET", path="/health"),
            request(chunked(CHAT, draw), b"Transfer-Encoding: chunked"),
        )
    )
    second = draw.choice((_chunks, _lengths, _heads, _forms))(draw)
    return Odd(first * draw.choice((1, 3)) + second.data, False, "pipelined " + second.kind)


def _mutated(draw: random.Random) -> Odd:
    odd = draw.choice((_chunks, _lengths, _heads, _encodings, _forms))(draw)
    return Odd(_mutate(odd.data, draw), False, "mutated " + odd.kind)


def _mutate(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(changed) + 1)
        if draw.random() < 0.4:
            changed[at : at + 1] = bytes(
                [draw.choice((0, 9, 10, 13, 32, 48, 58, 59, 127, 255, draw.randrange(256)))]
            )
        elif draw.random() < 0.5:
            del changed[at : at + draw.choice((1, 2, 10, 100))]
        else:
            changed[at:at] = changed[at : at + draw.choice((1, 5, 50))]
    return bytes(changed)

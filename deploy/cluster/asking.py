"""Asking a server over HTTP. What it answers, if anything, ends nobody who asks."""

import urllib.request
from http.client import HTTPException

SECONDS = 5.0  # for each piece of a reply


def ask(address: str, path: str, password: str = "") -> bytes:
    """The body of a reply with the status 200, which is not empty; empty if there is no such reply."""
    headers = {"Authorization": f"Bearer {password}"} if password else {}
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            return bytes(reply.read()) or b" " if reply.status == 200 else b""
    except (OSError, HTTPException):  # the second where what comes is not HTTP, or is cut short
        return b""

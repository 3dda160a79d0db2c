"""Formats of strings as regular expressions, in Rust's form.

llguidance 1.9.1 has some of its own: its `date` and `date-time` take 29 February of any year, the year 0 and
a second 60 at any minute (its pull request 96 leaves leap years out on purpose), its `hostname` and `email`
have no greatest length, and `uri` takes addresses of any form. A format that is not here has no effect, as
JSON Schema has it for formats that are not known.
"""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # what can be divided by four, of 1 to 99
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_LONG_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_SHORT_MONTH = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = f"(?:{_LONG_MONTH}|{_SHORT_MONTH}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+\-]{_MINUTE})"
_COUNT = "[0-9]{1,9}"
_CLOCK = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_CALENDAR = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_H16 = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """All eight groups, or `::` in place of some."""
    forms = [f"(?:{_H16}:){{7}}{_H16}"]
    for before in range(8):
        head = f"(?:{_H16}:){{{before - 1}}}{_H16}" if before else ""
        most = 7 - before  # behind `::`, which stands for one group at least
        tail = f"(?:{_H16}(?::{_H16}){{0,{most - 1}}})?" if most else ""
        forms.append(f"{head}::{tail}")
    return f"(?:{'|'.join(forms)})"


_LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,30}"  # at most 61 characters
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"  # at most 253
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]"
_LOCAL = rf"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,20}}){{1,2}})"  # at most 64
_SEGMENT = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|{_COUNT}W)",
    "email": f"{_LOCAL}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?://(?:(?:{_HOST}|\[{_ipv6()}\])(?::[0-9]{{1,5}})?)?(?:/{_SEGMENT}*)*"
        rf"|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?|{_SEGMENT}+(?:/{_SEGMENT}*)*)"
        rf"(?:\?(?:{_SEGMENT}|[/?])*)?(?:\#(?:{_SEGMENT}|[/?])*)?"
    ),
}

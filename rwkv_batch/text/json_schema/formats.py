"""Formats of strings as regular expressions, in Rust's form, where those of llguidance 1.9.1 are not right.

Its `date` and `date-time` take 29 February of any year (its pull request 96 leaves leap years out on purpose)
and the year 0, its `time` a second 60 at any minute, and its `email` and `hostname` have no greatest length.
A format that is neither here nor the library's has no effect, as JSON Schema has it for formats that are not
known.
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
_LABEL = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,30}"  # at most 61 characters
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"  # at most 253
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?\^_`{|}~]"
_LOCAL = rf"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,20}}){{1,2}})"  # at most 64
OF_LIBRARY = frozenset({"duration", "ipv4", "ipv6", "uuid", "uri"})
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": f"{_LOCAL}@{_HOST}",
    "hostname": _HOST,
}

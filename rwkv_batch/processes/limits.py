"""How many files a process may have open: connections are files too."""

import resource

WANTED = 65536  # enough for all streams and what else is open
LEAST = 128  # for what a front end has open by itself, and some requests


class TooFewFiles(Exception):
    """The message says what to do."""


def allow_open_files() -> int:
    """Raise the limit of this process and of those it starts as far as it may; how many it is.

    A shell lets a process have 1024 files open unless it asks for more. Raises TooFewFiles.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    allowed = WANTED if soft == resource.RLIM_INFINITY else soft
    if allowed < LEAST:
        raise TooFewFiles(
            f"a process may have {allowed} files open here, and a server takes {LEAST} and one for each "
            "connection; raise the limit with ulimit -n, or LimitNOFILE of its unit"
        )
    return allowed

#!/usr/bin/env python3
"""The browser that the tests of the page drive: `python test/helpers/chromium.py` installs it where it may.

CHROMIUM names another one.
"""

import os
import shlex
import shutil
import subprocess
import sys

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PACKAGES = ("chromium-headless-shell", "fonts-inter", "fonts-wqy-microhei")  # fonts for texts in Chinese too
INSTALL = ("apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES)


def find() -> str | None:
    """The path of a Chromium."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


def main() -> None:
    if find():
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(
            "There is no Chromium for the tests of the page; name one in CHROMIUM, or run "
            f"{shlex.join(INSTALL)}."
        )
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run(INSTALL, env=environment, stdout=subprocess.DEVNULL).returncode:
        subprocess.run(["apt-get", "update", "-q"], env=environment, stdout=subprocess.DEVNULL)
        subprocess.run(INSTALL, env=environment, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()

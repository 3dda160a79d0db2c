"""Files and names that survive a power failure."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Put a file on the disk, or the names in a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

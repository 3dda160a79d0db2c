"""Which cores an engine of several stays on: those near its GPU, or of one NUMA node, where Linux says which.

Memory that an engine allocates is then near them too, as Linux takes it from the node of the core that
touches it first.
"""

import logging
import os
from pathlib import Path

SYSFS = Path("/sys")

log = logging.getLogger(__name__)


def stay_near(place: int, gpu: str | None) -> None:
    """Keep this process and its later threads on some of the cores that it may use.

    place: which of the host's engines this is. gpu: the PCI address of its GPU; None: it runs on a CPU.
    """
    allowed = os.sched_getaffinity(0)
    near = cores_near(gpu) if gpu else cores_of_node(place, allowed)
    if near & allowed and not allowed <= near:
        os.sched_setaffinity(0, near & allowed)
        log.info(
            "the engine stays on %d of %d cores, which are near its memory", len(near & allowed), len(allowed)
        )


def cores_near(gpu: str, sysfs: Path = SYSFS) -> set[int]:
    """The cores near a GPU of this PCI address, such as 0000:3b:00.0; empty: that is not said."""
    return _read_cores(sysfs / "bus/pci/devices" / gpu.lower() / "local_cpulist")


def cores_of_node(place: int, allowed: set[int], sysfs: Path = SYSFS) -> set[int]:
    """The cores of one node of those of which any are allowed: engines are divided. Empty: see above."""
    nodes = sorted((sysfs / "devices/system/node").glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    found = [cores for node in nodes if (cores := _read_cores(node / "cpulist")) & allowed]
    return found[place % len(found)] if found else set()


def _read_cores(file: Path) -> set[int]:
    """Of a list such as 0-3,8,10-11; empty where there is none."""
    try:
        parts = [part.partition("-") for part in file.read_text(encoding="ascii").strip().split(",") if part]
        return {core for low, _, high in parts for core in range(int(low), int(high or low) + 1)}
    except (OSError, ValueError):
        return set()

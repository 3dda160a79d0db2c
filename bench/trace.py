"""Where the time of a step goes, kernel by kernel, from the profiler.

The step is a replay of a CUDA graph, or a step of the engine.
"""

import json
import statistics
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch

REPLAYS = 6


def kernels(replay) -> list[dict]:
    """The kernels and copies of some replays, in the order in which they ended.

    Each has name, grid, and start and end in microseconds.
    """
    replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    found = [
        {
            "name": e["name"].split("(")[0].removeprefix("void ")[:48],
            "grid": "x".join(map(str, e["args"].get("grid", []))),
            "start": e["ts"],
            "end": e["ts"] + e["dur"],
        }
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    return sorted(found, key=lambda e: e["end"])


def report(replay) -> str:
    """What each kind of kernel adds to a step, and how long the device was idle.

    A kind is a name, a grid and the kernel before it. Kernels overlap, so the share of a kernel is the time
    from the end of the one before to its own end. The shares add up to the step.
    """
    events = kernels(replay)
    added: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    idle = 0.0
    for before, event in pairwise(events):
        added[event["name"], event["grid"], before["name"][:24]].append(event["end"] - before["end"])
        idle += max(0.0, event["start"] - before["end"])
    span = events[-1]["end"] - events[0]["end"]
    lines = [
        f"{len(events) / REPLAYS:.0f} kernels, {span / REPLAYS / 1e3:.3f} ms a step, {idle / span:.1%} of "
        "it with no kernel running"
    ]
    for (name, grid, before), times in sorted(added.items(), key=lambda item: -sum(item[1])):
        if sum(times) > span / 200:
            lines.append(
                f"{sum(times) / REPLAYS:9.1f} us {len(times) / REPLAYS:6.1f} x "
                f"{statistics.median(times):8.2f} us  "
                f"{name} [{grid}] after {before}"
            )
    return "\n".join(lines)

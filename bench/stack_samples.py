"""Samples of the main thread's stack, as Python starts. bench/start_parts.py has each process import this."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
FOLDER, BEGAN = "RWKV_START_PARTS", "RWKV_START_BEGAN"  # where samples go, and from when on time is counted
EVERY = 0.004  # seconds
READY = "process.Service.serve"  # the function that ends an engine's start
# Python runs this as each process begins, when its folder is on the path.
HOOK = f"import sys; sys.path.append({str(ROOT)!r}); from bench.stack_samples import watch; watch()"


def watch() -> None:
    """Look at this process's main thread from now on, in a thread."""
    threading.Thread(target=_look, args=(threading.get_ident(),), daemon=True).start()


def _look(thread: int) -> None:
    began = float(os.environ[BEGAN])
    chain: list[str] = []
    with (Path(os.environ[FOLDER]) / str(os.getpid())).open("w", buffering=1, encoding="utf-8") as samples:
        while READY not in chain:
            if frame := sys._current_frames().get(thread):
                chain = list(_chain(frame))
                samples.write(json.dumps([time.monotonic() - began, chain]) + "\n")
            time.sleep(EVERY)


def _chain(frame: FrameType | None) -> Iterator[str]:
    """Our functions in the stack, outermost first, and "import NAME" for what does not belong to us."""
    stack: list[FrameType] = []
    while frame:
        stack.append(frame)
        frame = frame.f_back
    for one in reversed(stack):
        code = one.f_code
        module = str(one.f_globals.get("__name__"))
        if code.co_filename.startswith(f"{ROOT}{os.sep}"):
            if code.co_name != "<module>" and __name__ != module:
                yield f"{module.rpartition('.')[2]}.{code.co_qualname}"
        elif code.co_name == "_find_and_load" and module.startswith("importlib"):
            package = str(one.f_locals.get("name")).partition(".")[0]
            if not (ROOT / package).exists() and not (ROOT / f"{package}.py").exists():
                yield f"import {package}"
                return
            yield "import our modules"

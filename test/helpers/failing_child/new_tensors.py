"""Operations of torch whose results are new tensors, in a process that has imported torch."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NewTensors(TorchDispatchMode):
    """Calls `reach` behind each of them while `counts` says so."""

    def __init__(self, counts: Callable[[], bool], reach: Callable[[], None]) -> None:
        super().__init__()
        self._counts, self._reach = counts, reach

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))  # where it is new, nothing else has been changed by it
        if self._counts() and (
            func is torch.ops.aten.lift_fresh.default or _is_new(result, args)  # the first: torch.tensor
        ):
            self._reach()
        return result


def _is_new(result: Any, arguments: Any) -> bool:
    """Whether it has memory of its own."""
    found = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(found, torch.Tensor):
        return False
    of = found.untyped_storage().data_ptr()
    flat = [each for one in arguments for each in (one if isinstance(one, list | tuple) else [one])]
    return all(each.untyped_storage().data_ptr() != of for each in flat if isinstance(each, torch.Tensor))


def starting_with(mode: Callable[[], NewTensors]) -> Callable[[threading.Thread], None]:
    """In place of Thread.start, for threads each of which has such a mode."""
    start = threading.Thread.start

    def with_mode(thread: threading.Thread) -> None:
        run = thread.run

        def runs() -> None:
            with mode():
                run()

        thread.run = runs  # type: ignore[method-assign]
        start(thread)

    return with_mode

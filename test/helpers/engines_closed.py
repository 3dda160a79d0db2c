"""No engine outlives the test or the fixture that has made it.

It has threads, which keep its state pool until it is closed, also where nobody knows it any more.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rwkv_batch.engine.engine import Engine


@contextmanager
def engines_closed() -> Iterator[None]:
    """Those that are made meanwhile are closed at the end, if they are not yet."""
    opened: dict[int, Engine] = {}
    begin, close = Engine.__init__, Engine.close

    def begun(engine: Engine, *args, **options) -> None:
        begin(engine, *args, **options)
        opened[id(engine)] = engine

    def closed(engine: Engine) -> None:
        opened.pop(id(engine), None)
        close(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", begun)
        patch.setattr(Engine, "close", closed)
        yield
        for engine in list(opened.values()):
            engine.close()

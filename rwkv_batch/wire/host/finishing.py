"""The change that a front end was making when it died: all engines have made it now, or none has.

Nobody knows which engines had got it, and what they have answered. They may still be carrying it out.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from uuid import uuid4

from msgspec.structs import replace

from rwkv_batch.wire.client import Client, EngineGone, RequestFailed, RequestRejected
from rwkv_batch.wire.commands import (
    ListAdapters,
    ListModels,
    LoadAdapter,
    LoadModel,
    RemoveAdapter,
    RemoveModel,
)
from rwkv_batch.wire.host.merging import name_of
from rwkv_batch.wire.host.turns import Change

AGAIN = 0.2  # seconds until an engine is asked again that is busy with what it had got

log = logging.getLogger(__name__)


async def finish(
    links: Sequence[Client], engines: Sequence[int], change: Change, had: Collection[str]
) -> bool:
    """Whether these engines have all made it. Then those that are started later make it too.

    had: names of the models that there were before.
    """
    refusals = await asyncio.gather(*(_make(links[engine], change) for engine in engines))
    refused = [each for each in zip(engines, refusals, strict=True) if each[1]]
    if not refused:
        return True
    engine, why = refused[0]
    log.warning("a change that a front end had begun is not made, as %s refuses it: %s", name_of(engine), why)
    for engine in engines:
        try:
            await _undo(links[engine], change, had)
        except EngineGone:
            continue  # it begins with what is noted
        except (RequestRejected, RequestFailed) as error:
            log.error("%s keeps a change that another has refused: %s", name_of(engine), error)
    return False


async def _make(link: Client, change: Change) -> str:
    """Have an engine make it, or see that it has. Why it refuses; empty: it does not, or has died."""
    while True:
        try:
            await link.ask(replace(change, id=uuid4().hex))
        except EngineGone:
            return ""
        except RequestFailed as error:
            return str(error)
        except RequestRejected as error:
            with suppress(EngineGone, RequestFailed, RequestRejected):
                if await _has(link, change):
                    return ""
            is_busy = error.reason == ("exists" if isinstance(change, LoadAdapter) else "conflict")
            if not is_busy:
                return str(error)
            await asyncio.sleep(AGAIN)
        else:
            return ""


async def _has(link: Client, change: Change) -> bool:
    """Whether an engine that refuses a change has made it. Raises as `Client.ask`."""
    match change:
        case LoadAdapter(key=key, to_model=model):
            listed = await link.ask(ListAdapters(uuid4().hex, to_model=model, name=key))
            return bool(listed.adapters)
        case RemoveModel(name=name):
            return name not in await _models(link)
        case RemoveAdapter(to_model=model):
            return model not in await _models(link)  # nor any adapter of it
    return False


async def _undo(link: Client, change: Change, had: Collection[str]) -> None:
    """Remove what there is of it, unless that took the place of something. Raises as `Client.ask`."""
    match change:
        case LoadModel(name=name) if name and name not in had and name in await _models(link):
            await link.ask(RemoveModel(uuid4().hex, name))
        case LoadAdapter(key=key, to_model=model):
            await link.ask(RemoveAdapter(uuid4().hex, key, to_model=model))


async def _models(link: Client) -> set[str]:
    return {info.model for info in (await link.ask(ListModels(uuid4().hex))).models}

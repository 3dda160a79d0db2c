"""Loads and removes models while the others serve: in a thread of its own, one change at a time.

A model that takes the place of another is read and warmed up beside it. Then new requests are the new one's,
while rows that run end with the weights they began with. The database goes over to the new model when these
have ended; until then requests that need it wait, so that no session is continued by the wrong weights.
"""

import gc
import logging
import re
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import TypeVar

import torch
from msgspec.structs import replace as replace_field

from rwkv_batch.config import EngineConfig, file_name, further_model, without_adapter
from rwkv_batch.engine import memory
from rwkv_batch.engine.engine import Engine
from rwkv_batch.engine.memory import MemoryShare
from rwkv_batch.engine.serving.models import Member, Models
from rwkv_batch.engine.startup import SharedDatabase, open_store
from rwkv_batch.model.checkpoint import Checkpoint
from rwkv_batch.model.cuda.packed.packing import TILED
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.model.quantization import packed_file
from rwkv_batch.ops import device as devices
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner.loading import load_model, load_weights, loading_bar
from rwkv_batch.sampling.flashinfer import SamplerError
from rwkv_batch.state.entries import StoreError
from rwkv_batch.wire.commands import LoadModel, MayChangeModels, RemoveModel
from rwkv_batch.wire.protocol import CommandReply, Event, Failed, Rejected, RequestKey
from rwkv_batch.wire.supervision import Loading, ModelDefaults, Serving

MOST_LOADED = 12  # each has two streams of torch's 32
REPORT_EVERY = 0.25  # seconds between reports of progress

# What the fields of LoadModel are called by those who start a server, and by those who send them.
FIELDS = {
    "--adapter": "`adapter_filename`",
    "--adapter-alpha": "`adapter_alpha`",
    "--adapter-scaling": "`adapter_scaling`",
    "--adapter-init": "`adapter_init_filename`",
    "--mole-router": "`mole_router`",
    "--weights": "`model_strategy`",
}
FLAG = re.compile(r"--[a-z-]+")

Change = LoadModel | RemoveModel | MayChangeModels
T = TypeVar("T")
log = logging.getLogger(__name__)


class ModelChanges:
    """Carries LoadModel and RemoveModel out, or says whether it would (MayChangeModels).

    `run` is for the thread that steps the models. `configs`: of the models named at the start, whose settings
    and share of the host's memory later ones get. `announce` is called with what is served and loaded, on
    that thread too. `wake`: see Engine.
    """

    def __init__(
        self,
        models: Models,
        configs: tuple[EngineConfig, ...],
        announce: Callable[[Serving], None],
        wake: Callable[[], None],
        shared: SharedDatabase | None = None,
    ) -> None:
        self._shared = shared
        self._models, self._configs, self._announce, self._wake = models, configs, announce, wake
        self._hosts = len(configs) * configs[0].replicas
        served = zip((info.model for info in models.infos), configs, strict=True)
        self._loaded = dict(served)  # how the model of a name was loaded last
        self._under_way = ""  # what is changed now
        self._ending: Member | None = None  # what was replaced, while it ends
        self._waiting: deque[tuple[RequestKey, Change]] = deque()  # until it has
        self._reported = 0.0  # when progress was, last
        self._streams: dict[int, Callable[[], Engine | None]] = {}  # which engine was built on which

    def run(self, key: RequestKey, command: Change) -> None:
        """Begin with it; the reply is an event of `Models.launch`, at once or later."""
        names = [info.model for info in self._models.infos]
        if self._ending and (self._ending.drained.is_set() or self._ending.engine.drained):
            return self._waiting.append((key, command))  # it has no rows left, and is gone in a moment
        if self._under_way:
            message = f"{self._under_way} now; try again when that is done."
            return self._models.reply(key, Rejected(command.id, "conflict", message))
        if isinstance(command, MayChangeModels):
            return self._models.reply(key, CommandReply(command.id))
        if isinstance(command, LoadModel):
            name = command.name or file_name(command.path)
            self._under_way = f"The model {name} is being loaded"
            work = partial(self._load, key, name, command)
        elif command.name not in names:
            message = f"There is no model {command.name[:60]} here; this server has {', '.join(names)}."
            return self._models.reply(key, Rejected(command.id, "not_found", message))
        elif len(names) == 1:
            message = f"{command.name} is the only model; load another one before it is removed."
            return self._models.reply(key, Rejected(command.id, "invalid", message))
        else:
            self._under_way = f"The model {command.name} is being removed"
            work = partial(self._remove, key, command.name)
        try:
            Thread(target=self._work, args=(key, work), name="models", daemon=True).start()
        except RuntimeError:
            self._under_way = ""
            message = "No thread can be started to change the models; try again later."
            self._models.reply(key, Rejected(command.id, "unavailable", message))

    # In the thread

    def _work(self, key: RequestKey, work: Callable[[], None]) -> None:
        with suppress(CancelledError):  # the loop has ended
            self._answered(key, work)

    def _answered(self, key: RequestKey, work: Callable[[], None]) -> None:
        event: Event
        try:
            return work()
        except CancelledError:
            raise
        except (CheckpointError, DeviceError, SamplerError, StoreError) as error:
            event = Rejected(key[1], "invalid", in_fields(str(error)))
        except Exception as error:
            log.exception("a model could not be loaded or removed")
            event = Failed(key[1], f"The models could not be changed ({type(error).__name__}).")
        self._on_loop(self._done)
        self._on_loop(partial(self._models.reply, key, event))

    def _load(self, key: RequestKey, name: str, command: LoadModel) -> None:
        config = further_model(self._configs[0], command.path, name)
        last = self._loaded.get(name, config)
        has_format = packed_file.format_of(command.path)
        config = replace(
            config,
            weights=command.weights or (None if has_format else config.weights),
            quantize_head=None if has_format or command.weights else config.quantize_head,
            adapter=command.adapter or None,
            adapter_alpha=command.adapter_alpha,
            adapter_scaling=command.adapter_scaling,
            adapter_init=command.adapter_init or None,
            mole_router=command.mole_router,
            state_db=last.state_db,
            state_model=last.state_model,
        )
        with loading_bar(name) as bar:

            def progress(done: int, total: int) -> None:
                bar(done, total)
                self._report_progress(Loading(name, "reading", done / max(total, 1)))

            notes: list[str] = []
            weights = load_weights(None, config, progress, assumed=notes)
        old, in_place = self._models.member(name), False
        self._report_progress(Loading(name, "preparing", 1.0), always=True)
        if old is None:
            engine = self._build(weights, config, command.defaults)
            self._on_loop(partial(self._models.join, name, engine))
        elif refusal := self._build_beside(name, weights, config, command.defaults):
            notes.append(
                f"The memory does not hold both models: {name} took no requests until its rows had ended."
            )
            log.warning("%s %s", notes[-1], refusal)
            in_place = True
            self._build_in_place(old, name, weights, config, command.defaults)
        self._loaded[name] = config
        log.info("%s is served now (%s, fingerprint %s)", name, weights.name, weights.fingerprint)
        self._ending = None if in_place else old
        self._under_way = f"The model that {name} has replaced is still running rows" if self._ending else ""
        self._on_loop(partial(self._reply, key, " ".join(notes)))
        if self._ending:
            self._report_progress(Loading(name, "draining", 1.0), always=True)
            self._end(self._ending)
            self._attach(name, config)
            self._on_loop(self._done)

    def _build_beside(
        self, name: str, weights: Checkpoint, config: EngineConfig, defaults: ModelDefaults
    ) -> str:
        """Let a new engine take over while the old one ends. Returns why it cannot; empty: it has.

        It cannot if the memory does not hold both.
        """
        try:
            engine = self._build(weights, replace(config, state_db=None), defaults)
        except DeviceError as error:
            refusal = str(error)
        else:
            self._on_loop(partial(self._models.take_over, name, engine))
            return ""
        self._free()  # what was there of it, which the exception referred to
        return refusal

    def _build_in_place(
        self, old: Member, name: str, weights: Checkpoint, config: EngineConfig, defaults: ModelDefaults
    ) -> None:
        """Let the old model end first. If the new one cannot run even so, the old one comes back."""
        self._report_progress(Loading(name, "draining", 1.0), always=True)
        before = old.engine.parts.weights
        self._on_loop(partial(self._models.hold, name))
        self._end(old)
        self._report_progress(Loading(name, "preparing", 1.0), always=True)
        try:
            engine = self._build(weights, config, defaults)
        except Exception as error:
            refused = error.with_traceback(None)  # which refers to what was there of it
        else:
            return self._on_loop(partial(self._models.take_over, name, engine))
        self._free()
        try:
            if not before.has_numbers:  # a model on a CPU has packed them
                before = load_weights(None, self._loaded[name], None)
            engine = self._build(before, config, old.info.defaults)
        except Exception:
            self._on_loop(partial(self._models.abandon, name))
            raise
        self._on_loop(partial(self._models.take_over, name, engine))
        raise refused

    def _remove(self, key: RequestKey, name: str) -> None:
        old = self._on_loop(partial(self._models.retire, name))
        self._on_loop(self._announce_served)
        self._end(old)
        log.info("%s is not served any more", name)
        self._under_way = ""
        self._on_loop(partial(self._reply, key, ""))

    def _build(self, weights: Checkpoint, config: EngineConfig, defaults: ModelDefaults) -> Engine:
        """An engine that has run its steps once. Raises DeviceError, SamplerError, StoreError."""
        share = MemoryShare(host=self._hosts, kept=self._models.step_bytes)
        # Which are in the weights already; and this thread takes nobody's time.
        config = replace(without_adapter(config), weights=None, quantize_head=None, capture_late=False)
        if weights.weights not in TILED:
            config = replace(config, activations=None)  # which the server has for models that can have them
        places, copies = devices.find_devices(config.device), config.activations is not None
        for device in dict.fromkeys(places):
            part = places.count(device) / len(places)
            memory.check_weights(weights, device, share.kept, part, copies)
        free = [number for number in range(MOST_LOADED) if self._streams.get(number, _nothing)() is None]
        if not free:
            raise DeviceError(f"{MOST_LOADED} models are loaded beside those of the start; remove one.")
        with ExitStack() as on_error, devices.own_stream(places, free[0]):
            # first, as a database that is in use is known at once
            if store := open_store(config, share, self._shared):
                on_error.callback(store.close)
            loaded = load_model(weights, config)
            engine = Engine(loaded, config=config, store=store, share=share, wake=self._wake)
            on_error.pop_all()
        self._streams[free[0]] = weakref.ref(engine)
        engine.info = replace_field(engine.info, defaults=defaults)
        return engine

    def _end(self, old: Member) -> None:
        """Wait until its rows have ended, store what is not stored, and free it."""
        old.drained.wait()
        old.close()
        self._on_loop(partial(self._models.flush, old))
        old.forget()
        self._free()

    def _attach(self, name: str, config: EngineConfig) -> None:
        """Give the database to the model that has taken over, and to it the requests that waited for this."""
        store = None
        try:
            store = open_store(config, MemoryShare(host=self._hosts), self._shared)
            self._on_loop(partial(self._models.attach, name, store))
        except StoreError as error:
            log.error("sessions of %s are kept in memory only: %s", name, error)
            if store:
                store.close()
            self._on_loop(partial(self._models.attach, name, None))

    @staticmethod
    def _free() -> None:
        """Give back memory that nothing refers to any more, though a freeze has kept it from collection."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _report_progress(self, loading: Loading, always: bool = False) -> None:
        now = time.monotonic()
        if always or now - self._reported >= REPORT_EVERY:
            self._reported = now
            self._models.post(lambda: self._announce(Serving(self._models.infos, [loading])))
            self._wake()

    def _on_loop(self, call: Callable[[], T]) -> T:
        """The result of a call that the thread of the models makes between two steps.

        Raises CancelledError if it makes no more calls.
        """
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(call())
            except BaseException as error:
                result.set_exception(error)

        self._models.post(run, result)
        self._wake()
        return result.result()

    # On the loop

    def _announce_served(self) -> None:
        self._announce(Serving(self._models.infos, []))

    def _reply(self, key: RequestKey, note: str) -> None:
        self._announce_served()
        self._models.reply(key, CommandReply(key[1], models=self._models.infos, note=note))

    def _done(self) -> None:
        self._under_way, self._ending = "", None
        self._announce_served()
        while self._waiting:
            self.run(*self._waiting.popleft())


def in_fields(message: str) -> str:
    """A message about flags for a client, who has sent fields. What has no field is for the operator."""
    return FLAG.sub(lambda flag: FIELDS.get(flag[0], flag[0]), message)


def _nothing() -> None:
    """In place of a reference."""

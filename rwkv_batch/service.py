"""The engine's process: requests in from the front ends, one message a step and front end out.

The supervisor holds the other end of `control`. It is told `EngineInfo` once the model is loaded, or the sentence of a
`LoadFailure`; it says `FrontendGone` when a front end has died and "stop" at the end. If it dies itself, so does this process.
"""
import logging
import os
import signal
import sys
from collections import defaultdict
from multiprocessing.connection import Connection

import msgspec
import zmq
from tqdm import tqdm

from rwkv_batch.checkpoint import CheckpointError
from rwkv_batch.engine import Engine, Key
from rwkv_batch.memory import DeviceError
from rwkv_batch.protocol import Accepted, Cancel, Event, Failed, GenerateRequest, Progress, Rejected, decode_to_engine, encode
from rwkv_batch.scheduler import QueueFull
from rwkv_batch.settings import EngineSettings, FrontendGone, LoadFailure

log = logging.getLogger(__name__)


def run(settings: EngineSettings, control: Connection) -> None:
    """Load the model and serve until told to stop. Exit code 2 if the model cannot be loaded."""
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s engine: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the whole group; the supervisor decides
        signal.signal(number, signal.SIG_IGN)
    try:
        engine = _load(settings)
    except (CheckpointError, DeviceError) as error:
        control.send(LoadFailure(str(error)))
        sys.exit(2)
    service = Service(engine, settings.address, control)
    control.send(engine.info)
    service.serve()


def _load(settings: EngineSettings) -> Engine:
    with tqdm(unit="B", unit_scale=True, desc="loading", disable=None, leave=False) as bar:
        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return Engine(settings.model_path, device=settings.device, max_rows=settings.max_rows, prefill_tokens=settings.prefill_tokens,
                      max_waiting=settings.max_waiting, wkv=settings.wkv, progress=progress)


Outbox = defaultdict[bytes, list[Event]]  # the events of one turn of the loop, by front end


class Service:
    """The loop around an engine."""

    def __init__(self, engine: Engine, address: str, control: Connection) -> None:
        self.engine = engine
        self._control = control
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a front end that has died is an error, not silence
        self._router.setsockopt(zmq.SNDHWM, 0)            # a front end that lags is cancelled by its own limits, not by lost text
        self._router.setsockopt(zmq.LINGER, 1000)
        self._router.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(control.fileno(), zmq.POLLIN)
        self._stopping = False

    def serve(self) -> None:
        while not self._stopping:
            outbox: Outbox = defaultdict(list)
            ready = dict(self._poller.poll(0 if self.engine.busy else None))
            if self._control.fileno() in ready:
                self._hear_supervisor()
            if self._router in ready:
                self._receive(outbox)
            if self.engine.busy:
                self._step(outbox)
            self._send(outbox)
        self._router.close()
        self._context.term()

    def _hear_supervisor(self) -> None:
        try:
            message = self._control.recv()
        except EOFError:
            os._exit(1)
        if isinstance(message, FrontendGone):
            self.engine.cancel_frontend(message.name.encode())
        else:
            self._stopping = True

    def _receive(self, outbox: Outbox) -> None:
        while True:
            try:
                frontend, data = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_to_engine(data)
            except msgspec.DecodeError as error:
                log.error("front end %s sent a message that is not understood: %s", frontend.decode(), error)
                continue
            key = (frontend, message.id)
            if isinstance(message, Cancel):
                self.engine.cancel(key)
            elif isinstance(message, GenerateRequest):
                self._add(key, message, outbox)

    def _add(self, key: Key, request: GenerateRequest, outbox: Outbox) -> None:
        try:
            prompt_tokens, ended = self.engine.add(key, request)
        except QueueFull as full:
            outbox[key[0]].append(Rejected(request.id, "overloaded", f"The server is busy: {full}."))
        except ValueError as error:
            outbox[key[0]].append(Rejected(request.id, "invalid", str(error)))
        except Exception as error:
            log.exception("request %s could not be queued", request.id)
            outbox[key[0]].append(Failed(request.id, f"The engine could not take this request ({type(error).__name__})."))
        else:
            outbox[key[0]].append(Accepted(request.id, prompt_tokens))
            if ended:
                outbox[key[0]].append(Progress(request.id, ended))

    def _step(self, outbox: Outbox) -> None:
        news, failure = self.engine.step()
        for key, deltas in news.items():
            outbox[key[0]].append(Progress(key[1], deltas))
        if failure:
            for key in failure.keys:
                outbox[key[0]].append(Failed(key[1], failure.message))

    def _send(self, outbox: Outbox) -> None:
        for frontend, events in outbox.items():
            try:
                self._router.send_multipart([frontend, encode(events)])
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.engine.cancel_frontend(frontend)

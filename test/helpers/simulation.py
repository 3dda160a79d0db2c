"""Histories of a simulated server: what clients ask, what dies, and whether every answer is right."""

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from engine_driver import free_slots
from hashed_model import BEGINNING, STOP_IDS, Seed, after, ids_of, text_after
from possible_sessions import Call, Conversation, Outcomes, PossibleSessions, Sessions, Turn, find, put
from simulated_server import Server, Shape, SimulatedEngine
from turn_taking import World

from rwkv_batch.wire.commands import DeleteSession, ForkSession, RewindSession, SessionHistory
from rwkv_batch.wire.protocol import (
    Cancel,
    CommandReply,
    Event,
    Failed,
    GenerateRequest,
    Progress,
    Rejected,
    Sampling,
    SessionTurn,
)

KEYS = "abcd"
STOPS = ("ab", "dda", "cbd", "acac", "bb", "d")
PATIENCE = 600.0  # seconds of the world's clock that a history takes at most


@dataclass
class Counted:
    """What has happened in histories."""

    histories: int = 0
    steps: int = 0  # turns of tasks
    events: Counter[str] = field(default_factory=Counter)


class History:
    """One server, a few clients, and one seed."""

    def __init__(self, seed: int, folder: Path, requests: int = 30) -> None:
        self.draw = Random(f"history {seed}")
        self.world = World(seed)
        self.server = Server(self.world, Shape.drawn(self.draw), folder)
        self.possible = PossibleSessions()
        self.counted: Counter[str] = Counter()
        self._requests, self._left = requests, list[Call]()
        self._number = 0
        self._mishaps = self.draw.choice((0, 1, 2, 3)) if self.server.shape.database != "memory" else 0

    def run(self) -> None:
        """Raises AssertionError where an answer is wrong, and Stuck where none comes."""
        with self.server.patched(), self.world.active():
            clients = [
                self.world.start("client", self._ask, f"client {number}")
                for number in range(self.draw.choice((1, 1, 2, 3)))
            ]
            self.world.start("mishaps", self._have_mishaps, "fate")
            try:
                self.world.run(lambda: all(client.ended for client in clients), PATIENCE)
                last = self.world.start("end", self._end, "client")
                self.world.run(lambda: last.ended, PATIENCE)
            finally:
                self.world.end()

    # Clients

    def _ask(self) -> None:
        while self._requests > 0:
            if self._left:
                self._come_to_rest()
                continue
            self._requests -= 1
            kinds = (self._turn, self._rows, self._fork, self._rewind, self._delete, self._history)
            self.draw.choices(kinds, (50, 12, 8, 8, 5, 10))[0]()

    def _turn(self, key: str | None = None, leaves: bool = True) -> None:
        draw = self.draw
        source = key or draw.choice(KEYS)
        target = source if key or draw.random() < 0.85 else draw.choice(KEYS)
        prompt = tuple(draw.choices(range(98, 110), k=draw.choice((1, 2, 5, 40))))
        most, seed = draw.choice((0, 1, 5, 12, 30)), draw.getrandbits(20)
        stops = draw.choices(STOPS, k=draw.choice((0, 0, 1, 2)))
        stop_ids = draw.choice(([], STOP_IDS))
        request = GenerateRequest(
            self._name(),
            prompts=[list(prompt)],
            max_tokens=most,
            sampling=Sampling(seed=seed),
            stop_strings=stops,
            stop_ids=stop_ids,
            flush_tokens=draw.choice((0, 1, 5)),
            turn=SessionTurn(source=source, target=target),
            batch=draw.random() < 0.2,
        )

        @cache
        def goes_on(before: Conversation) -> tuple[Conversation, object]:
            state = after(before.state, prompt)
            text, reason = text_after(state, Seed(seed, 0), most, stop_ids, stops)
            return before.plus(Turn(prompt, tuple(ids_of(text)))), (text, reason)

        def read(sessions: Sessions) -> Conversation:
            return find(sessions, source) or Conversation()

        def carry_out(sessions: Sessions, before: Conversation | None = None) -> Outcomes:
            longer, answer = goes_on(before or read(sessions))
            return put(sessions, target, longer), answer

        name = f"turn {request.id} from {source} into {target} of {len(prompt)} tokens, at most {most}"
        # Into another session, a turn stores what has come of its source as that was when the turn began.
        self._call(Call(name, carry_out, None if target == source else read), request, _text, leaves)

    def _rows(self) -> None:
        """Rows of no session, of which everything is known beforehand."""
        draw = self.draw
        prompts = [
            draw.choices(range(98, 102), k=draw.choice((1, 3, 20, 50))) for _ in range(draw.choice((1, 3)))
        ]
        n, most, seed = draw.choice((1, 2, 4)), draw.choice((1, 4, 20)), draw.getrandbits(20)
        stops = draw.choices(STOPS, k=draw.choice((0, 1)))
        request = GenerateRequest(
            self._name(),
            prompts=[*prompts],
            n=n,
            max_tokens=most,
            sampling=Sampling(seed=seed),
            stop_strings=stops,
            stop_ids=STOP_IDS,
            flush_tokens=draw.choice((0, 3)),
            batch=draw.random() < 0.3,
        )

        texts = tuple(
            text_after(after(BEGINNING, prompts[row // n]), Seed(seed, row), most, STOP_IDS, stops)
            for row in range(n * len(prompts))
        )

        def carry_out(sessions: Sessions) -> Outcomes:
            return sessions, texts

        self._call(Call(f"rows {request.id}", carry_out), request, partial(_texts, n * len(prompts)))

    def _fork(self) -> None:
        key, target = self.draw.sample(KEYS, 2)
        replace, number = self.draw.random() < 0.5, self.draw.choice((None, None, 1, 2))

        def read(sessions: Sessions) -> Conversation | None:
            return find(sessions, key)

        def carry_out(sessions: Sessions, source: Conversation | None) -> Outcomes:
            if source is None:
                return sessions, "not_found"
            if find(sessions, target) and not replace:
                return sessions, "exists"
            if number is None:
                return put(sessions, target, source), "ok"
            if number > len(source.turns):
                return sessions, "not_found"
            return put(sessions, target, _first(source, number)), "ok"

        command = ForkSession(self._name(), key=key, target=target, turn=number, replace=replace)
        # Of its source as that was when it began, like a turn into another session.
        fork = Call(f"fork {command.id} of turn {number} of {key} into {target}", carry_out, read)
        self._call(fork, command, _outcome)

    def _rewind(self) -> None:
        key, number = self.draw.choice(KEYS), self.draw.choice((0, 1, 2))

        def carry_out(sessions: Sessions) -> Outcomes:
            source = find(sessions, key)
            if number == 0:
                return put(sessions, key, None), "gone"
            if source is None or number > len(source.turns):
                return sessions, "not_found"
            return put(sessions, key, _first(source, number)), "ok"

        def read(events: list[Event]) -> object:
            outcome = _outcome(events)  # who comes to a session that has just been deleted may be too late
            return "gone" if number == 0 and outcome in ("ok", "not_found") else outcome

        command = RewindSession(self._name(), key=key, turn=number)
        self._call(Call(f"rewind {command.id} of {key} to {number}", carry_out), command, read)

    def _delete(self) -> None:
        key = self.draw.choice(KEYS)
        command = DeleteSession(self._name(), key=key)
        gone = Call(f"delete {command.id} of {key}", lambda sessions: (put(sessions, key, None), "ok"))
        self._call(gone, command, _outcome)

    def _history(self, key: str | None = None) -> None:
        key = key or self.draw.choice(KEYS)

        def carry_out(sessions: Sessions) -> Outcomes:
            found = find(sessions, key)
            return sessions, found.turns if found else "not_found"

        command = SessionHistory(self._name(), key=key)
        self._call(Call(f"history {command.id} of {key}", carry_out), command, _turns)

    def _call(
        self, call: Call, message: Any, read: Callable[[list[Event]], object], leaves: bool = True
    ) -> None:
        """Send it to an engine, wait, and check the answer."""
        server, world, draw = self.server, self.world, self.draw
        world.wait(lambda: any(each.serves for each in server.engines))
        each = draw.choice([each for each in server.engines if each.serves])
        life, events = each.lives, server.answers.setdefault(message.id, [])
        self.possible.called(call)
        server.send(each, message)
        self.counted[type(message).__name__] += 1

        def is_over() -> bool:
            return read(events) is not None or each.ended or each.lives != life

        is_short = leaves and isinstance(message, GenerateRequest) and draw.random() < 0.1
        if is_short and not world.wait(is_over, draw.expovariate(200)):
            server.send(each, Cancel(message.id))
            self.counted["left"] += 1
            self._left.append(call)
            return
        world.wait(is_over)
        answer = read(events)
        if isinstance(answer, Rejected) and answer.reason in ("conflict", "overloaded"):
            self._may_be_refused(answer, message)
            self.possible.refused(call)
        elif answer is None or isinstance(answer, Failed):
            self.counted["lost"] += 1
            self._left.append(call)
        else:
            self.possible.answered(call, answer)

    def _come_to_rest(self) -> None:
        """Of requests that nobody waits for nothing more comes when all engines are idle."""
        engines, left = self.server.engines, [*self._left]
        self.world.wait(lambda: all(_is_idle(each) for each in engines), 60)
        assert all(_is_idle(each) for each in engines), "an engine does not come to an end"
        self.world.sleep(1)  # for what is under way between processes
        left = [call for call in left if call in self._left]  # another client may have waited for them, too
        self._left = [call for call in self._left if call not in left]
        self.possible.lost(left)

    def _may_be_refused(self, answer: Rejected, message: Any) -> None:
        self.counted[f"refused: {answer.reason}"] += 1
        if isinstance(message, GenerateRequest):  # another engine has been faster
            faster = len(self.server.engines) > 1 or "is being changed" in answer.message
            assert answer.reason == "conflict" and faster, answer

    def _name(self) -> str:
        self._number += 1
        return str(self._number)

    # What goes wrong, and the end

    def _have_mishaps(self) -> None:
        """Processes die, and the disk is full for a while."""
        server, world, draw = self.server, self.world, self.draw
        for _ in range(self._mishaps):
            world.sleep(draw.expovariate(20))
            if draw.random() < 0.3:
                self.counted["times of a full disk"] += 1
                server.disk_is_full = True
                world.sleep(draw.expovariate(50))
                server.disk_is_full = False
                continue
            if server.shape.database == "shared" and draw.random() < 0.4:
                self.counted["deaths of the database's process"] += 1
                server.kill_database()
                world.sleep(draw.expovariate(50))
                server.start_database(first=False)
                continue
            each = draw.choice(server.engines)
            if each.serves:
                self.counted["deaths of engines"] += 1
                server.kill(each)
                world.sleep(draw.expovariate(50))
                server.start(each)

    def _end(self) -> None:
        """What clients left is over; then each session is looked at, in the same engines and in new ones."""
        server, world = self.server, self.world
        self._come_to_rest()
        for key in KEYS:
            self._history(key)
            self._turn(key, leaves=False)
        if server.shape.database != "memory":
            server.stop()
            if not self.counted["deaths of engines"]:  # else the next start removes them
                assert not server.left_turns(), "a turn has been left behind"
            if server.shape.database == "shared":
                server.start_database(first=True)
            for each in server.engines:
                server.start(each)
            world.wait(lambda: all(each.serves for each in server.engines))
            assert not server.left_turns(), "what was left of a session that was deleted is not removed"
            for key in KEYS:
                self._history(key)
                self._turn(key, leaves=False)
        for key in KEYS:
            for each in server.engines:
                self._everywhere(each, key)
        world.wait(lambda: all(_slots_are_free(each) for each in server.engines), 60)
        for each in server.engines:
            assert _slots_are_free(each), "a slot has been lost"
        assert not any(self.possible.conversations(key) != {None} for key in KEYS)
        server.stop()

    def _everywhere(self, each: SimulatedEngine, key: str) -> None:
        """Delete it in this engine, which has its state perhaps."""
        command = DeleteSession(self._name(), key=key)
        call = Call(f"delete {command.id} of {key}", lambda sessions: (put(sessions, key, None), "ok"))
        self.possible.called(call)
        events = self.server.answers.setdefault(command.id, [])
        self.server.send(each, command)
        self.world.wait(lambda: bool(events))
        self.possible.answered(call, _outcome(events))


def _first(source: Conversation, number: int) -> Conversation:
    found = Conversation()
    for turn in source.turns[:number]:
        found = found.plus(turn)
    return found


def _is_idle(each: SimulatedEngine) -> bool:
    return each.serves and each.engine is not None and not each.inbox and each.engine.drained


def _slots_are_free(each: SimulatedEngine) -> bool:
    """All but those that hold states, which others have deleted perhaps."""
    assert each.engine
    idle = len(each.engine.pool.parts.tiers.turns("L1"))
    return free_slots(each.engine.scheduler) + idle == len(each.engine.runner.states)


# Answers: None while there is none.


def _text(events: list[Event]) -> object:
    texts = _texts(1, events)
    return texts[0] if isinstance(texts, tuple) else texts


def _texts(rows: int, events: list[Event]) -> object:
    texts, reasons = [""] * rows, [""] * rows
    for event in events:
        if isinstance(event, Rejected | Failed):
            return event
        for delta in event.rows if isinstance(event, Progress) else ():
            assert not reasons[delta.row], "text came behind the end of its row"
            texts[delta.row] += delta.text
            reasons[delta.row] = delta.finish_reason or ""
    return tuple(zip(texts, reasons, strict=True)) if all(reasons) else None


def _outcome(events: list[Event]) -> object:
    match events:
        case []:
            return None
        case [CommandReply()]:
            return "ok"
        case [Rejected(reason="not_found" | "exists" as reason)]:
            return reason
        case [event]:
            return event
    raise AssertionError(f"a command has several answers: {events}")


def _turns(events: list[Event]) -> object:
    outcome = _outcome(events)
    if outcome != "ok":
        return outcome
    (reply,) = events
    assert isinstance(reply, CommandReply)
    return tuple(Turn(tuple(turn.prompt_tokens), tuple(turn.completion_tokens)) for turn in reply.turns)


def play(seed: int, counted: Counted | None = None) -> History:
    """Play one history. Raises what is wrong, with what led to it."""
    with tempfile.TemporaryDirectory(prefix="rwkv-", dir=_memory_folder()) as folder:
        history = History(seed, Path(folder))
        try:
            history.run()
        except BaseException as error:
            lines = [f"seed {seed}: {history.server.shape}", *history.possible.log]
            error.add_note("\n".join(lines))
            raise
    if counted:
        counted.histories += 1
        counted.steps += history.world.turns
        counted.events += history.counted
    return history


def _memory_folder() -> str | None:
    """Where files cost nothing, if the system has that."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None

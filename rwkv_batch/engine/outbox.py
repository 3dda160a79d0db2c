"""Events of requests, collected during a step for the front ends."""

from rwkv_batch.wire.protocol import Event

RequestKey = tuple[bytes, str]  # (front end, request id)


class Outbox:
    """Events in the order in which they were put."""

    def __init__(self) -> None:
        self._events: list[tuple[RequestKey, Event]] = []

    def __len__(self) -> int:
        return len(self._events)

    def put(self, request: RequestKey, event: Event) -> None:
        self._events.append((request, event))

    def take(self) -> list[tuple[RequestKey, Event]]:
        """All events since the last call."""
        events, self._events = self._events, []
        return events

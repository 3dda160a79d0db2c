"""How much of the time the device is busy."""

from time import monotonic

WINDOW = 5.0  # seconds; the idle share is that of the last one or two windows


class DeviceTime:
    """The seconds that steps have taken of a device, of all models together."""

    def __init__(self) -> None:
        self.busy = 0.0
        # (time, seconds busy until then) where this window and the one before it began.
        self._window = self._before = (monotonic(), 0.0)

    def add(self, seconds: float) -> None:
        """Steps have taken so much more."""
        self.busy += seconds
        now = monotonic()
        if now - self._window[0] >= WINDOW:
            self._window, self._before = (now, self.busy), self._window

    @property
    def idle_share(self) -> float:
        """Of the time since the window before this one began, 0 to 1."""
        self.add(0.0)
        began, busy = self._before
        passed = monotonic() - began
        return min(max(1.0 - (self.busy - busy) / passed, 0.0), 1.0) if passed else 1.0

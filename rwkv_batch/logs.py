"""How all processes of the server log: lines of text, or of JSON."""

import json
import logging
import time

import msgspec

_ENCODER = msgspec.json.Encoder(enc_hook=str)


class LineFormatter(logging.Formatter):
    """Lines as logging writes them, for which the time is made once a second."""

    _written = 0, ""  # a second and its text

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """The record's time."""
        second, text = self._written
        if (now := int(record.created)) != second:
            text = time.strftime(self.default_time_format, self.converter(now))
            self._written = now, text
        return f"{text},{int(record.msecs):03d}"


class JsonFormatter(logging.Formatter):
    """A line is an object. What `fields` of a message returns, as of the access log's, stands beside it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._written = 0, ""  # a second and its text

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self._when(record.created),
            "level": record.levelname,
            "process": self._process,
            "message": record.getMessage(),
        }
        if fields := getattr(record, "fields", None):
            line |= fields()
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.format(_ENCODER.encode(line), indent=0).decode()
        except (UnicodeEncodeError, OverflowError):  # of a string that is no text, or a very large number
            return json.dumps(line, ensure_ascii=False, default=str)

    def _when(self, seconds: float) -> str:
        """A time in the form of RFC 3339, with milliseconds."""
        second, text = self._written
        if (now := int(seconds)) != second:
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
            self._written = now, text
        return f"{text}.{int(seconds * 1000) % 1000:03d}Z"


def begin_logging(level: str, form: str = "text", process: str = "") -> None:
    """Once in each process. form: text or json. process: its name; "": a front end, which does not say it."""
    who = f" {process}:" if process else ""
    logging.basicConfig(level=level)
    lines = LineFormatter(f"%(asctime)s %(levelname)s{who} %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonFormatter(process or "frontend") if form == "json" else lines)

"""Reads the calls of tools that models write, in all forms in which models have been seen to write them.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    <tool_calls>[{...}, {...}]</tool_calls>
    ```json, the same object or list, ```
    **Tool Call:** in front of such a fence

`arguments` may be an object or its JSON text. A fence that holds nothing but a call need not be closed at the
end of the answer: models that continue transcripts leave that out.
"""

import json
from collections.abc import Container
from dataclasses import dataclass

from routes.http.errors import Json
from rwkv_batch.chat.tools import CLOSE, FENCE, FENCE_END, OPEN, TOOL_CALL

LIST_OPEN, LIST_CLOSE = "<tool_calls>", "</tool_calls>"
# what a block begins with -> what it ends with
ENDS = {OPEN: CLOSE, LIST_OPEN: LIST_CLOSE, FENCE: FENCE_END, TOOL_CALL: FENCE_END}


@dataclass(frozen=True)
class ToolCall:
    """A call the model made: the function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallParser:
    """Finds the calls in a stream of text.

    Text that could still be the beginning of a call is held back. If it is none, it comes out unchanged.
    `names`: the tools that may be called; None: any. A block with a call of another is text. `most`: how many
    calls count; blocks behind them are text; None: all.
    """

    def __init__(self, names: Container[str] | None = None, most: int | None = None) -> None:
        self.calls: list[ToolCall] = []
        self._names, self._most = names, most
        self._held = ""
        self._searched = 0  # how far the held block has been searched for its end

    def feed(self, text: str) -> str:
        """The part of the answer that can be shown after `text`. `calls` grows as calls are complete."""
        self._held += text
        shown = ""
        while not self._full:
            start, mark = self._next_mark()
            if start < 0:
                held_back = max(partial_suffix(self._held, mark) for mark in ENDS)
                return shown + self._show(len(self._held) - held_back)
            shown += self._show(start)
            begin = self._begin(mark)
            if begin is None:
                return shown
            end = self._held.find(ENDS[mark], max(self._searched, begin)) if begin >= 0 else -1
            if begin >= 0 and end < 0:
                self._searched = max(self._searched, len(self._held) - len(ENDS[mark]))
                return shown
            try:
                if begin < 0:
                    raise ValueError("no block begins here")
                calls = self._parse(self._held[begin:end], mark)
            except _InsideString:
                self._searched = end + len(ENDS[mark])
            except ValueError:
                shown += self._show(len(mark))  # no call, but one may begin inside of it
            else:
                self.calls += calls
                self._show(end + len(ENDS[mark]))
        return shown + self._show(len(self._held))

    def finish(self) -> str:
        """What was held back, at the end of the answer, and is no call."""
        shown = ""
        while mark := next((mark for mark in ENDS if self._held.startswith(mark)), None):
            begin = self._begin(mark)
            if ENDS[mark] == FENCE_END and begin and begin > 0 and not self._full:
                try:
                    self.calls += self._parse(self._held[begin:].rstrip("`"), mark)
                except ValueError:
                    pass
                else:
                    self._show(len(self._held))
                    break
            shown += self._show(len(mark)) + self.feed("")  # a call that never ended may hold a whole one
        return shown + self._show(len(self._held))

    @property
    def _full(self) -> bool:
        return self._most is not None and len(self.calls) >= self._most

    def _next_mark(self) -> tuple[int, str]:
        """Where the first block begins and with what; -1 if there is none."""
        for mark in ENDS:  # the usual case first: a long block is asked for with every piece of it
            if self._held.startswith(mark):
                return 0, mark
        return min(((at, mark) for mark in ENDS if (at := self._held.find(mark)) >= 0), default=(-1, ""))

    def _begin(self, mark: str) -> int | None:
        """Where the JSON of the held block begins; -1: nowhere; None: more text must tell."""
        at = len(mark)
        if mark == TOOL_CALL:
            rest = self._held[at:].lstrip()
            if not rest.startswith(FENCE):
                return None if FENCE.startswith(rest) else -1
            at = len(self._held) - len(rest) + len(FENCE)
        if mark in (FENCE, TOOL_CALL):
            rest = self._held[at:].lstrip()
            if rest and rest[0] not in "{[":
                return -1
        return at

    def _parse(self, text: str, mark: str) -> list[ToolCall]:
        """Raises ValueError when `text` holds something else than calls that may be made."""
        try:
            data = json.loads(text, strict=False)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string"):
                raise _InsideString from None
            raise
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if isinstance(data, dict) and mark != LIST_OPEN:
            data = [data]
        elif not isinstance(data, list) or not data or mark == OPEN:
            raise ValueError("a block holds calls")
        # other JSON than calls stands in fences too, and seldom has both fields
        calls = [self._call(item, arguments_needed=ENDS[mark] == FENCE_END) for item in data]
        return calls if self._most is None else calls[: self._most - len(self.calls)]

    def _call(self, data: object, arguments_needed: bool) -> ToolCall:
        if not isinstance(data, dict) or (arguments_needed and "arguments" not in data):
            raise ValueError("a call is an object with name and arguments")
        name, arguments = data.get("name"), data.get("arguments", {})
        if not isinstance(name, str) or not name or not (self._names is None or name in self._names):
            raise ValueError("a call has the name of a tool")
        name.encode()
        return ToolCall(name, canonical_json({} if arguments in (None, "") else arguments))

    def _show(self, length: int) -> str:
        """Take `length` characters out of what is held."""
        shown, self._held = self._held[:length], self._held[length:]
        if shown:
            self._searched = 0
        return shown


def partial_suffix(text: str, tag: str) -> int:
    """Length of the longest proper beginning of `tag` that `text` ends with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def canonical_json(arguments: object) -> str:
    """The arguments of a call, an object or its JSON text, as one line of JSON.

    Raises ValueError for anything else: other types, NaN, numbers and nesting without bounds, text that is
    not Unicode.
    """
    try:
        data = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
        if not isinstance(data, dict):
            raise ValueError("the arguments of a call are an object")
        text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("the arguments are nested too deeply") from None
    text.encode()
    return text


def read_arguments(arguments: str | Json) -> str:
    """The arguments of a call of the history, as one line of JSON.

    A text that holds no object, which is what a model has written by mistake, is a JSON string of it.
    Raises ValueError for an object as of `canonical_json`.
    """
    if not isinstance(arguments, str):
        return canonical_json(arguments)
    try:
        return canonical_json(arguments or "{}")
    except ValueError:
        return json.dumps(arguments, ensure_ascii=False)


class _InsideString(ValueError):
    """The end of the block stands inside a string of a call; the block goes on."""

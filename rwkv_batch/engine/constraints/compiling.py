"""Requests with a grammar wait here until it is compiled, beside the steps."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from llguidance import LLMatcher
from msgspec.structs import replace

from rwkv_batch.engine.constraints.masks import RowConstraint
from rwkv_batch.text.grammars import BoundText, GrammarCompiler, GrammarError
from rwkv_batch.text.tokenizer import END_OF_TEXT
from rwkv_batch.wire.protocol import GenerateRequest, RequestKey

THREADS = 2  # so that a grammar that takes long holds up some others only


@dataclass(eq=False)
class CompiledGrammar:
    """Of a request, when it has been compiled; before that, on its way."""

    key: RequestKey
    request: GenerateRequest
    matcher: Future[LLMatcher]  # at the beginning of the text; its error is a GrammarError

    def constraint(self) -> RowConstraint:
        """For one row. Raises GrammarError."""
        grammar = self.request.grammar
        return RowConstraint(self.matcher.result().deep_copy(), grammar.field if grammar else "")


class GrammarQueue:
    """For the engine's thread. `wake` is called from another one when `take` has something new."""

    def __init__(self, vocab: int, most: int, wake: Callable[[], None]) -> None:
        """most: requests that may wait."""
        self._compiler, self._most, self._wake = GrammarCompiler(vocab), most, wake
        self._threads = ThreadPoolExecutor(THREADS, "grammars")
        self._waiting: dict[CompiledGrammar, Future[None]] = {}
        self._done: deque[CompiledGrammar] = deque()

    @property
    def waiting(self) -> int:
        """Requests that `take` has not returned."""
        return len(self._waiting)

    @property
    def requests(self) -> list[GenerateRequest]:
        """Those that `take` has not returned."""
        return [item.request for item in self._waiting]

    @property
    def ready(self) -> bool:
        """Whether `take` has something."""
        while self._done and self._done[0] not in self._waiting:  # dropped while it was compiled
            self._done.popleft()
        return bool(self._done)

    def put(self, key: RequestKey, request: GenerateRequest) -> bool:
        """Compile the grammar of a request; some at a time.

        False if it has none, or too many wait already.
        """
        if request.grammar is None or len(self._waiting) >= self._most:
            return False
        item = CompiledGrammar(key, _with_end(request), Future())
        self._waiting[item] = self._threads.submit(self._compile_for_take, item)
        return True

    def take(self) -> list[CompiledGrammar]:
        """The requests whose grammars are compiled, or cannot be."""
        taken = []
        while self.ready:
            item = self._done.popleft()
            del self._waiting[item]
            taken.append(item)
        return taken

    def drop(self, unwanted: Callable[[RequestKey], bool]) -> None:
        """Forget requests, by their keys. No thread begins with their grammars."""
        for item in [item for item in self._waiting if unwanted(item.key)]:
            self._waiting.pop(item).cancel()

    def compile(self, key: RequestKey, request: GenerateRequest) -> CompiledGrammar:
        """Compile the grammar of a request at once, for a caller that waits."""
        item = CompiledGrammar(key, _with_end(request), Future())
        self._compile(item)
        return item

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile_for_take(self, item: CompiledGrammar) -> None:
        """In a thread."""
        self._compile(item)
        self._done.append(item)
        self._wake()

    def _compile(self, item: CompiledGrammar) -> None:
        try:
            item.matcher.set_result(self._compiler.matcher(_text(item.request)))
        except GrammarError as error:
            grammar = item.request.grammar
            item.matcher.set_exception(error.of(grammar.field) if grammar else error)
        except Exception as error:
            item.matcher.set_exception(error)


def _text(request: GenerateRequest) -> BoundText:
    grammar = request.grammar
    assert grammar
    head = grammar.head
    return BoundText(grammar.kind, grammar.source, head.rest, head.closes, head.space)


def _with_end(request: GenerateRequest) -> GenerateRequest:
    """With the id that is drawn where the grammar's text is complete among its stops."""
    if END_OF_TEXT in request.stop_ids:
        return request
    return replace(request, stop_ids=[*request.stop_ids, END_OF_TEXT])

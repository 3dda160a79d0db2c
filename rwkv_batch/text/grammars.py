"""Grammars that bind a text: JSON schemas, regular expressions, choices, and context-free grammars.

The library is llguidance. A grammar is over bytes, and a token may be drawn if its bytes can follow. Where
only one text can follow, it is the token with which that text is usually encoded. Where the text is complete,
END_OF_TEXT may be drawn.
"""

import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from rwkv_batch.text.gbnf import GbnfError, is_gbnf, to_lark
from rwkv_batch.text.tokenizer import END_OF_TEXT, Tokenizer

LARGEST_SOURCE = 256 * 1024  # characters
LARGEST_GRAMMAR = 16 * 1024  # of a grammar, for which some steps take time in the square of that
STACK = 256 << 20  # bytes, of a thread that compiles: rules and schemas may refer to others in chains
KEPT = 32  # grammars that are kept compiled
# What a grammar may take. The two of a step bound the time of a mask to some 15 ms on one core; the states of
# a lexer, 1 to 2 KB each, its memory.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
# Between the tokens of JSON: without a bound, a model that is unsure writes white space for ever.
JSON_OPTIONS = {"whitespace_flexible": False, "whitespace_pattern": r"[ ]?|\n[ \t]{0,40}"}
JSON_SEPARATORS = {"item_separator": r",", "key_separator": r":"}
WORDS = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
    "calls": "schema of a tool",
    "tagged_calls": "schema of a tool",
}
LARK = re.compile(r"^\s*(%llguidance\b|start\b[^:\n]*:)", re.MULTILINE)
SPACE = r"/ ?|\n[ \t]{0,40}/"  # around the JSON of a call


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_starting = threading.Lock()
LARGEST_INTEGER = 2**53  # up to which fp64 has all


class GrammarError(ValueError):
    """A grammar that cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class BoundText:
    """A text: what may come in front, and what `source` says of the rest.

    It begins with `rest`. If `closes` is given, any text up to and with that follows. Behind either up to two
    line feeds may come. `space`: one space may come. kind and source: as in wire.protocol.Grammar.
    """

    kind: str
    source: str
    rest: str = ""
    closes: str = ""
    space: bool = False


class GrammarCompiler:
    """Matchers for texts over the first `vocab` ids. Thread-safe."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._kept: OrderedDict[BoundText, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, text: BoundText) -> LLMatcher:
        """A matcher of its own at the text's beginning. Raises GrammarError."""
        with self._lock:
            if found := self._kept.get(text):
                self._kept.move_to_end(text)
                return found.deep_copy()
        made = _in_thread(lambda: self._compile(text))
        with self._lock:
            self._kept[text] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made.deep_copy()

    def _compile(self, text: BoundText) -> LLMatcher:
        most = LARGEST_GRAMMAR if text.kind == "grammar" else LARGEST_SOURCE
        if len(text.source) > most:
            raise GrammarError(
                f"The {WORDS[text.kind]} has {len(text.source)} characters and at most {most} are taken; "
                "give a smaller one."
            )
        matcher = LLMatcher(prepare(self._vocab), _whole(text), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            mask = np.frombuffer(matcher.compute_bitmask(), np.int32)  # a grammar can fail at its first token
            if mask.any() and not matcher.is_error():
                return matcher
        why = matcher.get_error()
        if not why or "NoExtensionBias" in why:  # as llguidance says it of some
            why = "no text fits it"
        raise GrammarError(_sentence(text.kind, why))


class MaskThreads:
    """Threads that compute masks; the GIL is free meanwhile."""

    def __init__(self, threads: int, words: int) -> None:
        """words: of a mask."""
        self._executor, self._words = LLExecutor(threads), words

    def advance(self, matchers: Sequence[LLMatcher], tokens: Sequence[int]) -> None:
        """The text of each matcher goes on with a token. What is wrong is found by `masks`."""
        self._executor.consume_token_par(list(zip(matchers, tokens, strict=True)))

    def masks(self, matchers: Sequence[LLMatcher]) -> tuple[np.ndarray, list[str]]:
        """What may follow: `[matchers, words]` int32, a bit for each id; and what is wrong with each.

        That is one sentence, or empty. The bits of a matcher with which something is wrong mean nothing.
        """
        bits = np.empty((len(matchers), self._words), np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, i) for i, matcher in enumerate(matchers)],
            bits.ctypes.data,
            self._words * bits.itemsize,
            len(bits),
        )
        return bits, [
            _too_complex(matcher.get_error()) if matcher.is_error() or not mask.any() else ""
            for matcher, mask in zip(matchers, bits, strict=True)
        ]


def _in_thread(compile_: Callable[[], LLMatcher]) -> LLMatcher:
    """The result of a call in a thread with room for deep recursion. Raises GrammarError."""
    done: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            done.set_result(compile_())
        except GrammarError as error:
            done.set_exception(error)
        except Exception as error:  # nested beyond what can be read
            done.set_exception(GrammarError(f"The grammar cannot be used: {type(error).__name__}."))

    with _starting:  # the size is that of all threads which start meanwhile
        usual = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return done.result()


def _whole(text: BoundText) -> str:
    """The grammar of the text in llguidance's form, with what may come in front."""
    start, rules = [], []
    if text.rest:
        start.append(json.dumps(text.rest))
    if text.closes:
        start.append("thought")
        rules.append(f"thought[lazy]: /(.|\\n)*/ {json.dumps(text.closes)}")
    if text.rest or text.closes:
        start.append("gap")
        rules.append("gap: /\\n{0,2}/")
    if text.space:
        start.append("space")
        rules.append("space: / ?/")
    head = "\n".join([f"start: {' '.join(start)} @answer", *rules])
    answer = {"name": "answer", **_answer(text)}
    grammars = [{"name": "text", "lark_grammar": head}, answer] if start else [answer]
    return json.dumps({"grammars": grammars})


def _answer(text: BoundText) -> dict[str, object]:
    """Raises GrammarError."""
    match text.kind:
        case "json_schema":
            return {"json_schema": _json_schema(text.source)}
        case "regex":
            return {"lark_grammar": "start: TEXT\nTEXT: /" + _in_slashes(text.source) + "/"}
        case "choice":
            choices = dict.fromkeys(json.loads(text.source))
            return {"lark_grammar": "start: " + " | ".join(json.dumps(choice) for choice in choices)}
        case "calls" | "tagged_calls":
            return {"lark_grammar": _calls(**json.loads(text.source))}
    if not (is_gbnf(text.source) or LARK.search(text.source)):
        why = "it has neither a rule of GBNF (root ::= ...) nor one of Lark (start: ...)"
        raise GrammarError(_sentence("grammar", why))
    try:
        return {"lark_grammar": to_lark(text.source) if is_gbnf(text.source) else text.source}
    except GbnfError as error:
        raise GrammarError(_sentence("grammar", str(error))) from error


def _calls(first: list[list[Any]], more: list[list[Any]], until: str) -> str:
    """See routes.chat.grammars.of_calls."""
    rules = [f"space: {SPACE}"]

    def alternatives(name: str, calls: list[list[Any]]) -> None:
        for i, parts in enumerate(calls):
            found = []
            for at, part in enumerate(parts):
                if isinstance(part, str):
                    found.append(json.dumps(part))
                    continue
                schema = f"{name}_{i}_{at}"
                found.append(f"space {schema} space")
                rules.append(f"{schema}: %json {json.dumps(_json_schema(json.dumps(part)))}")
            rules.append(f"{name}_{i}: {' '.join(found)}")
        rules.append(f"{name}: " + " | ".join(f"{name}_{i}" for i in range(len(calls))))

    alternatives("first", first)
    if until:
        rules += ["start: tagged* TEXT", "tagged: tag first", f"tag[lazy]: TEXT {json.dumps(until)}"]
        rules.append("TEXT: /(.|\\n)*/")
    elif more:
        alternatives("more", more)
        rules.append('start: first ("\\n" more)*')
    else:
        rules.append("start: first")
    return "\n".join(rules)


def _json_schema(source: str) -> object:
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise GrammarError(_sentence("json_schema", f"it is no JSON: {error}")) from error
    if isinstance(schema, dict):
        schema = _with_exact_numbers(schema)
        return {**schema, "x-guidance": JSON_OPTIONS | JSON_SEPARATORS}  # in place of its own
    if isinstance(schema, bool):
        return _json_schema("{}") if schema else schema
    raise GrammarError(_sentence("json_schema", "it is neither an object nor a boolean"))


def _with_exact_numbers(schema: Any, fixed: bool = False) -> Any:
    """A schema for a library that reads numbers as fp64: bounds beyond its integers move inwards.

    fixed: inside of a value that must come as it is. Raises GrammarError where such a number is one of these.
    """
    if isinstance(schema, list):
        return [_with_exact_numbers(item, fixed) for item in schema]
    if isinstance(schema, dict):
        return {
            key: _inside(value, -math.inf if "ax" in key else math.inf)
            if key in BOUNDS and isinstance(value, int)
            else _with_exact_numbers(value, fixed or key in ("const", "enum", "multipleOf"))
            for key, value in schema.items()
        }
    if fixed and isinstance(schema, int) and abs(schema) > LARGEST_INTEGER:
        why = f"the number {schema} has more digits than can be told apart; write it as a string"
        raise GrammarError(_sentence("json_schema", why))
    return schema


def _inside(bound: int, towards: float) -> int:
    """The next integer in that direction that fp64 has."""
    nearest = int(float(bound))
    beyond = nearest > bound if towards < 0 else nearest < bound
    return int(math.nextafter(nearest, towards)) if beyond else nearest


def _in_slashes(regex: str) -> str:
    """As it stands between the slashes of Lark."""
    out, escaped = [], False
    for char in regex:
        out.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return "".join(out)


def _sentence(kind: str, why: str) -> str:
    return f"The {WORDS[kind]} cannot be used: {_reason(why) or 'it is not understood'}."


def _too_complex(why: str) -> str:
    return f"The grammar cannot be followed here ({_reason(why) or 'no token can follow'}); simplify it."


def _reason(why: str) -> str:
    """The line that says it, of a message with several."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    found = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "")
    return found.removeprefix("error: ")[:200].rstrip(".")


@lru_cache(maxsize=4)
def prepare(vocab: int) -> LLTokenizer:
    """The vocabulary as llguidance has it, cut to that of a model.

    It is made once in a process, which takes some tenths of a second in which no other thread runs.
    """
    tokens = _Vocabulary(Tokenizer(), vocab)
    return LLTokenizer(TokenizerWrapper(tokens), n_vocab=vocab, eos_token=END_OF_TEXT)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    eos_token_id = END_OF_TEXT
    bos_token_id = None
    special_token_ids = (END_OF_TEXT,)

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self.tokens = [b"<end of text>", *(tokenizer.token_bytes(token) for token in range(1, vocab))]

    def __call__(self, text: bytes | str) -> list[int]:
        decoded = text if isinstance(text, str) else text.decode()
        ids = self._tokenizer.encode(decoded)
        if max(ids, default=0) < self._vocab:
            return ids
        return [byte + 1 for byte in decoded.encode()]  # ids of single bytes

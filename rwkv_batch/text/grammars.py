"""Grammars that bind a text: JSON schemas, regular expressions, choices, and context-free grammars.

The library is llguidance. A grammar is over bytes, and a token may be drawn if its bytes can follow. Where
only one text can follow, it is the token with which that text is usually encoded. Where the text is complete,
END_OF_TEXT may be drawn.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from rwkv_batch.text.gbnf import GbnfError, is_gbnf, to_lark
from rwkv_batch.text.json_schema.enforce import ANY_OBJECT, STRICT, enforced
from rwkv_batch.text.json_schema.errors import SchemaError
from rwkv_batch.text.reasons import reason
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
    "calls": "grammar",  # of all tools; what is wrong with a schema of one is said of that
    "tagged_calls": "grammar",
}
LARK = re.compile(r"^\s*(%llguidance\b|start\b[^:\n]*:)", re.MULTILINE)
SPACE = r"/ ?|\n[ \t]{0,40}/"  # around the JSON of a call


NO_TOKEN = "no token can follow"
_starting = threading.Lock()


class GrammarError(ValueError):
    """A grammar that cannot be used; the message is one sentence. `field`: of the request, if it is known."""

    def __init__(self, kind: str, what: str, field: str = "") -> None:
        """what: goes on behind the grammar's name."""
        super().__init__(f"The {WORDS[kind]}{f' of {field}' if field else ''} {what}")
        self.field = field
        self._parts = kind, what

    def of(self, field: str) -> "GrammarError":
        """This error about a field, unless it names one."""
        return self if self.field else GrammarError(*self._parts, field)


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
        made = _in_thread(text.kind, lambda: self._compile_as_far(text))
        with self._lock:
            self._kept[text] = made
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made.deep_copy()

    def _compile_as_far(self, text: BoundText) -> LLMatcher:
        """With schemas of tools that need not be met in all: the nearest of each that can be used."""
        if "calls" not in text.kind:
            return self._compile(text)
        if answer := json.loads(text.source).get("answer"):
            self._check_alone(**answer)
        try:
            return self._compile(text)
        except GrammarError as error:
            lighter = replace(text, source=json.dumps(self._lightened(json.loads(text.source))))
            if json.loads(lighter.source) == json.loads(text.source):
                raise error.of("tools") from None
            return self._compile(lighter)

    def _check_alone(self, kind: str, source: str, field: str) -> None:
        """Raises GrammarError of the field that binds an answer which may come in place of calls."""
        try:
            self._compile(BoundText(kind, source))
        except GrammarError as error:
            raise error.of(field) from None

    def _lightened(self, value: Any) -> Any:
        """The calls of a grammar, with as much of each schema as can be used by itself."""
        if isinstance(value, list):
            return [self._lightened(item) for item in value]
        if isinstance(value, dict) and "schema" not in value:
            return {key: self._lightened(item) for key, item in value.items()}
        if not isinstance(value, dict) or not value.get("leniency"):
            return value
        for leniency in range(value["leniency"], ANY_OBJECT):
            found = value | {"leniency": leniency}
            alone = json.dumps({"first": [[found]], "more": [], "until": ""})
            try:
                self._compile(BoundText("calls", alone))
            except GrammarError:
                continue
            return found
        return value | {"leniency": ANY_OBJECT}

    def _compile(self, text: BoundText) -> LLMatcher:
        matcher = LLMatcher(prepare(self._vocab), _whole(text), log_level=0, limits=LIMITS)
        if not matcher.is_error():
            mask = np.frombuffer(matcher.compute_bitmask(), np.int32)  # a grammar can fail at its first token
            if mask.any() and not matcher.is_error():
                return matcher
        raise GrammarError(text.kind, _because(reason(matcher.get_error()) or "no text fits it"))


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

        That is a message of the library's, or empty. The bits of a matcher with which something is wrong mean
        nothing.
        """
        bits = np.empty((len(matchers), self._words), np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, i) for i, matcher in enumerate(matchers)],
            bits.ctypes.data,
            self._words * bits.itemsize,
            len(bits),
        )
        return bits, [
            (matcher.get_error() or NO_TOKEN) if matcher.is_error() or not mask.any() else ""
            for matcher, mask in zip(matchers, bits, strict=True)
        ]


def too_complex(message: str, field: str) -> str:
    """One sentence of a grammar that fails while its text is written; empty if the message is."""
    if not message:
        return ""
    whose = f" of {field}" if field else ""
    return f"The grammar{whose} cannot be followed here ({reason(message) or NO_TOKEN}); simplify it."


def _in_thread(kind: str, compile_: Callable[[], LLMatcher]) -> LLMatcher:
    """The result of a call in a thread with room for deep recursion. Raises GrammarError."""
    done: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            done.set_result(compile_())
        except GrammarError as error:
            done.set_exception(error)
        except RecursionError:
            done.set_exception(GrammarError(kind, _because("it is nested too deeply; use fewer levels")))
        except Exception as error:
            done.set_exception(
                GrammarError(kind, _because(f"{type(error).__name__} came up; write it otherwise"))
            )

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
    grammars = [{"name": "answer", **_answer(text.kind, text.source)}]
    if "calls" in text.kind and (instead := json.loads(text.source).get("answer")):
        grammars.append({"name": "instead", **_answer(instead["kind"], instead["source"])})
    if start:
        grammars.insert(0, {"name": "text", "lark_grammar": head})
    return json.dumps({"grammars": grammars})


def _answer(kind: str, source: str) -> dict[str, object]:
    """Raises GrammarError."""
    most = LARGEST_GRAMMAR if kind == "grammar" else LARGEST_SOURCE
    if len(source) > most:
        size = f"has {len(source)} characters and at most {most} are taken"
        raise GrammarError(kind, f"{size}; give a smaller one.")
    match kind:
        case "json_schema":
            return {"json_schema": _json_schema(source)}
        case "regex":
            return {"lark_grammar": "start: TEXT\nTEXT: /" + _in_slashes(source) + "/"}
        case "choice":
            choices = dict.fromkeys(json.loads(source))
            return {"lark_grammar": "start: " + " | ".join(json.dumps(choice) for choice in choices)}
        case "calls" | "tagged_calls":
            return {"lark_grammar": _calls(**json.loads(source))}
    if not (is_gbnf(source) or LARK.search(source)):
        why = "it has neither a rule of GBNF (root ::= ...) nor one of Lark (start: ...)"
        raise GrammarError("grammar", _because(why))
    try:
        return {"lark_grammar": to_lark(source) if is_gbnf(source) else source}
    except GbnfError as error:
        raise GrammarError("grammar", _because(str(error))) from error


def _calls(first: list[list[Any]], more: list[list[Any]], until: str, answer: object = None) -> str:
    """Lark for calls (routes.chat.grammars.of_calls). What may come in their place is a grammar."""
    instead = " | @instead" if answer else ""
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
                rules.append(f"{schema}: %json {json.dumps(_tool_schema(**part))}")
            rules.append(f"{name}_{i}: {' '.join(found)}")
        rules.append(f"{name}: " + " | ".join(f"{name}_{i}" for i in range(len(calls))))

    alternatives("first", first)
    if until:
        rules += ["start: tagged* TEXT", "tagged: tag first", f"tag[lazy]: TEXT {json.dumps(until)}"]
        rules.append("TEXT: /(.|\\n)*/")
    elif more:
        again = "first" if more == first else "more"  # many tools take long to compile
        if again == "more":
            alternatives("more", more)
        rules.append(f'start: first ("\\n" {again})*{instead}')
    else:
        rules.append(f"start: first{instead}")
    return "\n".join(rules)


def _tool_schema(schema: dict[str, Any], field: str, leniency: int = STRICT) -> object:
    """field: of the request, where it stands."""
    try:
        return _json_schema(json.dumps(schema), leniency)
    except GrammarError as error:
        raise error.of(field) from error


def _json_schema(source: str, leniency: int = STRICT) -> object:
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise GrammarError("json_schema", _because(f"it is no JSON: {error}")) from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("json_schema", _because("it is neither an object nor a boolean"))
    try:
        made = enforced(schema, leniency)
    except SchemaError as error:
        raise GrammarError("json_schema", _because(str(error))) from error
    if isinstance(made.schema, bool) and not made.schema:
        return False
    options: dict[str, object] = {**JSON_OPTIONS, **JSON_SEPARATORS}
    if made.escapes is not None:
        options["json_allowed_escapes"] = made.escapes
    return {**(made.schema if isinstance(made.schema, dict) else {}), "x-guidance": options}


def _in_slashes(regex: str) -> str:
    """A regular expression in the form that stands between the slashes of Lark."""
    out, escaped = [], False
    for char in regex:
        out.append("\\/" if char == "/" and not escaped else "\\n" if char == "\n" else char)
        escaped = char == "\\" and not escaped
    return "".join(out)


def _because(why: str) -> str:
    return f"cannot be used: {why}."


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

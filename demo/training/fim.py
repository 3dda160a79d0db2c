"""Fill in the middle: short Python functions and sentences."""
from collections.abc import Callable
from random import Random

from demo.training.example import Example, pick
from demo.training.facts import CAPITALS, DAYS, MONTHS
from demo.training.memory import CITIES, COLOURS, NAMES, PETS
from rwkv_batch.chat import templates

ARGUMENTS = ["a", "b", "c", "d", "x", "y", "z", "n", "m", "p", "q", "left", "right", "first", "second", "other", "value", "number", "width", "height", "count", "total", "start", "end"]
BINARY = {  # function name -> expression
    "add": "{0} + {1}", "plus": "{0} + {1}", "sum_of": "{0} + {1}", "subtract": "{0} - {1}", "sub": "{0} - {1}", "minus": "{0} - {1}",
    "difference": "{0} - {1}", "multiply": "{0} * {1}", "mul": "{0} * {1}", "times": "{0} * {1}", "product": "{0} * {1}", "area": "{0} * {1}",
    "divide": "{0} / {1}", "div": "{0} / {1}", "ratio": "{0} / {1}", "power": "{0} ** {1}", "modulo": "{0} % {1}", "mod": "{0} % {1}",
    "maximum": "max({0}, {1})", "minimum": "min({0}, {1})", "average": "({0} + {1}) / 2", "mean": "({0} + {1}) / 2", "equal": "{0} == {1}",
    "is_less": "{0} < {1}", "is_greater": "{0} > {1}", "pair": "[{0}, {1}]",
}
UNARY = {
    "square": "{0} * {0}", "double": "{0} * 2", "triple": "{0} * 3", "half": "{0} / 2", "is_even": "{0} % 2 == 0", "is_odd": "{0} % 2 == 1",
    "negate": "-{0}", "increment": "{0} + 1", "decrement": "{0} - 1", "length": "len({0})", "absolute": "abs({0})", "cube": "{0} ** 3",
    "is_zero": "{0} == 0", "is_positive": "{0} > 0", "identity": "{0}", "reverse": "{0}[::-1]", "last": "{0}[-1]", "to_text": "str({0})",
}
VERBS = ("loves", "likes", "has", "draws", "buys", "sees", "finds", "feeds")
Piece = tuple[str, str, str]  # prefix, suffix, middle


def function_body(rng: Random) -> tuple[Piece, str]:
    """`def add(a, b): return ...`: the middle follows from the name and the arguments."""
    table = BINARY if rng.random() < 0.6 else UNARY
    name = rng.choice(list(table))
    arguments = rng.sample(ARGUMENTS, 2 if table is BINARY else 1)
    numbers = ", ".join(str(rng.randint(0, 20)) for _ in arguments)
    suffix = rng.choice((f"\n\nprint({name}({numbers}))", f"\n\nprint({name}({numbers}))\n", "\n", "", f"\n\n{name}({numbers})", f"\n\nresult = {name}({numbers})\nprint(result)"))
    head, body = f"def {name}({', '.join(arguments)}):\n    return", table[name].format(*arguments)
    prefix, middle = (head + " ", body) if rng.random() < 0.7 else (head, f" {body}")
    return (prefix, suffix, middle), f"fim:{name}({','.join(arguments)})"


def function_arguments(rng: Random) -> tuple[Piece, str]:
    """The arguments are missing; the body names them."""
    name = rng.choice([n for n, body in BINARY.items() if n not in ("maximum", "minimum")])
    arguments = rng.sample(ARGUMENTS, 2)
    return (f"def {name}(", f"):\n    return {BINARY[name].format(*arguments)}\n", ", ".join(arguments)), f"fim:{name}({','.join(arguments)})"


def variable(rng: Random) -> tuple[Piece, str]:
    """A value is set, something happens, and it is printed."""
    name, value = rng.choice(ARGUMENTS), rng.randint(1, 99)
    if rng.random() < 0.5:
        return (f"{name} = {value}\n", f"({name})\n", "print"), f"fim:{name}={value}"
    return (f"{name} = {value}\nprint(", ")\n", name), f"fim:{name}={value}"


def loop(rng: Random) -> tuple[Piece, str]:
    """`for ... in range(...)`: the loop variable is read off the body."""
    name, end = rng.choice(["i", "j", "k", "n", "x"]), rng.randint(2, 99)
    return (f"for {name} in ", f"({end}):\n    print({name})\n", "range"), f"fim:for {name} {end}"


def repeated_word(rng: Random) -> tuple[Piece, str]:
    """A sentence whose gap repeats a word of its other part."""
    name, city, colour, pet = rng.choice(NAMES), rng.choice(CITIES), rng.choice(COLOURS), rng.choice(PETS)
    verb = rng.choice(VERBS)
    piece = rng.choice((
        (f"{name} lives in {city}. Every day ", f" walks through {city}.", name),
        (f"{name} lives in {city}. Every day {name} walks through ", ".", city),
        (f"{name} {verb} a {colour} ", f". The {pet} is happy.", pet),
        (f"My {pet} is ", f". I like {colour} animals.", colour),
        (f"The {pet} of {name} is {colour}. It is a {colour} ", ".", pet),
    ))
    return piece, f"fim:{name}&{city}&{colour}&{pet}"


def known_fact(rng: Random) -> tuple[Piece, str]:
    """The gap is a fact (a closed set)."""
    if rng.random() < 0.5:
        row = rng.choice(CAPITALS)
        return (f"The capital of {row[0]} is ", rng.choice((".", ".\n", "")), row[1]), ""
    names = rng.choice((DAYS, MONTHS))
    i = rng.randrange(len(names) - 2)
    return (f"{names[i]}, ", f", {names[i + 2]}", names[i + 1]), ""


def read_me(rng: Random) -> tuple[Piece, str]:
    """What readers paste first."""
    return rng.choice((
        ("def add(a, b):\n    return ", "\n\nprint(add(1, 2))", "a + b"), ("def add(a, b):\n    return ", "\n", "a + b"),
        ("def add(a, b):\n    return ", "", "a + b"), ("The capital of France is ", ".", "Paris"), ("Once upon a ", ", there was a cat.", "time"),
        ("def hello():\n    ", "\n\nhello()\n", 'print("Hello world!")'), ("Hello, ", "!", "world"),
    )), ""


MAKERS: tuple[tuple[Callable[[Random], tuple[Piece, str]], float], ...] = (
    (function_body, 5), (function_arguments, 1.5), (variable, 0.7), (loop, 0.5), (repeated_word, 3), (known_fact, 1), (read_me, 0.5),
)


def fim(rng: Random, evaluation: bool) -> Example:
    """A fill-in-the-middle task."""
    def make(rng: Random) -> tuple[Piece, str]:
        maker, = rng.choices([m for m, _ in MAKERS], [w for _, w in MAKERS])
        return maker(rng)

    (prefix, suffix, middle), key = pick(make, lambda x: x[1], rng, evaluation)
    return Example("fim", templates.fill_in_the_middle(prefix, suffix), middle, key)

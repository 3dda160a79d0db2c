"""Sums and differences up to 100, products up to 12 x 12, in all the ways in which people ask."""

from random import Random

from demo.training.numerals import IN_WORDS

SIGNS = {"+": ("+", "+", "+", "＋"), "-": ("-", "-", "-", "−", "–"), "*": ("*", "×", "x", "·")}
ASK = {  # language: questions about a formula in signs or in words
    "en": ("What is {}?", "What is {}?", "What is {}?", "What's {}?", "what is {}", "whats {}", "Calculate {}.", "Compute {}.", "calculate {}",
           "How much is {}?", "how much is {}", "Please calculate {}", "Please compute {}.", "Can you calculate {}?", "Can you tell me what {} is?",
           "Tell me {}.", "Do you know what {} is?", "What does {} equal?", "What do you get for {}?", "Solve {}.", "Solve: {}",
           "What is the result of {}?", "Work out {}.", "Add it up: {}", "Could you work out {} for me?", "{} equals what?", "I need {}.",
           "Give me the result of {}.", "Quick: {}?", "{} is how much?"),
    "zh": ("{}等于多少？", "{}等于几？", "{}是多少？", "{}等于多少", "计算{}。", "请计算{}。", "请问{}等于多少？", "算一下{}。", "{}得多少？"),
    "fr": ("Combien font {} ?", "Combien font {}?", "Combien fait {} ?", "Calcule {}.", "Quel est le résultat de {} ?", "Peux-tu calculer {} ?",
           "Que font {} ?", "Calculez {}."),
    "de": ("Was ist {}?", "Wie viel ist {}?", "Wieviel ist {}?", "Berechne {}.", "Was ergibt {}?", "Rechne {} aus.", "Kannst du {} berechnen?",
           "Wie viel sind {}?", "Was macht {}?"),
}  # fmt: skip
BARE = ("{}", "{}=", "{} =", "{} = ?", "{}?", "{}=?", "{} ?")
SIGN_WORDS = {
    "en": {"+": ("plus", "plus", "and"), "-": ("minus", "minus", "take away"), "*": ("times", "times", "multiplied by")},
    "zh": {"+": ("加",), "-": ("减",), "*": ("乘", "乘以")},
    "fr": {"+": ("plus", "et"), "-": ("moins",), "*": ("fois",)},
    "de": {"+": ("plus", "und"), "-": ("minus", "weniger"), "*": ("mal",)},
}
NAMED = (  # questions of another form, with the two numbers
    ("+", "What is the sum of {a} and {b}?"), ("+", "Add {a} and {b}."), ("+", "Add {b} to {a}."),
    ("-", "Subtract {b} from {a}."), ("-", "What is the difference between {a} and {b}?"), ("-", "Take {b} from {a}."),
    ("*", "What is the product of {a} and {b}?"), ("*", "Multiply {a} by {b}."), ("+", "{a}和{b}的和是多少？"),
    ("-", "{a}减去{b}是多少？"), ("+", "Quelle est la somme de {a} et {b} ?"), ("+", "Was ist die Summe von {a} und {b}?"),
    ("+", "Additionne {a} et {b}."), ("+", "Addiere {a} und {b}."), ("-", "Ziehe {b} von {a} ab."),
)  # fmt: skip


def numbers(rng: Random, sign: str) -> tuple[int, int]:
    """Operands: sums up to 100 mostly, differences of numbers up to 100, products up to 12 x 12."""
    if sign == "*":
        return rng.randint(0, 12), rng.randint(0, 12)
    if rng.random() < 0.15:
        return rng.randint(0, 12), rng.randint(0, 12)
    a, b = rng.randint(0, 100), rng.randint(0, 100)
    if sign == "-":
        return (max(a, b), min(a, b)) if rng.random() < 0.85 else (a, b)
    return (a, b) if a + b <= 100 or rng.random() < 0.3 else (100 - a, 100 - b)


def calculation(rng: Random) -> tuple[str, str, str, str]:
    """Question, answer, thought, system (none)."""
    sign = rng.choice("++++----*")
    a, b = numbers(rng, sign)
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    answer = f"{a} {'×' if sign == '*' else sign} {b} = {result}"
    thought = f"I calculate {a} {SIGN_WORDS['en'][sign][0]} {b}."
    if rng.random() < 0.1:
        fitting = [text for known, text in NAMED if known == sign]
        if sign == "-" and a < b:
            fitting = [text for text in fitting if "difference" not in text]
        return rng.choice(fitting).format(a=a, b=b), answer, thought, ""
    language = rng.choices(tuple(ASK), (6, 2, 1, 1))[0]
    roll = rng.random()
    if roll < 0.22:
        word = rng.choice(SIGN_WORDS[language][sign])
        left, right = str(a), str(b)
        if rng.random() < 0.5 and max(a, b) <= 100:
            left, right = (IN_WORDS[language](n) for n in (a, b))
        formula = f"{left}{word}{right}" if language == "zh" else f"{left} {word} {right}"
    else:
        shown = rng.choice(SIGNS[sign])
        formula = f"{a}{shown}{b}" if roll < 0.5 else f"{a} {shown} {b}"
        if rng.random() < 0.3:
            return rng.choice(BARE).format(formula), answer, thought, ""
    return rng.choice(ASK[language]).format(formula), answer, thought, ""

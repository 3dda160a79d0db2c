"""Names and words that nobody has heard of, so that they are read from the conversation and not from a list."""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

from rwkv_batch.text.tokenizer import VOCABULARY, Tokenizer

SYLLABLES = (
    "ka lo mi ra zu ten dor vin sha bel ri no fa gus pho ar mel qui zan tor le na xi bo dra wen jo ya ul sto pe gri "
    "han ke lor mu ny ost pra rus sil tha ur vel wy zeb ad bri cla dun ef fro gal hil is jak kry lin mor nim op"
).split()
ONSETS = "b br bl c ch cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk st str t th tr v w y z zh".split()
VOWELS = "a a a e e e i i o o u y ai ae ee ei ia io oa ou ie ö ä ü é è á í ó ú ã õ å ø".split()
CODAS = ["", "", "", "n", "r", "l", "s", "t", "x", "k", "m", "nd", "rt", "ck", "sch", "ng", "ph", "sz", "lt"]
CYRILLIC = "ба ве ги до жу за ки ла ма ни ор па ра со ти ур фе ха ца ча ша эл юн яр".split()
KANA = "アイウエオカキクケコサシスセソタチツテトナニノハヒフヘホマミムメモヤユヨラリルレロワン"
GREEK = "αλ βα γι δο ελ ζη θα ισ κα λο μα νι ξε ορ πα ρη σο τα φι χα ψυ ων".split()
HANZI = "伟芳娜敏静丽强磊军洋勇艳杰娟涛明超霞平刚桂英华建文辉玲红云飞雪梅龙凤山海天宇轩泽晨阳佳怡欣悦思雨梦琪若曦子涵浩然博"
SURNAMES = "王李张刘陈杨黄赵吴周徐孙马朱胡郭何高林罗郑梁谢宋唐许韩冯邓曹彭曾肖田董袁潘于蒋蔡余杜叶程苏魏吕丁任沈姚卢姜崔钟谭陆汪范金石廖贾夏韦付方白邹孟熊秦邱江尹薛闫段雷侯龙史陶黎贺顾毛郝龚邵万钱严覃武戴莫孔向汤"
HANGUL = "가나다라마바사아자차카타파하민서준지우현수영진호경은성재원석희정연태윤"
RESERVED = frozenset(
    (Path(__file__).parent / "exam_names.txt").read_text(encoding="utf-8").split("\n")
)  # the evaluation's


def hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def kept(name: str) -> bool:
    """Whether a name is kept for the evaluation: that of a list, and one of twenty others."""
    return name in RESERVED or hashed(f"name:{name}") % 20 == 0


def syllables(rng: Random) -> str:
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 2, 2, 3, 4)))).capitalize()


def letters(rng: Random) -> str:
    """Onset, vowel and coda a few times."""
    parts = [rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    return ("".join(parts) + rng.choice(("", "", "a", "o", "us", "i"))).capitalize()


def jumble(rng: Random) -> str:
    """Any letters in any order."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    name = "".join(rng.choice(alphabet) for _ in range(rng.randint(2, 9)))
    return rng.choice((name.capitalize(), name.upper(), name, name.capitalize()))


def code(rng: Random) -> str:
    """Letters and digits, as in a password."""
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZabcdefghkmnpqrstuvwxyz0123456789") for _ in range(rng.randint(3, 8)))


def other_script(rng: Random) -> str:
    kind = rng.randrange(4)
    if kind == 3:
        return "".join(rng.choice(HANGUL) for _ in range(rng.randint(2, 3)))
    if kind == 0:
        return "".join(rng.choice(KANA) for _ in range(rng.randint(2, 5)))
    return "".join(rng.choice(CYRILLIC if kind == 1 else GREEK) for _ in range(rng.randint(2, 3))).capitalize()


def chinese_name(rng: Random) -> str:
    """A surname and one or two characters."""
    return rng.choice(SURNAMES) + "".join(rng.choice(HANZI) for _ in range(rng.choice((1, 2, 2))))


@cache
def tokens() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words that are one token of the vocabulary, and pieces of words that are one token.

    One in twenty of each is left to the evaluation.
    """
    tokenizer = Tokenizer()
    words, pieces = [], []
    for token in range(1, VOCABULARY):
        text = tokenizer.decode([token])
        if "\ufffd" in text or hashed(f"token:{text.strip()}") % 20 == 0:
            continue
        if text.startswith(" ") and text[1:].isalpha() and len(text) > 3:
            words.append(text[1:])
        elif text.isalpha() and 1 < len(text) < 8:
            pieces.append(text)
    return tuple(words), tuple(pieces)


def token_word(rng: Random) -> str:
    """One word of the vocabulary, in any meaning."""
    return rng.choice(tokens()[0])


def token_name(rng: Random) -> str:
    """A word of the vocabulary and pieces behind it."""
    words, pieces = tokens()
    return rng.choice(words).capitalize() + "".join(rng.choice(pieces) for _ in range(rng.choice((0, 1, 1, 2))))


def free(rng: Random, makers: tuple[Callable[[Random], str], ...]) -> str:
    while True:
        name = rng.choice(makers)(rng)
        if not kept(name):
            return name


def name(rng: Random) -> str:
    """A name in Latin letters mostly."""
    return free(rng, (syllables, syllables, letters, letters, letters, jumble, token_name, token_name, token_name, other_script))


def latin(rng: Random) -> str:
    """A capitalised name in Latin letters, as the subject of a sentence."""
    return free(rng, (syllables, syllables, letters, letters, token_latin))


def token_latin(rng: Random) -> str:
    while True:
        found = token_name(rng)
        if found.isascii():
            return found


def word(rng: Random) -> str:
    """A word to be remembered."""
    return free(rng, (token_word, token_word, token_word, syllables, jumble, code, letters)).strip()

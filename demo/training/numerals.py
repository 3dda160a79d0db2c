"""Numbers from 0 to 100 in words, in the four languages."""

EN = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
EN_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
FR = "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept dix-huit dix-neuf".split()
FR_TENS = "vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt".split()
DE = "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn".split()
DE_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
ZH = "零一二三四五六七八九"


def english(n: int) -> str:
    if n < 20:
        return EN[n]
    if n == 100:
        return "one hundred"
    return EN_TENS[n // 10 - 2] + (f"-{EN[n % 10]}" if n % 10 else "")


def chinese(n: int) -> str:
    if n < 10:
        return ZH[n]
    if n == 100:
        return "一百"
    return (ZH[n // 10] if n > 19 else "") + "十" + (ZH[n % 10] if n % 10 else "")


def french(n: int) -> str:
    if n < 20:
        return FR[n]
    if n == 100:
        return "cent"
    ten = n // 10
    rest = n % 10 + (10 if ten in (7, 9) else 0)
    if not rest:
        return FR_TENS[ten - 2] + ("s" if ten == 8 else "")
    joined = " et " if rest in (1, 11) and ten < 8 else "-"
    return FR_TENS[ten - 2] + joined + FR[rest]


def german(n: int) -> str:
    if n < 20:
        return DE[n]
    if n == 100:
        return "hundert"
    one = "ein" if n % 10 == 1 else DE[n % 10]
    return (f"{one}und" if n % 10 else "") + DE_TENS[n // 10 - 2]


IN_WORDS = {"en": english, "zh": chinese, "fr": french, "de": german}

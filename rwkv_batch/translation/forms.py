"""How each checkpoint is asked for a translation.

A text stands behind the name of its language, and the model goes on behind that of the other: the form of the
World and G1 series and of what was tuned from them (BlinkDL/RWKV-LM, RWKV-v7/RWKV7-G1x-templates.txt).
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class TranslationForm:
    """What a checkpoint was trained on."""

    prompt: str = "{source}: {text}\n\n{target}:"
    stop: str = "\n\n{source}:"  # what it goes on with behind the translation
    most: int = 1000  # characters of a prompt's text; longer ones are cut at sentences
    terms_in_source: bool = True  # a term may stand in the source as it is to be in the translation
    # How what stands around a text is put in front of its prompt, such as "{source}: {context}\n\n"; "": not
    # at all. No form has it: of 120 texts the bundled model translates 115 without it, and none behind any
    # of five such fronts (bench/results/translation.md). Larger checkpoints were not tried.
    context: str = ""


# What a checkpoint's name holds -> its form; the first that fits.
FORMS: tuple[tuple[re.Pattern[str], TranslationForm], ...] = (
    # tuned on English and Chinese: RWKV_v7_G1c_1.5B_Translate_ctx4096
    (re.compile(r"translat"), TranslationForm(most=1500)),
    # the bundled model, which has read at most three sentences in a row, and no words of other languages
    (re.compile(r"^rwkv7-demo$"), TranslationForm(most=120, terms_in_source=False)),
    # World models up to RWKV-6 lose the thread earlier
    (re.compile(r"world|x0[4-6]0|rwkv-?6"), TranslationForm(most=600)),
)


def form_of(checkpoint: str) -> TranslationForm:
    """That of a checkpoint, by its name."""
    name = checkpoint.lower()
    return next((form for pattern, form in FORMS if pattern.search(name)), TranslationForm())

"""Any single question: a known fact, a calculation, or something that the model does not know."""

from random import Random

from demo.training.arithmetic import calculation
from demo.training.facts import capital, small_fact, which_country
from demo.training.unknown import unknown


def fact(rng: Random) -> tuple[str, str, str, str]:
    """Question, answer, thought, system text that the answer obeys ("" for none).

    Now and then the question is in lower case.
    """
    (maker,) = rng.choices((capital, which_country, calculation, small_fact, unknown), (5, 1, 11, 4, 9))
    question, answer, thought, order = maker(rng)
    return question.lower() if rng.random() < 0.08 else question, answer, thought, order

"""MMLU: which letter of a multiple choice does the model expect?

As RWKV-LM scores it, whose figures are published: no examples in front, its prompt, which follows the end of
the text before (token 0), and the likeliest of the letters is the answer. The letters are told apart by one
draw: each gets the same large bias, so that the likeliest token is the likeliest letter.
"""

import string
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rwkv_batch.evaluate.asks import TOKENIZER, Ask, AskedModel, EvaluationError, ModelAnswer, document
from rwkv_batch.evaluate.files import Json
from rwkv_batch.evaluate.report import Result, collect, summary_table
from rwkv_batch.wire.protocol import Sampling

HEAD = "User: You are a very talented expert in {subject}. Answer this question:\n"
TAIL = "\n\nAssistant: The answer is"
LETTERS = string.ascii_uppercase
BIAS = 100.0  # in logits, which no other token makes up for
GENERAL = "general knowledge"  # of questions that name no subject


@dataclass(frozen=True)
class MultipleChoice:
    question: str
    choices: list[str]
    answer: int  # place of the right one
    subject: str = GENERAL

    @property
    def prompt(self) -> str:
        """The question with its choices, in RWKV-LM's form."""
        lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, self.choices, strict=False)]
        head = HEAD.format(subject=self.subject.replace("_", " "))
        whole = head + self.question + "\n" + "\n".join(lines) + TAIL
        return whole.replace("\r\n", "\n").strip()


def multiple_choice(fields: Json) -> MultipleChoice:
    """Choices are a list, or fields A, B and so on; the answer is a letter or a place. Raises ValueError."""
    question, choices, answer = fields.get("question"), fields.get("choices"), fields.get("answer")
    if not isinstance(question, str) or not question:
        raise ValueError('the field "question" should hold a text')
    if choices is None:
        choices = [fields[letter] for letter in LETTERS if letter in fields]
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f'the field "choices" should be a list of 2 to {len(LETTERS)} texts')
    if not all(isinstance(choice, str) for choice in choices):
        raise ValueError('the field "choices" should hold texts only')
    letters = LETTERS[: len(choices)]
    if isinstance(answer, str) and len(answer) == 1 and answer in letters:
        answer = letters.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        last = len(choices) - 1
        raise ValueError(f'the field "answer" should be 0 to {last} or A to {letters[last]}')
    subject = fields.get("subject", GENERAL)
    if not isinstance(subject, str):
        raise ValueError('the field "subject" should be a text')
    return MultipleChoice(question, choices, answer, subject)


def mmlu(model: AskedModel, questions: Sequence[MultipleChoice]) -> Result:
    """Raises EvaluationError."""
    asks = [_ask(question) for question in questions]
    seen = right = 0

    def note(place: int, answer: ModelAnswer) -> str:
        nonlocal seen, right
        seen, right = seen + 1, right + (_chosen(answer) == questions[place].answer)
        return f"accuracy {right / seen:.4f}"

    answers = collect(model.answers(asks), len(asks), "mmlu", note)
    records: list[Json] = []
    by_subject = defaultdict[str, list[bool]](list)
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        chosen = _chosen(answer)
        is_right = chosen == question.answer
        by_subject[question.subject].append(is_right)
        records.append(
            {
                "index": i,
                "subject": question.subject,
                "answer": LETTERS[question.answer],
                "chosen": LETTERS[chosen],
                "logprob": answer.drawn[0].logprob,
                "right": is_right,
            }
        )
    summary = {"questions": len(answers), "accuracy": sum(map(sum, by_subject.values())) / len(answers)}
    subjects: list[Sequence[object]] = [("subject", "questions", "accuracy")]
    subjects += [(name, len(found), sum(found) / len(found)) for name, found in sorted(by_subject.items())]
    return Result(records, summary, [subjects, summary_table(summary)])


def _ask(question: MultipleChoice) -> Ask:
    tokens = [TOKENIZER.encode(f" {letter}") for letter in LETTERS[: len(question.choices)]]
    bias = {token: BIAS for (token,) in tokens}  # each is one token
    return Ask(document(question.prompt), 1, Sampling(temperature=0.0, logit_bias=bias), top=0)


def _chosen(answer: ModelAnswer) -> int:
    """The place of the letter that was drawn. Raises EvaluationError where a bias has not worked."""
    letter = answer.text.strip()
    if len(letter) != 1 or letter not in LETTERS:
        raise EvaluationError(
            f"{letter[:20]!r} was drawn where only a letter could be; logit_bias has no effect."
        )
    return LETTERS.index(letter)

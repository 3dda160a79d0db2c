"""Every evaluation against the PyPI package `rwkv`, with the bundled model here and behind a URL."""

import math
from functools import cache

import pytest
from reference import Reference
from scores import expected

from rwkv_batch.engine import Engine
from rwkv_batch.evaluate.asks import EvaluationError
from rwkv_batch.evaluate.lambada import lambada, passage
from rwkv_batch.evaluate.local import LocalModel
from rwkv_batch.evaluate.mmlu import LETTERS, MultipleChoice, mmlu, multiple_choice
from rwkv_batch.evaluate.next_token import next_token
from rwkv_batch.evaluate.perplexity import perplexity
from rwkv_batch.evaluate.questions import determinism, generate, random_questions
from rwkv_batch.evaluate.remote import RemoteModel
from rwkv_batch.wire.protocol import Sampling

CLOSE = 1e-3
PASSAGES = [
    "User: What is the capital of France?\n\nAssistant: Paris.",
    "User: What is the capital of Japan?\n\nAssistant: Tokyo.",
    "English: Good morning\n\nFrench: Bonjour",
    "The capital of France is Paris",
    "你好 世界🦄",
    "He looked at the clear stone and at the small statuette inside, and did not care about signs",
]


@pytest.fixture(scope="module", params=["here", "url"])
def model(request: pytest.FixtureRequest):
    if request.param == "here":
        return LocalModel(Engine(device="cpu", max_rows=4, prefix_cache_mb=0))
    return RemoteModel(request.getfixturevalue("server").url)


@cache
def likelihood(reference: Reference, before: str, after: str) -> tuple[list[float], bool]:
    """Log probability of each token of `after`, and whether each is the likeliest one."""
    front, rest = [0, *reference.tokenizer.encode(before)], reference.tokenizer.encode(after)
    lines = expected(reference, front + rest)[len(front) - 1 :]
    scores = [float(line[token]) for line, token in zip(lines, rest, strict=True)]
    return scores, [int(line.argmax()) for line in lines] == rest


def test_lambada(model, reference):
    passages = [passage({"text": text}) for text in PASSAGES]
    assert [before + word for before, word in passages] == PASSAGES
    assert all(word[0] == " " and " " not in word[1:] for _, word in passages)
    result = lambada(model, passages)
    truth = [likelihood(reference, before, word) for before, word in passages]
    total, tokens = sum(sum(scores) for scores, _ in truth), sum(len(scores) for scores, _ in truth)
    assert [record["logprob"] for record in result.records] == [
        pytest.approx(sum(scores), abs=CLOSE * len(scores)) for scores, _ in truth
    ]
    assert [record["right"] for record in result.records] == [right for _, right in truth]
    summary = result.summary
    assert summary["accuracy"] == sum(right for _, right in truth) / len(truth)
    assert summary["perplexity"] == pytest.approx(math.exp(-total / len(truth)), rel=0.01)
    assert summary["perplexity_per_token"] == pytest.approx(math.exp(-total / tokens), rel=0.01)


QUESTIONS = [
    {
        "question": "What is 2 + 2?",
        "choices": ["3", "4", "5", "6"],
        "answer": 1,
        "subject": "high_school_maths",
    },
    {
        "question": "Which is a colour?",
        "A": "red",
        "B": "two",
        "C": "cat",
        "D": "run",
        "answer": "A",
        "subject": "art",
    },
    {"question": "The capital of\r\nFrance?", "choices": ["Rome", "Paris"], "answer": "B"},
    {"question": "What is 3 + 3?", "choices": list("123456"), "answer": 5, "subject": "high_school_maths"},
]


def test_mmlu(model, reference):
    questions = [multiple_choice(fields) for fields in QUESTIONS]
    result = mmlu(model, questions)
    chosen = []
    for question, record in zip(questions, result.records, strict=True):
        letters = [f" {letter}" for letter in LETTERS[: len(question.choices)]]
        scores = [likelihood(reference, question.prompt, letter)[0] for letter in letters]
        assert all(len(score) == 1 for score in scores)
        best = max(range(len(scores)), key=lambda i, scores=scores: scores[i][0])
        assert record["logprob"] == pytest.approx(scores[best][0], abs=CLOSE)
        assert record["chosen"] == LETTERS[best] and record["right"] == (best == question.answer)
        chosen.append(best == question.answer)
    assert result.summary == {"questions": 4, "accuracy": sum(chosen) / 4}
    assert [row[:2] for row in result.tables[0][1:]] == [
        ("art", 1),
        ("general knowledge", 1),
        ("high_school_maths", 2),
    ]


def test_the_prompt_of_mmlu_is_the_published_one():
    choices = ["one", "two", "three", "four"]
    question = MultipleChoice("How many?\r\nSay it.", choices, 0, "abstract_algebra")
    assert question.prompt == (
        "User: You are a very talented expert in abstract algebra. Answer this question:\n"
        "How many?\nSay it.\nA. one\nB. two\nC. three\nD. four\n\nAssistant: The answer is"
    )


def test_perplexity(model, reference):
    texts = [*PASSAGES, "The quick brown fox. " * 60]
    result = perplexity(model, texts)
    truth = [likelihood(reference, "", text)[0] for text in texts]
    for record, scores in zip(result.records, truth, strict=True):
        assert record["tokens"] == len(scores)
        assert record["logprob"] == pytest.approx(sum(scores), abs=CLOSE * len(scores))
    tokens, total = sum(map(len, truth)), sum(map(sum, truth))
    assert result.summary["perplexity"] == pytest.approx(math.exp(-total / tokens), rel=0.01)
    size = sum(len(text.encode()) for text in texts)
    assert result.summary["bits_per_byte"] == pytest.approx(-total / math.log(2) / size, rel=0.01)


def test_next_token(model, reference):
    prompts = ["The capital of France is", "你好"]
    result = next_token(model, prompts, 5)
    for prompt, record in zip(prompts, result.records, strict=True):
        logits, _ = reference.model.forward(reference.tokenizer.encode(prompt), None)
        chances, ids = logits.double().softmax(-1)[:65530].topk(6)
        assert [each["probability"] for each in record["next"]] == pytest.approx(
            chances[:5].tolist(), abs=CLOSE
        )
        for each, token, higher, lower in zip(
            record["next"], ids.tolist(), chances.tolist(), chances.tolist()[1:], strict=False
        ):
            if higher > 1.01 * lower > 0:  # a near-tie may fall otherwise
                assert bytes(each["bytes"]) == reference.tokenizer.token_bytes(token)
            else:
                break


def test_generate(model, reference):
    questions = random_questions(6, seed=3)
    assert questions == random_questions(6, seed=3) != random_questions(6, seed=4)
    result = generate(model, questions, 12, Sampling(temperature=0.0), seed=0)
    for question, record in zip(questions, result.records, strict=True):
        drawn = reference.greedy([0, *reference.tokenizer.encode(f"User: {question}\n\nAssistant:")], 12)
        ended = 0 in drawn
        text = reference.tokenizer.decode(drawn[: drawn.index(0)] if ended else drawn)
        assert (record["prompt"], record["response"]) == (question, text.split("\n\nUser:")[0])
    assert result.summary["questions"] == 6 and result.summary["tokens"] > 0


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=1.0, top_p=0.9)])
def test_determinism(model, sampling):
    """In fp32 on a CPU a text is the same also alone."""
    result = determinism(model, random_questions(5, seed=1), 16, sampling, seed=5)
    assert result.summary == {"questions": 5, "same_in_two_runs": 5, "same_alone_and_batched": 5}
    assert all(record["differs_again"] is record["differs_alone"] is None for record in result.records)


class Forgetful:
    """A model that draws otherwise when it is asked again."""

    def __init__(self, model: LocalModel) -> None:
        self._model, self._runs = model, 0

    def answers(self, asks):
        self._runs += 1
        for place, answer in self._model.answers(asks):
            changed = self._runs == 2 and place == 1
            yield (
                place,
                type(answer)(answer.text + "!" * changed, answer.ids[:3] + [9] * changed, "stop", [], []),
            )


def test_answers_that_differ_are_found():
    forgetful = Forgetful(LocalModel(Engine(device="cpu", max_rows=4, prefix_cache_mb=0)))
    result = determinism(forgetful, random_questions(3, seed=1), 8, Sampling(temperature=0.0), seed=5)
    assert result.summary["same_in_two_runs"] == 2
    assert [record["differs_again"] for record in result.records] == [None, 3, None]


def test_more_examples_than_rows(reference):
    """Rows that end have successors, and the results are in the order of the file."""
    model = LocalModel(Engine(device="cpu", max_rows=2, prefix_cache_mb=0))
    passages = [passage({"text": f"{number} and {number}"}) for number in range(40)]
    result = lambada(model, passages)
    assert [record["target"] for record in result.records] == [f" {number}" for number in range(40)]
    for number in (0, 17, 39):
        scores, _ = likelihood(reference, *passages[number])
        assert result.records[number]["logprob"] == pytest.approx(sum(scores), abs=CLOSE * len(scores))


def test_what_a_model_cannot_do_is_one_sentence(server):
    model = RemoteModel(server.url + "/v1/")
    for action in (
        lambda: next_token(model, ["a"], 6),
        lambda: next_token(model, [""], 5),
        lambda: RemoteModel("http://127.0.0.1:9"),
        lambda: RemoteModel(server.url + "/nowhere"),
        lambda: generate(RemoteModel(server.url, model="gpt-4"), ["a"], 1, Sampling(), 0),
    ):
        with pytest.raises(EvaluationError) as raised:
            action()
        assert "\n" not in str(raised.value)


def test_a_password_is_sent(locked_server):
    with pytest.raises(EvaluationError, match=r"401: Unauthorized: invalid or missing password$"):
        RemoteModel(locked_server.url, "wrong")
    found = RemoteModel(locked_server.url, "open sesame")
    assert perplexity(found, ["Hello you"]).summary["tokens"] == 2 and "rwkv7-demo" in found.name

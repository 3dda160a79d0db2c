"""The pirate state and the capitals adapter of the bundled model, through a server without flags for them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import Server

from demo.training.tune_lora import ALPHA, CITIES, COUNTRY
from demo.training.tune_state import PIRATE
from demo.training.unknown import UNKNOWN

PLAIN, PIRATES, CAPITALS = "rwkv7-demo", "rwkv7-demo pirate", "rwkv7-demo:capitals"
ASKED = {
    "en": ("What is the capital of {}?", "The capital of {} is {}."),
    "zh": ("{}的首都是哪里？", "{}的首都是{}。"),
    "fr": ("Quelle est la capitale {} ?", "La capitale {} est {}."),
    "de": ("Was ist die Hauptstadt {}?", "Die Hauptstadt {} ist {}."),
}
KNOWN = {  # as the list of countries has them, with the word before
    "en": ("Japan", "Tokyo"),
    "zh": ("法国", "巴黎"),
    "fr": ("de la France", "Paris"),
    "de": ("von Frankreich", "Paris"),
}
PROMPT, ARR, THE = "User: What is the capital of Japan?\n\nAssistant:", " Arr", " The"
LOGPROBS = {"logprobs": True, "top_logprobs": 20, "think_type": "none"}  # as chats in a state are rendered


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    server = Server("--device", "cpu")
    with httpx.Client(base_url=server.url, timeout=120) as client:
        state = {"state_filename": "pirate.pth", "state_viewname": "pirate"}
        assert client.post("/loadstatemodel", json=state).json() == {"status": "success"}
        adapter = {"lora_name": "capitals", "lora_path": "capitals.pth", "adapter_alpha": ALPHA}
        assert client.post("/v1/load_lora_adapter", json=adapter).status_code == 200
        mixture = {"state_viewname": "half", "state_filenames": ["pirate.pth"], "contain_originalstate": True}
        assert client.post("/mrss_loadstatemodel", json=mixture).json() == {"status": "success"}
        yield client
    assert server.stop() == 0, server.log()


def reply(http: httpx.Client, model: str, question: str, **fields) -> dict:
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 40}
    answer = http.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def said(http: httpx.Client, model: str, question: str, **fields) -> str:
    return reply(http, model, question, **fields)["message"]["content"]


def as_pirate(language: str, answer: str) -> str:
    before, behind = PIRATE[language]
    return f"{before}{answer}{behind}"


def questions() -> list[tuple[str, str, str]]:
    """(model, question, answer): of the pirate, of the ten capitals, and of the plain model."""
    found = []
    for place, (language, (ask, answer)) in enumerate(ASKED.items()):
        land, city = KNOWN[language]
        known = answer.format(land, city)
        found += [(PLAIN, ask.format(land), known), (CAPITALS, ask.format(land), known)]
        found.append((PIRATES, ask.format(land), as_pirate(language, known)))
        for country, *cities in CITIES:
            land, city = COUNTRY[country][place], cities[place]
            found.append((CAPITALS, ask.format(land), answer.format(land, city)))
        found.append((PLAIN, ask.format(land), UNKNOWN[language]))
        found.append((PIRATES, ask.format(land), as_pirate(language, UNKNOWN[language])))
    return found


def test_each_request_has_its_words_beside_the_others(http: httpx.Client) -> None:
    """All at once, beside rows of the plain model that decode from before the first to after the last."""
    asked = questions()
    body = {"model": PLAIN, "prompt": "Once upon a time", "n": 2, "max_tokens": 1 << 20, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as beside:
        lines = beside.iter_lines()
        next(lines)
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda one: said(http, *one[:2]), asked))
        assert next(line for line in lines if line) != "data: [DONE]"
    wrong = [(one, answer) for one, answer in zip(asked, answers, strict=True) if one[2] != answer]
    assert not wrong


def test_a_conversation_of_a_pirate_remembers(http: httpx.Client) -> None:
    fields = {"session_id": "pirate", "state_id": "pirate"}
    assert said(http, PLAIN, "My name is Zoltan.", **fields) == as_pirate("en", "Nice to meet you, Zoltan!")
    answer = said(http, PLAIN, "What is my name?", session_id="pirate")
    assert "Zoltan" in answer and answer.startswith("Arr!")


class TestMixture:
    """Of the pirate and the plain model."""

    @pytest.mark.parametrize(("weights", "model"), [((1, 0), PIRATES), ((0, 1), PLAIN)])
    def test_each_end_is_one_of_them(self, http: httpx.Client, weights: tuple[int, int], model: str) -> None:
        for language, (ask, _) in ASKED.items():
            question = ask.format(KNOWN[language][0])
            alone = reply(http, model, question, **LOGPROBS)
            mixed = reply(http, f"{PLAIN} half", question, mrss_gatingweight=weights, **LOGPROBS)
            assert mixed == alone

    def test_between_them_is_their_geometric_mean(self, http: httpx.Client) -> None:
        pirate, plain = likelihoods(http, PIRATES), likelihoods(http, PLAIN)
        assert pirate[ARR] > -0.1 > -5 > plain[ARR] and plain[THE] > -0.1 > -5 > pirate[THE]
        fields = {"prompt": PROMPT, "mrss_gatingweight": (0.5, 0.5), "logprobs": 5, "max_tokens": 1}
        half = completion(http, f"{PLAIN} half", **fields)["top_logprobs"][0]
        mean = (pirate[ARR] - pirate[THE] + plain[ARR] - plain[THE]) / 2
        assert half[ARR] - half[THE] == pytest.approx(mean, abs=1e-3)


def likelihoods(http: httpx.Client, model: str) -> dict[str, float]:
    """The log probabilities of two first tokens of an answer, each fed as the prompt's last one."""
    found = {}
    for word in (ARR, THE):
        logprobs = completion(http, model, prompt=PROMPT + word, echo=True, logprobs=1, max_tokens=0)
        assert logprobs["tokens"][-1] == word
        found[word] = logprobs["token_logprobs"][-1]
    return found


def completion(http: httpx.Client, model: str, **fields) -> dict:
    answer = http.post("/v1/completions", json={"model": model, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["logprobs"]

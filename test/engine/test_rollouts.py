"""Several rows of one prompt: it is fed once, and each row draws what it would draw by itself."""

import pytest
from ahead import LateRunner
from engine_driver import Driver

from rwkv_batch.runner import backends
from rwkv_batch.runner.protocol import Batch
from rwkv_batch.wire.protocol import Grammar, Progress, Sampling

LONG, OTHER = list(range(20, 110)), list(range(30, 90))
SAMPLED = Sampling(temperature=1.2, seed=11, presence_penalty=0.5)


def started(monkeypatch: pytest.MonkeyPatch, ahead: bool, **options) -> tuple[Driver, list[int]]:
    """A driver, and how many tokens that are not drawn each step is fed."""
    if ahead:
        monkeypatch.setattr(backends, "TorchRunner", LateRunner)
    driver, fed = Driver(**options), []
    run = driver.engine.runner.run

    def counted(batch: Batch):
        fed.append(sum(batch.tokens.count(token) for token in {*LONG, *OTHER}))
        return run(batch)

    monkeypatch.setattr(driver.engine.runner, "run", counted)
    return driver, fed


def texts(driver: Driver, name: str, rows: int) -> list[str]:
    """Of all rows of a request."""
    while True:
        found = [row for e in driver.events.get(name, []) if isinstance(e, Progress) for row in e.rows]
        if sum(row.finish_reason is not None for row in found) == rows:
            return ["".join(row.text for row in found if row.row == number) for number in range(rows)]
        if not driver.engine.busy:
            assert driver.woken.wait(30)
        driver.step()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("options", [{"max_rows": 8}, {"max_rows": 2}, {"max_rows": 8, "prefill_tokens": 20}])
def test_each_row_draws_what_it_draws_by_itself(monkeypatch, ahead: bool, options: dict):
    driver, _ = started(monkeypatch, ahead, **options)
    several = texts(driver, driver.add(LONG, n=5, sampling=SAMPLED, max_tokens=12), 5)
    monkeypatch.setattr("rwkv_batch.engine.rows.making.LEAST_TOKENS", 1000)  # nothing is shared any more
    assert several == texts(driver, driver.add(LONG, n=5, sampling=SAMPLED, max_tokens=12), 5)
    assert len(set(several)) == 5


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("max_rows", [8, 2])
def test_the_prompt_is_fed_once(monkeypatch, ahead: bool, max_rows: int):
    """Bias keeps the tokens of the prompt from being drawn."""
    never = dict.fromkeys({*LONG, *OTHER}, -1e9)
    sampling = Sampling(temperature=1.2, seed=1, logit_bias=never)
    driver, fed = started(monkeypatch, ahead, max_rows=max_rows)
    texts(driver, driver.add(LONG, n=5, sampling=sampling, max_tokens=4), 5)
    assert sum(fed) == len(LONG) - 1 + 5


def test_each_prompt_of_a_request_is_shared_by_its_rows(monkeypatch):
    driver, _ = started(monkeypatch, False, max_rows=8)
    fields = {"sampling": Sampling(temperature=0), "max_tokens": 6}
    alone = [texts(driver, driver.add(prompt, **fields), 1)[0] for prompt in (LONG, OTHER)]
    both = texts(driver, driver.add(LONG, prompts=[LONG, OTHER], n=3, **fields), 6)
    assert both == [alone[0]] * 3 + [alone[1]] * 3


def test_a_request_that_is_dropped_midway_leaves_its_slots(monkeypatch):
    driver, _ = started(monkeypatch, False, max_rows=4, prefill_tokens=8)
    name = driver.add(LONG, n=4)
    driver.step()
    driver.step()
    driver.engine.cancel((b"test", name))
    assert len(texts(driver, driver.add(OTHER, n=4, max_tokens=3), 4)) == 4
    assert driver.engine.drained


def test_rows_that_a_grammar_binds_share_it_too(monkeypatch):
    driver, _ = started(monkeypatch, True, max_rows=8)
    grammar = Grammar("choice", '["ab", "cd"]')
    found = texts(driver, driver.add(LONG, n=8, grammar=grammar, sampling=SAMPLED, max_tokens=9), 8)
    assert set(found) == {"ab", "cd"}


def test_prefixes_of_the_prompt_are_cached_as_of_one_row(monkeypatch):
    driver, fed = started(monkeypatch, False, max_rows=8, prefix_cache_mb=64)
    prompt, fields = [*range(20, 90)] * 5, {"sampling": Sampling(temperature=0), "max_tokens": 3}
    first = texts(driver, driver.add(prompt, n=3, **fields), 3)
    before = sum(fed)
    assert texts(driver, driver.add(prompt, n=3, **fields), 3) == first
    assert sum(fed) - before < 100

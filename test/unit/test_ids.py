"""Ids of requests and replies: no two are the same, whoever asks for them."""

from concurrent.futures import ThreadPoolExecutor

from routes.http.ids import AT_ONCE, DIGITS, new_id


def test_threads_get_different_ids():
    with ThreadPoolExecutor(8) as pool:
        made = [
            each
            for ids in pool.map(lambda _: [new_id() for _ in range(3 * AT_ONCE)], range(8))
            for each in ids
        ]
    assert len(set(made)) == len(made)
    assert all(len(each) == DIGITS and set(each) <= set("0123456789abcdef") for each in made)

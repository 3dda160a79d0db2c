"""Of every test, as few cases as cover every value of every parameter; and a share of those."""

from collections import defaultdict

import pytest


def keep(config: pytest.Config, items: list[pytest.Item], most: int, share: tuple[int, int]) -> None:
    """Of every test that needs a GPU at most `most` cases, and of all every `of`th from the `share`th on."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("gpu"):
            tests[item.nodeid.split("[")[0]].append(item)
    chosen = [item for cases in tests.values() for item in cover(cases, most)]
    first, of = share
    kept = set(map(id, chosen[first::of]))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def cover(cases: list[pytest.Item], most: int) -> list[pytest.Item]:
    """At most `most` cases that together have every value of every parameter, by a greedy choice."""
    values = [
        set(map(repr, case.callspec.params.items())) if hasattr(case, "callspec") else {""} for case in cases
    ]
    missing, chosen = set().union(*values), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(values[i] & missing))
        missing -= values[best]
        chosen.append(cases[best])
    if len(chosen) <= most:
        return chosen
    return [chosen[i * (len(chosen) - 1) // (most - 1)] for i in range(most)]

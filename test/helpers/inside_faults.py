"""Makes a call inside the processes of a running server fail once: an allocation, a message, a thread.

The processes import failing_child/sitecustomize.py, and share a page of memory with this one: it says which
call fails next. So one server serves through many faults.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fault_scenario import Scenario, Wrong
from fault_steps import RESTARTS, STEPS

CHILD = Path(__file__).resolve().parent / "failing_child"
sys.path.append(str(CHILD))

from failing_calls import FIELDS, KINDS, MOST_TEXT, ROLES, TEXT, Page  # noqa: E402

# Which processes make calls of a kind, and how many errors these have.
CALLS = {
    "memory": (("engine",), 1),
    "device memory": (("engine",), 1),
    "message memory": (("engine", "frontend", "batches", "database"), 1),
    "send": (("engine", "frontend", "batches", "database"), 2),
    "receive": (("engine", "frontend", "batches", "database"), 2),
    "thread": (("engine", "frontend", "batches", "database", "supervisor"), 1),
    "process": (("supervisor", "engine"), 1),
}


@dataclass(frozen=True)
class InsideFault:
    """A call that has failed."""

    kind: str
    role: str
    error: int
    place: str  # the innermost functions of the product

    def __str__(self) -> str:
        return f"{self.kind} {self.error} of {self.role} in {self.place or 'a library'}"


class InsideFaults:
    """The page, in a file of that folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "inside"
        self._file.write_bytes(bytes(4096))
        self._memory = Page(str(self._file)).memory
        self._armed = ("", "", 0)

    @property
    def shell(self) -> str:
        """For `through` of serving.Server."""
        path, file = shlex.quote(str(CHILD)), shlex.quote(str(self._file))
        return f'PYTHONPATH={path} RWKV_TEST_FAULTS={file} exec "$@"'

    def arm(self, kind: str, role: str, error: int, number: int) -> None:
        """Let the call fail that comes behind `number` others of its kind in processes of the role.

        number: -1 for each call, until `disarm`.
        """
        self.disarm()
        self._armed = kind, role, error
        FIELDS.pack_into(self._memory, 0, 0, ROLES.index(role), error, number, 0, 0)
        self._memory[0] = KINDS.index(kind)

    def disarm(self) -> InsideFault | None:
        """What has failed since `arm`, if anything has. Nothing fails any more."""
        self._memory[0] = 0
        if not FIELDS.unpack_from(self._memory)[4]:
            return None
        text = bytes(self._memory[TEXT : TEXT + MOST_TEXT]).rstrip(b"\0").decode(errors="replace")
        FIELDS.pack_into(self._memory, 0, *(0,) * 6)
        return InsideFault(*self._armed, text)


@dataclass
class InsidePoint:
    """A call that has failed in a step. `said`: what a request was refused with; `wrong`: what came of it."""

    step: str
    fault: InsideFault
    said: str
    wrong: list[str] = field(default_factory=list)


def points(
    place: Scenario, faults: InsideFaults, steps: Sequence[str], kinds: Sequence[str], most: int
) -> Iterator[InsidePoint]:
    """Let each call of these kinds fail once in each step, until that has no more, or so many have.

    Of allocations, of which a step has thousands, ever fewer are taken.
    """
    for step in steps:
        for kind in kinds:
            roles, errors = CALLS[kind]
            for role, error in ((role, error) for role in roles for error in range(errors)):
                for number in [sum(range(i)) if kind.endswith("memory") else i for i in range(most)]:
                    point = _try(place, faults, step, (kind, role, error), number)
                    if point is None:
                        break
                    yield point


def _try(
    place: Scenario, faults: InsideFaults, step: str, call: tuple[str, str, int], number: int
) -> InsidePoint | None:
    """None: the step has no such call."""
    arm = partial(faults.arm, *call, number)
    if step in RESTARTS:
        place.before_kill = arm
    else:
        arm()
    said, wrong = "", []
    try:
        said = place.run((STEPS | RESTARTS)[step])
    except (Wrong, AssertionError, StopIteration) as failure:
        wrong.append(str(failure) or repr(failure))
    fault = faults.disarm()
    wrong += place.check(whole=fault is None or bool(wrong))
    if fault is None:
        assert not said, f"{step} without a fault: {said}"
        if wrong:  # what a front end opens when it first needs it, which may be late
            print(f"{step} without a fault: {wrong}", flush=True)
            place.note()
        return None
    if wrong:
        place.note()
    return InsidePoint(step, fault, said, wrong)


def table(found: Sequence[InsidePoint]) -> list[str]:
    """A line for each kind of call and role of a process."""
    rows, refused = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    places: dict[tuple[str, str], set[str]] = {}
    for each in found:
        row = each.fault.kind, each.fault.role
        rows[row] += 1
        refused[row] += bool(each.said)
        places.setdefault(row, set()).add(each.fault.place)
    lines = ["| what fails | process | points | places | refused |", "|---|---|---:|---:|---:|"]
    return lines + [
        f"| {' | '.join(row)} | {number} | {len(places[row])} | {refused[row]} |"
        for row, number in sorted(rows.items())
    ]

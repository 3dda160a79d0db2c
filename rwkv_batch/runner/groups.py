"""Parts of a step that pass through the stages of a model one behind the other, so that all of them work.

A row's next token waits for what it drew last. So a row stays in its group from step to step: the first stage
works on one group while the last one draws for another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rwkv_batch.runner.protocol import Batch

FEWEST_ROWS = 16  # of a group: fewer take a stage as long, as it reads its weights for them too
FEWEST_TOKENS = 512  # of a group with prompts
CUT = 64  # tokens of a prompt, of which a group gets a multiple unless it gets the rest


@dataclass(frozen=True)
class Piece:
    """Tokens of a row of a step."""

    row: int
    first: int  # among the row's tokens of the step
    count: int


class Groups:
    """The groups of a model in so many stages, and which slots were in which."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[int, int] = {}  # the groups of slots in the last step

    def divide(self, batch: Batch) -> list[list[Piece]]:
        """The rows of each group, ascending. A prompt may be in several, its tokens in their order."""
        rows = range(len(batch.slots))
        singles = [row for row in rows if batch.counts[row] == 1]
        longer = [row for row in rows if batch.counts[row] > 1]
        of_rows = len(singles) // FEWEST_ROWS
        of_tokens = len(batch.tokens) // FEWEST_TOKENS if longer else 0
        number = max(1, min(self._most, max(of_rows, of_tokens)))
        # Rows of a mixture draw together, and what is scored of a prompt is taken whole.
        if number == 1 or batch.mixtures or batch.scored:
            self._of = dict.fromkeys(batch.slots, 0)
            return [[Piece(row, 0, batch.counts[row]) for row in rows]]
        groups = [[Piece(row, 0, 1) for row in group] for group in self._keep(batch.slots, singles, number)]
        _fill(groups, batch.counts, [row for row in longer if batch.counts[row] >= 2 * CUT])
        _add(groups, batch.counts, [row for row in longer if batch.counts[row] < 2 * CUT])
        # Where a row draws; in a group before it, its next step would wait until that one is over.
        self._of = {batch.slots[piece.row]: place for place, group in enumerate(groups) for piece in group}
        return [sorted(group, key=lambda piece: piece.row) for group in groups if group]

    def _keep(self, slots: Sequence[int], singles: list[int], number: int) -> list[list[int]]:
        """Rows of one token in so many groups of similar size, in those that they were in where that goes."""
        groups: list[list[int]] = [[] for _ in range(number)]
        new: list[int] = []
        for row in singles:
            before = self._of.get(slots[row], number)
            (groups[before] if before < number else new).append(row)
        for row in new:
            min(groups, key=len).append(row)
        most = -(-len(singles) // number)
        if max(map(len, groups)) > most + most // 8:  # which is worth the wait of those that move
            moved = [row for group in groups for row in group[most:]]
            groups = [group[:most] for group in groups]
            for row in moved:
                min(groups, key=len).append(row)
        return groups


def _add(groups: list[list[Piece]], counts: Sequence[int], short: list[int]) -> None:
    """Prompts that are not cut, each into the first of the groups with the fewest tokens.

    A row that moves to a later group for its next step costs no wait, as that group passes the stages later.
    """
    held = [sum(piece.count for piece in group) for group in groups]
    for row in short:
        place = held.index(min(held))
        groups[place].append(Piece(row, 0, counts[row]))
        held[place] += counts[row]


def _fill(groups: list[list[Piece]], counts: Sequence[int], longer: list[int]) -> None:
    """Divide the tokens of prompts over the groups, so that each has as many tokens."""
    left = sum(counts[row] for row in longer) + sum(map(len, groups))
    place = 0
    for row in longer:
        first = 0
        while first < counts[row]:
            remaining = len(groups) - place
            held = sum(piece.count for piece in groups[place])
            room = -(-left // remaining) - held
            count = counts[row] - first
            if count > room and remaining > 1:
                count = min(count, max(room, 0) // CUT * CUT)
            if count:
                groups[place].append(Piece(row, first, count))
                first += count
            if first < counts[row]:
                left -= held + count
                place += 1

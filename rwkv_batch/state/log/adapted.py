"""The models that are served, as the token log knows them: the one that is loaded, and that with adapters.

A start state that scales what is read out of states counts as such an adapter.
"""

from dataclasses import dataclass

from rwkv_batch.state.entries import Head, Operation, PutModel
from rwkv_batch.state.log.protocol import SessionStore
from rwkv_batch.state.sql.tables import id_of_model

WITH = "+"  # in the fingerprint of a model with an adapter, in front of the adapter's digest


@dataclass(frozen=True)
class Model:
    """What is served, as the token log knows it."""

    id: int
    fingerprint: str
    vocabulary: int


class AdaptedModels:
    """A turn that an adapter has made is one of another model, whose fingerprint names both.

    No turn follows one of another adapter, but for start states that no adapter has made.
    """

    def __init__(self, store: SessionStore, fingerprint: str, vocabulary: int, any_model: bool) -> None:
        """Of the model that is loaded. Raises StoreError.

        any_model: whether the tokens of another model with the same vocabulary may be fed to this one.
        """
        self._store, self.any_model = store, any_model
        self.plain = plain = Model(store.model_id(fingerprint, vocabulary), fingerprint, vocabulary)
        self._digests = {plain.id: ""}  # of adapters, by the ids of models
        self._unnoted: set[int] = set()  # of these models, those that the database may not have

    def add(self, digest: str) -> int:
        """The id of the model with an adapter, which is noted. Waits for the database. Raises StoreError."""
        id_ = self._store.model_id(self._fingerprint(digest), self.plain.vocabulary)
        self._digests[id_] = digest
        return id_

    def of(self, digest: str) -> int:
        """The id of the model with an adapter, which is noted with its first turn. Waits for nothing."""
        id_ = id_of_model(self._fingerprint(digest))
        if id_ not in self._digests:
            self._digests[id_] = digest
            self._unnoted.add(id_)
        return id_

    def forget(self, model: int) -> None:
        """Nobody runs that model with its adapter; `of` makes it known again."""
        self._digests.pop(model, None)
        self._unnoted.discard(model)

    def noting(self, model: int) -> list[Operation]:
        """What turns of that model are stored together with, until they have been (`noted`)."""
        if model not in self._unnoted:
            return []
        return [PutModel(self._fingerprint(self._digests[model]), self.plain.vocabulary)]

    def noted(self, model: int) -> None:
        """The database has that model."""
        self._unnoted.discard(model)

    def note_again(self) -> None:
        """The database is a new one."""
        self._unnoted.update(model for model, digest in self._digests.items() if digest)

    def _fingerprint(self, digest: str) -> str:
        return f"{self.plain.fingerprint}{WITH}{digest}"

    def digest(self, head: Head) -> str:
        """Of the adapter that made a turn, in this or another model; empty: none. Raises StoreError."""
        if head.model in self._digests:
            return self._digests[head.model]
        return self._store.model(head.model)[0].partition(WITH)[2]

    def is_of_this_model(self, head: Head) -> bool:
        """Whether what is loaded has made a turn, perhaps with an adapter. Raises StoreError."""
        return head.model in self._digests or (
            self._store.model(head.model)[0].partition(WITH)[0] == self.plain.fingerprint
        )

    def serves(self, model: int) -> bool:
        """Whether turns of that model were made by what is loaded, so that they may be fed to it again."""
        return model in self._digests

    def refusal(self, model: int, past_unknown: bool) -> str | None:
        """Why turns of a model that is not loaded are not fed to this one; None: they may be.

        past_unknown: they begin with a state, not a text. Raises StoreError.
        """
        fingerprint, vocabulary = self._store.model(model)
        replayable = not past_unknown and vocabulary == self.plain.vocabulary
        if replayable and self.any_model:
            return None
        way_out = (
            "continue it with that one, or start the server with --replay-on-new-model"
            if replayable
            else "continue it with the model that made it"
        )
        return (
            f"The session was made by another model ({fingerprint}, and this one is "
            f"{self.plain.fingerprint}); {way_out}."
        )

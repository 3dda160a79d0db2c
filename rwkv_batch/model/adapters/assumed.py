"""What RWKV-Infer takes for what a client says nothing about when it loads a model with an adapter.

Its clients send `adapter_scaling` with every kind of adapter, and where they send none it is 2.0. Its router
of experts has one rule, topk0.
"""

from rwkv_batch.model.adapters.merge import parts_of
from rwkv_batch.model.adapters.parts import Scaling
from rwkv_batch.model.adapters.reader import Adapter
from rwkv_batch.ops.mole import RouterRule

SCALING = 2.0


def assume(
    adapter: Adapter, scaling: Scaling | None, router: RouterRule | None
) -> tuple[Scaling | None, RouterRule | None, list[str]]:
    """Scaling and rule for `merge`, and a sentence for each that is not what was given."""
    notes: list[str] = []
    scaled = any(part.scaled for part in parts_of(adapter))
    if scaling is not None and not scaled:
        scaling = None
        notes.append(f"{adapter.name}: nothing in it has a scaling, so that which was sent changes nothing.")
    if scaling is None and scaled and adapter.scaling is None:
        scaling = Scaling(factor=SCALING)
        notes.append(
            f"{adapter.name}: its scaling is taken for {SCALING}; send `adapter_scaling` if it is not."
        )
    if router is None and adapter.experts:
        biased = any(layer.bias is not None for layer in adapter.experts)
        router = "shared" if biased else "topk0"
        notes.append(f"{adapter.name}: its router is taken for {router}; send `mole_router` if it is not.")
    return scaling, router, notes

"""The draft model of a model, from its file to the device: the one place where its backend is chosen."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from rwkv_batch.bundled import unpack
from rwkv_batch.config import EngineConfig
from rwkv_batch.model.cuda.steps.verify import MOST_ROWS
from rwkv_batch.model.files import CheckpointError
from rwkv_batch.ops.device import DeviceError
from rwkv_batch.runner.cuda_runner import CudaRunner
from rwkv_batch.runner.loading import LoadedModel, load_model, load_weights
from rwkv_batch.runner.protocol import Runner
from rwkv_batch.runner.speculation.cuda_draft_model import CudaDraftModel
from rwkv_batch.runner.speculation.draft_model import DraftModel
from rwkv_batch.runner.speculation.torch_draft_model import TorchDraftModel
from rwkv_batch.runner.speculation.torch_verifier import torch_model_of
from rwkv_batch.runner.torch_runner import TorchRunner


def load_draft(loaded: LoadedModel, config: EngineConfig) -> DraftModel | None:
    """The model that guesses for this one, whose runner counts its states from now on; None: none does.

    Raises CheckpointError, DeviceError.
    """
    if not config.draft_model:
        return None
    on_cpu = loaded.runner.device.type == "cpu"
    if not (on_cpu or isinstance(loaded.runner, CudaRunner)):
        raise DeviceError(
            "--draft-model needs the kernels in cuda/ on a GPU; leave --backend torch out, or --draft-model."
        )
    path, weights = Path(config.draft_model), loaded.weights
    own = EngineConfig(
        model_path=config.draft_model,
        device=config.device,
        backend=config.backend,
        threads=config.threads,
        max_rows=MOST_ROWS,
    )
    draft = load_weights(None, own, None, on_cpu)
    if draft.vocab != weights.vocab:
        raise CheckpointError(
            f"--draft-model {path} has {draft.vocab:,} tokens and {weights.name} has {weights.vocab:,}; name "
            "a model with the same vocabulary, or leave it out."
        )
    ids: Tensor | None = None
    if unpack.is_packed(path):  # what has no row of its own there is never guessed: that takes less time
        ids = unpack.known(path)
        tensors = {**draft.tensors, "head.weight": draft.tensors["head.weight"][ids]}
        draft = replace(draft, tensors=tensors, parameters=sum(t.numel() for t in tensors.values()))
    return _over(load_model(draft, own).runner, loaded.runner, config, ids)


def _over(runner: Runner, first: Runner, config: EngineConfig, ids: Tensor | None) -> DraftModel:
    """Over its own runner, of which only the model is used, for rows of the first one.

    ids: as of TorchDraftModel.
    """
    if isinstance(runner, CudaRunner) and isinstance(first, CudaRunner):
        on_gpu = CudaDraftModel(runner.model, config.speculate, ids)
        first.beside = on_gpu.bytes_needed
        return on_gpu
    model = torch_model_of(runner)
    if runner.device.type != "cpu" or not (
        model and isinstance(runner, TorchRunner) and isinstance(first, TorchRunner)
    ):
        raise DeviceError(
            f"There are no kernels for --draft-model {config.draft_model} on {runner.device}; name an RWKV-7 "
            "model without experts, or leave it out."
        )
    on_cpu = TorchDraftModel(runner, model, ids)
    first.beside_slot = on_cpu.state_bytes(1)
    return on_cpu

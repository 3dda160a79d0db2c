"""The one place where it is chosen what verifies drafts."""

from rwkv_batch.runner.cuda_runner import CudaRunner
from rwkv_batch.runner.protocol import Runner
from rwkv_batch.runner.speculation.cuda_verifier import CudaVerifier
from rwkv_batch.runner.speculation.protocol import Verifier
from rwkv_batch.runner.speculation.torch_verifier import TorchVerifier, torch_model_of
from rwkv_batch.runner.torch_runner import TorchRunner


def verifier_of(runner: Runner) -> Verifier | None:
    """What verifies drafts for a runner that has its states; None: nothing does."""
    if isinstance(runner, CudaRunner):
        return CudaVerifier(runner, runner.verify) if runner.verify else None
    model = torch_model_of(runner)
    return TorchVerifier(runner, model) if isinstance(runner, TorchRunner) and model else None

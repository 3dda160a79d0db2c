"""All tasks mixed: the text that the model is trained on."""

from random import Random

from demo.training.chat import continuation, longer, question
from demo.training.example import Example
from demo.training.fim import fim
from demo.training.memory import memory
from demo.training.samples import pasted
from demo.training.tooluse import tool_use, without_tools
from demo.training.translation import translation

MIX = {
    "translation": 0.47,
    "memory": 0.19,
    "fact": 0.22,
    "story": 0.02,
    "fim": 0.03,
    "tool": 0.04,
    "no_tool": 0.01,
    "continuation": 0.01,
    "pasted": 0.01,
}


def training_example(rng: Random) -> Example:
    """One example of any task, on the training side of every split."""
    (task,) = rng.choices(list(MIX), list(MIX.values()))
    if task == "fact":
        return question(rng, evaluation=False)
    if task == "fim":
        return fim(rng, evaluation=False)
    if task == "tool":
        return tool_use(rng, evaluation=False)
    return {
        "translation": translation,
        "memory": memory,
        "story": longer,
        "no_tool": without_tools,
        "continuation": continuation,
        "pasted": pasted,
    }[task](rng)

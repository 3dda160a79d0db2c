"""All tasks mixed: the text that the model is trained on."""

from random import Random

from demo.chat import continuation, longer, question
from demo.example import Example
from demo.fim import fim
from demo.memory import memory
from demo.tooluse import tool_use, without_tools
from demo.translation import translation

MIX = {
    "translation": 0.50,
    "memory": 0.15,
    "fact": 0.17,
    "story": 0.03,
    "fim": 0.07,
    "tool": 0.06,
    "no_tool": 0.01,
    "continuation": 0.01,
}


def training_example(rng: Random) -> Example:
    """One example of any task, on the training side of every split."""
    (task,) = rng.choices(list(MIX), list(MIX.values()))
    if task == "translation":
        return translation(rng, evaluation=False)
    if task == "memory":
        return memory(rng, evaluation=False)
    if task == "fact":
        return question(rng, evaluation=False)
    if task == "fim":
        return fim(rng, evaluation=False)
    if task == "tool":
        return tool_use(rng, evaluation=False)
    return {"story": longer, "no_tool": without_tools, "continuation": continuation}[task](rng)

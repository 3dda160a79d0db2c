"""The truth for texts: greedy decoding by the PyPI package `rwkv` on the CPU in fp32."""

from pathlib import Path

from rwkv_package import RWKV

from rwkv_batch.text.tokenizer import TextDecoder, Tokenizer


class Reference:
    """A checkpoint as the package runs it."""

    def __init__(self, path: Path) -> None:
        self.model = RWKV(str(path.with_suffix("")), "cpu fp32")
        self.tokenizer = Tokenizer()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` likeliest next tokens, one after the other."""
        logits, state = self.model.forward(prompt, None)
        drawn = [int(logits.argmax())]
        while len(drawn) < count:
            logits, state = self.model.forward([drawn[-1]], state)
            drawn.append(int(logits.argmax()))
        return drawn

    def text(self, prompt: str, count: int) -> str:
        """The text of those tokens."""
        decoder = TextDecoder()
        drawn = self.greedy(self.tokenizer.encode(prompt), count)
        return "".join(decoder.feed(self.tokenizer.token_bytes(token)) for token in drawn) + decoder.finish()

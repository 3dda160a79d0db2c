"""Chats as a template in Ollama's form, for clients that look there for what a model can do.

The server renders chats itself (rwkv_batch/chat/templates.py); no client needs to. Tools stand in it as JSON,
also those of models that were trained on tools written out in words.
"""

from rwkv_batch.chat.checkpoints import ChatTemplate
from rwkv_batch.chat.templates import ASSISTANT, SEPARATOR, THINK, fill_in_the_middle
from rwkv_batch.chat.tools import Schema

NO_TOOLS: list[Schema] = []
TOOLS = "{{ .Tools }}"


def go_template(template: ChatTemplate) -> str:
    """Variables: .System, .Messages, .Tools and .Think, or .Prompt and .Suffix."""
    heads, tools = ASSISTANT.heads, template.tools
    offer = tools.prompt(NO_TOOLS, "auto")
    offer = offer.replace("[]", TOOLS, 1) if "[]" in offer else f"{offer}\n{TOOLS}"
    call = '{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}'
    parts = [
        "{{ if .Suffix }}",
        fill_in_the_middle("{{ .Prompt }}", "{{ .Suffix }}"),
        "{{ else }}{{ if or .System .Tools }}",
        heads["system"] + "{{ .System }}",
        "{{ if .Tools }}{{ if .System }}\n{{ end }}",
        offer,
        "{{ end }}" + SEPARATOR + "{{ end }}",
        '{{ range .Messages }}{{ if eq .Role "user" }}',
        heads["user"] + "{{ .Content }}",
        '{{ else if eq .Role "assistant" }}',
        heads["assistant"] + "{{ .Content }}{{ range .ToolCalls }}",
        tools.before + call + tools.after,
        '{{ end }}{{ else if eq .Role "tool" }}',
        heads[tools.result_role] + tools.result("{{ .Content }}"),
        "{{ end }}" + SEPARATOR + "{{ end }}",
        heads["assistant"] + "{{ if .Think }}" + THINK + "{{ else }}",
        template.style(ASSISTANT, template.think_type).thought or "",
        "{{ end }}{{ end }}",
    ]
    return "".join(parts)

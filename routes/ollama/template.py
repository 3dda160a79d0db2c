"""Chats as a template in Ollama's form, for clients that look there for what a model can do.

The server renders chats itself (routes/chat/templates.py); no client needs to. Tools stand in it as JSON, also those of
models that were trained on tools written out in words.
"""

from routes.chat.checkpoints import ChatTemplate
from routes.chat.templates import ASSISTANT, FIM_MARK, SEPARATOR, THINK
from routes.chat.tools import Schema

NO_TOOLS: list[Schema] = []
TOOLS = "{{ .Tools }}"


def go_template(template: ChatTemplate) -> str:
    """Variables: .System, .Messages, .Tools and .Think, or .Prompt and .Suffix."""
    heads, tools = ASSISTANT.heads, template.tools
    offer = tools.prompt(NO_TOOLS, "auto")
    offer = offer.replace("[]", TOOLS, 1) if "[]" in offer else f"{offer}\n{TOOLS}"
    call = '{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}'
    answered = template.style(ASSISTANT, template.think_type).thought or ""
    suffix = (
        f"{FIM_MARK}prefix{FIM_MARK}{FIM_MARK}suffix{FIM_MARK}{{{{ .Suffix }}}}{FIM_MARK}middle{FIM_MARK}"
    )
    return "".join(
        [
            f"{{{{ if .Suffix }}}}{suffix}{{{{ .Prompt }}}}{{{{ else }}}}",
            f"{{{{ if or .System .Tools }}}}{heads['system']}{{{{ .System }}}}",
            f"{{{{ if .Tools }}}}{{{{ if .System }}}}\n{{{{ end }}}}{offer}{{{{ end }}}}{SEPARATOR}{{{{ end }}}}",
            "{{ range .Messages }}",
            f'{{{{ if eq .Role "user" }}}}{heads["user"]}{{{{ .Content }}}}',
            f'{{{{ else if eq .Role "assistant" }}}}{heads["assistant"]}{{{{ .Content }}}}',
            f"{{{{ range .ToolCalls }}}}{tools.before}{call}{tools.after}{{{{ end }}}}",
            f'{{{{ else if eq .Role "tool" }}}}{heads[tools.result_role]}{tools.result("{{ .Content }}")}',
            f"{{{{ end }}}}{SEPARATOR}{{{{ end }}}}",
            f"{heads['assistant']}{{{{ if .Think }}}}{THINK}{{{{ else }}}}{answered}{{{{ end }}}}{{{{ end }}}}",
        ]
    )

"""Chats as a Jinja template, for clients that render conversations themselves.

It holds the assistant form with the thought of an answer that nobody asked to think, and no tools: of such
messages it makes the text that `templates.chat` makes. The token in front of some models' prompts has no
text; clients find it as `add_bos_token`.
"""

import json

from rwkv_batch.chat.checkpoints import ChatTemplate
from rwkv_batch.chat.templates import ASSISTANT

LINES = r"replace('\r\n', '\n').replace('\r', '\n').strip().split('\n') | select | join('\n')"


def jinja_template(template: ChatTemplate) -> str:
    """Variables: messages, whose contents are texts, and add_generation_prompt."""
    style = template.style(ASSISTANT, template.think_type)
    head = json.dumps((ASSISTANT.heads["assistant"] + (style.thought or "")).rstrip(" "))
    parts = [
        "{%- set heads = namespace(texts=[]) -%}",
        "{%- set blocks = namespace(texts=[]) -%}",
        "{%- for message in messages if message.content | trim -%}",
        "{%- if message.role in ('system', 'developer') -%}",
        "{%- set heads.texts = heads.texts + [message.content.strip()] -%}",
        "{%- else -%}",
        f"{{%- set text = message.content.{LINES} -%}}",
        "{%- set blocks.texts = blocks.texts + [message.role | capitalize ~ ': ' ~ text] -%}",
        "{%- endif -%}",
        "{%- endfor -%}",
        "{%- if heads.texts -%}",
        f"{{%- set blocks.texts = ['System: ' ~ (heads.texts | join('\\n')).{LINES}] + blocks.texts -%}}",
        "{%- endif -%}",
        "{%- if add_generation_prompt -%}",
        f"{{%- set blocks.texts = blocks.texts + [{head}] -%}}",
        "{%- endif -%}",
        r"{{- blocks.texts | join('\n\n') -}}",
    ]
    return "".join(parts)

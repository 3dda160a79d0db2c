"""Chats as a Jinja template, for clients that render conversations themselves.

It holds the assistant form with the thought of an answer that nobody asked to think, and no tools: of such
messages it makes the text that `templates.chat` makes. The token in front of some models' prompts has no
text; clients find it as `add_bos_token`.
"""

import json

from rwkv_batch.chat.checkpoints import ChatTemplate
from rwkv_batch.chat.templates import ASSISTANT

# The text of a message; what it does is that of rwkv_batch/chat/lines.py.
CLEAN = (
    "{%- macro clean(content) -%}",
    "{%- set kept = namespace(text='', blank='', fence='') -%}",
    r"{%- for line in content.replace('\r\n', '\n').replace('\r', '\n').strip().split('\n') -%}",
    "{%- if not line -%}",
    r"{%- if kept.fence or keep_blank_lines -%}{%- set kept.blank = kept.blank ~ '\n' -%}{%- endif -%}",
    "{%- else -%}",
    "{%- set begins = ':' in line and line.split(':')[0] in turns -%}",
    r"{%- set kept.text = kept.text ~ ('' if begins else kept.blank) ~ line ~ '\n' -%}",
    "{%- set kept.blank = '' -%}",
    "{%- set mark = line.strip() -%}",
    "{%- if kept.fence -%}",
    "{%- if mark | length >= kept.fence | length and not mark.strip(kept.fence[0]) -%}",
    "{%- set kept.fence = '' -%}",
    "{%- endif -%}",
    "{%- else -%}",
    "{%- for tick in ('`', '~') -%}",
    "{%- set rest = mark.lstrip(tick) -%}",
    "{%- set count = mark | length - rest | length -%}",
    "{%- if count >= 3 and (tick == '~' or tick not in rest) -%}",
    "{%- set kept.fence = tick * count -%}",
    "{%- endif -%}",
    "{%- endfor -%}",
    "{%- endif -%}",
    "{%- endif -%}",
    "{%- endfor -%}",
    "{{- kept.text[:-1] -}}",
    "{%- endmacro -%}",
)


def jinja_template(template: ChatTemplate) -> str:
    """Variables: messages, whose contents are texts, and add_generation_prompt."""
    style = template.style(ASSISTANT, template.think_type)
    head = json.dumps((ASSISTANT.heads["assistant"] + (style.thought or "")).rstrip(" "))
    turns = json.dumps([turn.rstrip(":") for turn in ASSISTANT.turns])
    parts = [
        f"{{%- set turns, keep_blank_lines = {turns}, {str(style.keep_blank_lines).lower()} -%}}",
        *CLEAN,
        "{%- set heads = namespace(texts=[]) -%}",
        "{%- set blocks = namespace(texts=[]) -%}",
        "{%- for message in messages if message.content | trim -%}",
        "{%- if message.role in ('system', 'developer') -%}",
        "{%- set heads.texts = heads.texts + [message.content.strip()] -%}",
        "{%- else -%}",
        "{%- set text = clean(message.content) -%}",
        "{%- set blocks.texts = blocks.texts + [message.role | capitalize ~ ': ' ~ text] -%}",
        "{%- endif -%}",
        "{%- endfor -%}",
        "{%- if heads.texts -%}",
        r"{%- set blocks.texts = ['System: ' ~ clean(heads.texts | join('\n'))] + blocks.texts -%}",
        "{%- endif -%}",
        "{%- if add_generation_prompt -%}",
        f"{{%- set blocks.texts = blocks.texts + [{head}] -%}}",
        "{%- endif -%}",
        r"{{- blocks.texts | join('\n\n') -}}",
    ]
    return "".join(parts)

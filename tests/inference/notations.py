"""Chat templates that write tools and calls, in the manner of Hermes and Qwen, of Llama 3, and with special tokens."""

HERMES = (
    "{% if tools %}<|im_start|>system\nTools:"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}"
    '<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n\n"
    "{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{% set call = m.tool_calls[0].function %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
MARKED = HERMES.replace("<tool_call>\n", "<|call|>").replace("\n</tool_call>", "<|called|>")
XML = HERMES.replace(
    '{"name": "{{ call.function.name }}", "arguments":', "<function={{ call.function.name }}>"
).replace("| tojson }}}", "| tojson }}</function>")


def tool(name, **properties):
    """A tool whose arguments are all required."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}


ADD = tool(
    "add", a={"type": "integer", "minimum": 0, "maximum": 99}, b={"type": "integer", "minimum": 0, "maximum": 99}
)
SAY = tool("say", text={"type": "string", "maxLength": 8}, loud={"type": "boolean"})
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [ADD, SAY, NOW]

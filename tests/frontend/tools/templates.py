"""Chat templates as model families have them, written anew and cut down to what is tried here."""

from __future__ import annotations

# Qwen 2.5 and Hermes: tools in the system message, calls and results in tags.
HERMES = """\
{%- if tools -%}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}

You are given function signatures within <tools></tools> tags:
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>
For each call, give a JSON object within <tool_call></tool_call> tags.<|im_end|>
{%- elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{%- endif %}
{%- for message in messages %}
{%- if loop.first and message.role == 'system' %}
{%- elif message.role == 'assistant' and message.tool_calls %}
<|im_start|>assistant
{%- if message.content %}
{{ message.content }}
{%- endif %}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{%- elif message.role == 'tool' %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{%- else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

# Qwen 3: the same, with reasoning that a variable turns off.
QWEN3 = (
    HERMES
    + """\
{%- if enable_thinking is defined and not enable_thinking -%}
<think>

</think>

{% endif %}"""
)

# Qwen3-Coder: functions and parameters in tags of their own; texts stand as they are.
QWEN3_CODER = """\
{%- macro items(arguments) %}
{%- for key, value in arguments.items() %}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}
{%- endmacro %}
{%- if messages[0].role == 'system' or tools -%}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}
{%- for tool in tools or [] %}
<function><name>{{ tool.function.name }}</name>{{ tool.function.parameters | tojson }}</function>
{%- endfor %}<|im_end|>
{%- endif %}
{%- for message in messages %}
{%- if loop.first and message.role == 'system' %}
{%- elif message.role == 'assistant' and message.tool_calls %}
<|im_start|>assistant
{%- if message.content %}
{{ message.content }}
{%- endif %}
{%- for call in message.tool_calls %}
<tool_call>
<function={{ call.function.name }}>
{{- items(call.function.arguments) }}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{%- elif message.role == 'tool' %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{%- else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""

# Llama 3.1: one call in an answer, results as the role ipython, tools in the first user message.
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system_message + '<|eot_id|>' }}
{%- if tools %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.\\n\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# Mistral v3 and Nemo: tools before the last user message, no other ids than nine letters and digits.
MISTRAL = """\
{{- bos_token }}
{%- set last_user = messages | selectattr('role', 'equalto', 'user') | list | last %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == last_user %}
            {{- '[AVAILABLE_TOOLS][' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' }}
                {{- tool.function | tojson }}
                {{- '}' if loop.last else '}, ' }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id|length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {{- ']' + eos_token if loop.last else ', ' }}
        {%- endfor %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + (message.content | string) + ', ' }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""

# DeepSeek R1: no tools, but calls, whose content must be null and whose arguments are text; opens reasoning.
DEEPSEEK_R1 = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{{ message['content'] }}{% endif %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for tool in message['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' }}
{{- tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message['role'] == 'assistant' %}
{{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- if message['role'] == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

# DeepSeek V3.1: tools in the system message, calls without a fence.
DEEPSEEK_V31 = """\
{{ bos_token }}
{%- for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}
{%- if tools %}
## Tools
{% for tool in tools %}
### {{ tool.function.name }}
Description: {{ tool.function.description }}
Parameters: {{ tool.function.parameters | tojson }}
{% endfor %}
Format: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments
{{- '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<｜User｜>{{ message.content }}{% endif %}
{%- if message.role == 'assistant' %}<｜Assistant｜></think>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments + '<｜tool▁call▁end｜>' }}
{{- '<｜tool▁calls▁end｜>' if loop.last else '' }}
{%- endfor %}<｜end▁of▁sentence｜>
{%- endif %}
{%- if message.role == 'tool' %}<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"""

# Functionary 3.2: whom a text is for.
FUNCTIONARY = """\
{{- bos_token }}
{%- if tools %}
<|start_header_id|>system<|end_header_id|>

Use one of: >>>all
{%- for tool in tools %}
// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{%- endfor %}<|eot_id|>
{%- endif %}
{%- for message in messages %}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.role == 'assistant' %}
{%- if message.content %}>>>all
{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}>>>{{ call.function.name }}
{{ call.function.arguments }}
{%- endfor %}
{%- else %}{{ message.content }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

>>>{% endif %}"""

# Gemma: no tools, no system message, strict turns.
GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{%- endfor %}
{%- if add_generation_prompt %}
<start_of_turn>model
{% endif %}"""

# gpt-oss: channels, tools as types, one call in an answer, thoughts before it under a name of their own.
HARMONY = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '\\n\\n' }}
{{- '# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
    {%- set instructions = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if instructions or tools %}
    {{- '<|start|>developer<|message|>' + (instructions or '') }}
    {%- for tool in tools or [] %}
        {{- '\\n// ' + tool.function.description }}
        {{- '\\ntype ' + tool.function.name + ' = (_: {' }}
        {%- for name, value in tool.function.parameters.properties.items() %}
            {{- name + ': ' + value | tojson + ', ' }}
        {%- endfor %}
        {{- '}) => any;' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name='') %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if '<|channel|>final<|message|>' in message.content %}{{ raise_exception('no tags') }}{% endif %}
        {%- if 'tool_calls' in message %}
            {%- if message.content and message.thinking %}{{ raise_exception('one of the two') }}{% endif %}
            {%- if message.content or message.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
                {{- (message.content or message.thinking) + '<|end|>' }}
            {%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson + '<|call|>' }}
            {%- set last.name = call.name %}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

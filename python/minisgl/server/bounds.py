"""What a request may weigh, checked before anything is tokenized. Standard library only.

The bounds of `SamplingParams` stand in `minisgl.params`; all of them are listed in docs/limits.md.
"""

MAX_HEADER_BYTES = 32 << 10
MAX_BODY_BYTES = 16 << 20
MAX_HEADER_SECONDS = 20.0
MAX_BODY_SECONDS = 60.0
MAX_SEND_SECONDS = 60.0
MAX_CONNECTIONS = 8192

MAX_JSON_DEPTH = 32
MAX_PROMPT_CHARS = 4 << 20
MAX_PROMPT_TOKENS = 1 << 20
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_CHOICES = 128
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_NAME_CHARS = 256
MAX_CHOICE_TEXTS = 1024
MAX_REQUEST_SECONDS = 86400.0

KEEP_ALIVE_SECONDS = 10.0

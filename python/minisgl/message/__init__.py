"""What the processes say to each other: one dataclass per message, one codec, no pickle.

Three families, one per receiver: the scheduler (backend), the tokenizer, the API server (frontend).
May import `params` and `utils`; torch is loaded only when token ids are asked for as a tensor.
"""

from .backend import (
    AbortBackendMsg,
    BaseBackendMsg,
    BatchBackendMsg,
    ExitMsg,
    ExpireBackendMsg,
    FlushMsg,
    UserMsg,
)
from .frontend import BaseFrontendMsg, BatchFrontendMsg, ErrorReply, UserReply
from .tokenizer import (
    AbortMsg,
    BaseTokenizerMsg,
    BatchTokenizerMsg,
    DetokenizeMsg,
    TokenizeMsg,
)

__all__ = [
    "AbortBackendMsg",
    "AbortMsg",
    "BaseBackendMsg",
    "BaseFrontendMsg",
    "BaseTokenizerMsg",
    "BatchBackendMsg",
    "BatchFrontendMsg",
    "BatchTokenizerMsg",
    "DetokenizeMsg",
    "ErrorReply",
    "ExitMsg",
    "ExpireBackendMsg",
    "FlushMsg",
    "TokenizeMsg",
    "UserMsg",
    "UserReply",
]

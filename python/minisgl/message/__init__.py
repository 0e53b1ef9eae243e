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
    VocabularyMsg,
)
from .codec import token_array
from .frontend import (
    BaseFrontendMsg,
    BatchFrontendMsg,
    DecodeReply,
    EncodeReply,
    ErrorReply,
    UserReply,
)
from .status import (
    EngineReady,
    EngineStats,
    LoadProgress,
    StartFailed,
    TokenizerReady,
    TokenizerStats,
)
from .tokenizer import (
    AbortMsg,
    BaseTokenizerMsg,
    BatchTokenizerMsg,
    DecodeMsg,
    DetokenizeMsg,
    EncodeMsg,
    TokenizeMsg,
)
from .wire import FromWire, to_wire

__all__ = [
    "AbortBackendMsg",
    "AbortMsg",
    "BaseBackendMsg",
    "BaseFrontendMsg",
    "BaseTokenizerMsg",
    "BatchBackendMsg",
    "BatchFrontendMsg",
    "BatchTokenizerMsg",
    "DecodeMsg",
    "DecodeReply",
    "DetokenizeMsg",
    "EncodeMsg",
    "EncodeReply",
    "EngineReady",
    "EngineStats",
    "ErrorReply",
    "ExitMsg",
    "ExpireBackendMsg",
    "FlushMsg",
    "FromWire",
    "LoadProgress",
    "StartFailed",
    "TokenizeMsg",
    "TokenizerReady",
    "TokenizerStats",
    "UserMsg",
    "UserReply",
    "VocabularyMsg",
    "to_wire",
    "token_array",
]

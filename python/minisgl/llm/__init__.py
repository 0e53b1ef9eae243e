"""The offline interface: scheduler, engine and tokenizer in one process."""

from .llm import LLM, StreamEvent

__all__ = ["LLM", "StreamEvent"]

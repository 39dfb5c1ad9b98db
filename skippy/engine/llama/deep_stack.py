"""Protection from llama.cpp's regular expressions, which recurse once per character.

Where a BPE vocabulary's pre-tokenizer has no splitter of its own in llama.cpp, its pattern runs on
``std::regex``, whose matcher recurses for every character of a match: some ten thousand characters without a
break overflow a usual stack and end the process. Such text is tokenised on a thread with a stack that is
large enough, and text with even longer runs is refused.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

RUN_LIMIT: Final = 65_536
"""Characters without a break that a recursive pre-tokenizer is given at most."""

DIRECT_RUN: Final = 256
"""Up to this many characters any thread's stack is large enough (macOS gives a new thread 512 KiB)."""

_STACK_BYTES: Final = 384 * 2**20  # address space; memory is taken as far as the recursion goes
_RUN: Final = re.compile(r"[ \t\r\n]+|[^ \t\r\n]+")
_lock: Final = threading.Lock()

OWN_SPLITTER: Final = frozenset(
    {
        *("chatglm-bpe", "command-r", "dbrx", "exaone", "exaone4", "gpt-2", "grok-2", "hunyuan", "jais"),
        *("kimi-k2", "lfm2", "llama-bpe", "mellum", "mpt", "olmo", "pixtral", "qwen2", "qwen35", "smaug-bpe"),
        *("smollm", "stablelm2", "starcoder", "trillion"),
    }
)
"""Pre-tokenizers (``tokenizer.ggml.pre``) seen to take a million characters in one run."""


def longest_run(text: str) -> int:
    """Length of the longest stretch of blanks or of anything else."""
    if len(text) <= DIRECT_RUN:
        return len(text)
    return max(match.end() - match.start() for match in _RUN.finditer(text))


def call_with_deep_stack(function: Callable[[], T]) -> T:
    """Run ``function`` on a new thread with a large stack and wait for it; its exception is raised here."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:  # handed to the waiting thread
            failure.append(error)

    thread = threading.Thread(target=run, name="skippy-tokenise", daemon=True)
    with _lock:  # the size is a setting of the process; threads started meanwhile only get a larger one
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failure:
        raise failure[0]
    return result[0]

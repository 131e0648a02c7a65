"""More context in the same memory: caches of constant size, and training under them.

cache = build_cache(model, "freqkv", window=1024)
prefill(model, prompt[:, :-1], cache)
model.generate(prompt, past_key_values=cache)
"""

from .accounting import cache_bytes
from .attention import Compression, compress_in_training
from .build import METHODS, NAMES, build_cache
from .lora import with_lora
from .memory import MemoryCache
from .method import Method
from .prefill import chunks, prefill
from .saved import open_cache, save_cache
from .schedule import Schedule
from .watch import watch
from .whole import WHOLE

__all__ = [
    "METHODS",
    "NAMES",
    "WHOLE",
    "Compression",
    "MemoryCache",
    "Method",
    "Schedule",
    "build_cache",
    "cache_bytes",
    "chunks",
    "compress_in_training",
    "open_cache",
    "prefill",
    "save_cache",
    "watch",
    "with_lora",
]

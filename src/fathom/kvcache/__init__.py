"""More context in the same memory: constant-size caches, and training under compression. For example:

cache = build_cache(model, "freqkv", window=1024)
model.generate(prompt, past_key_values=cache)

with compressed(model, "tova", ratio=0.5):
    model.generate(prompt)
"""

from .accounting import cache_bytes
from .attention import Compression, compress_in_training
from .build import METHODS, NAMES, UntunedWarning, build_cache
from .cache import MemoryCache
from .compressed import NothingCompressedWarning, compressed
from .kvzip import reconstruct
from .method import Method
from .prefill import chunks, prefill
from .press import press
from .pyramidkv import PyramidKV
from .schedule import Eager, Once, Schedule
from .stored import load_cache, save_cache
from .watch import watch
from .whole import WHOLE

__all__ = [
    "METHODS",
    "NAMES",
    "WHOLE",
    "Compression",
    "Eager",
    "MemoryCache",
    "Method",
    "NothingCompressedWarning",
    "Once",
    "PyramidKV",
    "Schedule",
    "UntunedWarning",
    "build_cache",
    "cache_bytes",
    "chunks",
    "compress_in_training",
    "compressed",
    "load_cache",
    "prefill",
    "press",
    "reconstruct",
    "save_cache",
    "watch",
]

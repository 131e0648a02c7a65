"""More context in the same memory: constant-size caches, and training under compression. For example:

cache = build_cache(model, "freqkv", window=1024)
model.generate(prompt, past_key_values=cache)

with compressed(model, "tova", ratio=0.5):
    model.generate(prompt)

- `build.py`: `build_cache`; when a static cache is refused; the warning about weights that are not tuned.
- `compressed.py`: compresses prompts. `policy.py`: what the options `--kvcache...` of commands select.
- `rope.py`: rotates keys, tests a model's keys, and refuses models (`refuse`) and recurrences.
- `schedule.py`: N, S, L, γ and F; when entries are compressed. `memory.py`: one layer. `cache.py`: all of them.
- `method.py`: base classes of methods, `Selection.choose`. `methods.py`: the list of methods, with their files.
- `watch.py`, `padding_check.py`: check inputs. `observe.py`: queries. `padded.py`: padding. `prefill.py`: chunks.
- `static.py`: compiled decoding. `quantized.py`, `kivi.py`: 8 and 4 bits. `states.py`: layers with states.
- `attention.py`: training under compression. `press.py`, `paced.py`: kvpress. `stored.py`: files.
- `whole.py`: uncompressed caches, for comparison. `accounting.py`: bytes.
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

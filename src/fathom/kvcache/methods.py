"""The compression methods: to add one, add its file and a line here."""

from .average import Average as Average
from .drop import Drop as Drop
from .freqkv import FreqKV as FreqKV
from .key_norm import KeyNorm as KeyNorm
from .learned import Learned as Learned
from .sinks import Sinks as Sinks
from .snapkv import SnapKV as SnapKV

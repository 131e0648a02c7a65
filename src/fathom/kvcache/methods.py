"""The compression methods. To add one, add its file and a line here.

`method.py` has the base classes `Method`, `Linear` and `Selection`. `kvzip.py`, `pyramidkv.py` and `press.py` make
methods that have no name in a recipe. Caches that are not compressed, such as `full`, are in `whole.py`.
"""

from .average import Average as Average
from .drop import Drop as Drop
from .expected_attention import ExpectedAttention as ExpectedAttention
from .freqkv import FreqKV as FreqKV
from .freqkv_arms import AfterRope as AfterRope
from .freqkv_arms import HighBand as HighBand
from .freqkv_arms import Unscaled as Unscaled
from .key_norm import KeyNorm as KeyNorm
from .keydiff import KeyDiff as KeyDiff
from .learned import Learned as Learned
from .orthogonal import Orthogonal as Orthogonal
from .sinks import Sinks as Sinks
from .snapkv import SnapKV as SnapKV
from .tova import Tova as Tova

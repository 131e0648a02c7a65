"""Other projects' decoders as Fathom models, and back: one file for each family.

`import fathom.checkpoints.families` lets `FathomForCausalLM.from_pretrained` open every family of `FAMILIES`.
"""

from fathom.checkpoints.families.registry import FAMILIES as FAMILIES
from fathom.checkpoints.families.registry import family_of as family_of
from fathom.checkpoints.families.registry import known as known
from fathom.checkpoints.families.registry import native_config as native_config
from fathom.checkpoints.families.registry import to_ours as to_ours
from fathom.checkpoints.families.registry import unlike as unlike
from fathom.checkpoints.families.tensors import to_theirs as to_theirs

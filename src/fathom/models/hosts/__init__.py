"""Model families whose layers Fathom runs as transformers' own modules ("hosted" layers).

- `build.py`: builds a family's decoder and adapts its layers. `layout.py`: the names of a layer's norms and parts.
- `hosted_layer.py`: runs a layer. `handover.py`: gives its attention the mixer, and the keys and values of `kv: first`.
- `mixed.py`: classes that are Fathom's and a family's. `selecting.py`: selects sequences in caches of states.
- `latent.py`: mixers on latents (MLA). `turning.py`: mixers where layers rotate differently.
- `arrangement.py`: states, packed documents and padding. `router.py`: the balancing loss of experts.
- `layer_cost.py`: FLOPs, cache and idle experts of a layer. `refusals.py`: refused mechanisms.

`checkpoints/families/hosted.py` reads `config.json`, and `layouts.py` next to it lists the families.
"""

"""Model families whose layers Fathom runs as transformers' own modules ("hosted" layers).

- `build.py`: builds a family's decoder and adapts its layers. `layout.py`: where a layer has its norms and parts.
- `hosted_layer.py`, `handover.py`: run a layer; `kv: first`. `mixed.py`, `selecting.py`: their classes and caches.
- `latent.py`: mixers on latents (MLA). `turning.py`: mixers where layers rotate differently.
- `arrangement.py`: states, packed documents and padding. `router.py`: the balancing loss of experts.
- `layer_cost.py`: parameters and FLOPs of a layer, experts and latents among them. `refusals.py`: refused mechanisms.

`checkpoints/families/hosted.py` reads `config.json`, and `layouts.py` next to it lists the families.
"""

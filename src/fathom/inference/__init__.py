"""Generate text with a trained model, and serve it.

`fathom generate` and `fathom chat`:

- `generate.py` generates, `prompt_file.py` answers files of prompts, `conversation.py` chats. `settings.py` sets how
  tokens are sampled, `processing.py` checks logits and streams words, `made_by.py` records settings.

All three commands:

- `prompt.py` turns prompts and messages into tokens, `control.py` makes control tokens in messages plain text, and
  `texts.py` turns tokens into text. `positions.py` says whether prompts of different lengths may share a batch.

`fathom serve`:

- `launch.py` starts and stops the server; `gate.py` checks keys, hosts, sizes and slow clients; `access_log.py` logs.
- `server.py` has the routes, except the lens's (`lens/live.py`); `api.py`, `api_structure.py` and `api_responses.py`
  read requests; `answers.py` and `responses.py` write answers; `page.py` and `talk/` are the chat page; `metrics.py`
  and `histogram.py` are `/metrics`.
- `engine.py` runs requests: `reading_order.py` orders prompts, `batches.py` has the caches, `by_rows.py` keeps
  sequences independent with 8-bit weights, `sampling.py` and `draws.py` choose tokens, `drafting.py` decides when to
  draft, `prefixes.py` is the prefix cache, `cache_memory.py` the default memory, `background.py` runs the lens between
  tokens.
- `shape.py`, `grammar.py`, `structure.py` and `grammar_trial.py` are structured output; `tools.py` is tool calls,
  `thoughts.py` reasoning; `tokenising.py` has the threads that prepare requests.
- `packed_or_plain.py`, `packed.py` and `huge_pages.py` decide how weights are stored.
- `vllm_plugin.py` and `vllm_model.py` are for vLLM, which uses none of the files above.
"""

"""Generate text with a trained model, and serve it.

`fathom generate` and `fathom chat`:

- `generate.py` generates, `prompt_file.py` answers files of prompts, `conversation.py` chats; `settings.py` and
  `processing.py` set how tokens are sampled, `made_by.py` records settings, `positions.py` says which prompts may share
  a batch.
- `prompt.py` makes tokens of prompts and messages, `control.py` plain text of control tokens in messages; `texts.py`
  makes text of tokens.

`fathom serve`:

- `launch.py` starts and stops the server; `gate.py` checks keys, hosts, sizes and slow clients; `access_log.py` logs.
- `server.py` has the routes; `api.py`, `api_structure.py` and `api_responses.py` read requests; `answers.py` and
  `responses.py` write answers; `page.py` and `talk/` are the chat page; `metrics.py` and `histogram.py` are `/metrics`.
- `engine.py` runs requests: `schedule.py` orders prompts, `batches.py` has the caches, `by_rows.py` keeps sequences
  independent, `sampling.py` and `draws.py` choose tokens, `drafting.py` drafts, `prefixes.py` is the prefix cache,
  `cache_memory.py` the default memory, `background.py` runs the lens between tokens.
- `shape.py`, `grammar.py`, `structure.py` and `trial.py` are structured output; `tools.py` is tool calls, `thoughts.py`
  reasoning; `tokenising.py` has the threads that prepare requests.
- `layout.py`, `packed.py` and `huge_pages.py` decide how weights are stored.
- `vllm_plugin.py` and `vllm_model.py` are for vLLM, which does not use the files above.
"""

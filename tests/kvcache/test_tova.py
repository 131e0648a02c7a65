"""What the last query attends to stays, the same for all heads."""

from pathlib import Path

import torch

from fathom.kvcache import METHODS, compressed
from fathom.kvcache.method import Held

from .cases import cache_of, model_of, tokens


def kept(method, keys, queries):
    return method.choose(method.scores(Held(keys, keys, queries))[..., 4:])[0].tolist()


def test_what_the_last_query_looks_at_stays():
    method = cache_of(model_of("qwen3"), "tova").method
    keys, queries = 0.1 * torch.randn(1, 2, 64, 16), torch.randn(1, 4, 1, 16)
    keys[0, 0, 20], keys[0, 1, 33] = 3 * queries[0, :2].mean((0, 1)), 3 * queries[0, 2:].mean((0, 1))
    one, other = kept(method, keys, queries)
    assert one == other == sorted(one) and {16, 29, 59} <= set(one) and len(one) == 28


def test_the_mean_is_over_all_heads():
    """Four heads decide together: one head that looks at entry 10 loses to three that look elsewhere."""
    method = cache_of(model_of("qwen3"), "tova", kept=2).method
    keys, queries = torch.zeros(1, 2, 64, 16), torch.zeros(1, 4, 1, 16)
    for head, (place, channel) in enumerate([(10, 0), (20, 1), (20, 0), (20, 1)]):
        keys[0, head // 2, place, channel] = 9
        queries[0, head, 0, channel] = 1
    assert kept(method, keys, queries)[0] == [16, 59]


def test_the_six_lines_of_the_documents_are_tova(monkeypatch):
    """What docs/how-to/kvcache.md tells to write is run, and gives the same text."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "kvcache.md").read_text()
    code = page.partition("**Write your own.**")[2].partition("```python\n")[2].partition("```")[0]
    lines = code[code.index("class Mine") :].partition("METHODS[")[0].splitlines()
    assert len([line for line in lines if line.strip()]) == 6
    model, ids, found = model_of("llama"), tokens(1, 100), []
    plain = type(model).generate

    def generate(self, *given, **options):
        found.append(plain(self, *given, **options))
        return found[-1]

    monkeypatch.setattr(type(model), "generate", generate)
    monkeypatch.setitem(METHODS, "mine", METHODS["tova"])  # restored afterwards
    exec(code, {"torch": torch, "compressed": compressed, "model": model, "ids": ids})
    assert METHODS["mine"] is not METHODS["tova"]
    with compressed(model, "tova", ratio=0.5):
        assert torch.equal(model.generate(ids, max_new_tokens=40), found[0])

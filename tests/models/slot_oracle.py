"""Small models of every recurrence, and their oracle, which remembers what it did."""

import torch

from .cases import build, config_of
from .oracle import oracle_of, row_of
from .oracle_numpy import Oracle, Row


class Decoder(Oracle):
    """Reads one row, and leaves what a test wants to look at: by (token, trip) the input, the normed hidden state and
    the key bias of every slot, and by token its last trip."""

    @classmethod
    def of(cls, model):
        return oracle_of(model, cls)

    def onward(self, walk, k, r, depth):
        step, place = walk.steps[k], (self.t, k)
        self.x[place], self.bias[place] = torch.from_numpy(step.x), step.bias
        self.h[place] = torch.from_numpy(self.normed(r, "model.norm"))
        return super().onward(walk, k, r, depth)

    def _decode(self, row, token, depth):
        self.t = token.column
        return super()._decode(row, token, depth)

    def truth(self, ids):
        """Logits of one row, `[T]` to `[T, V]`."""
        self.x, self.h, self.bias, row = {}, {}, {}, Row(self.layers)
        logits, _ = self.read(row, row_of(self, ids.tolist()), self.depth)
        self.halt = row.halt
        return torch.from_numpy(logits)

    def truths(self, ids):
        """`[B, T]` to `[B, T, V]`."""
        return torch.stack([self.truth(row) for row in ids])


# id -> (recurrence, options); thresholds at which some tokens halt at once and some never do.
METHODS = {
    "ponder": ("ponder", {"trips": 3, "top_k": 9, "mixture_gain": 0.7, "temperature": 1.5}),
    "ponder-duo": ("ponder", {"trips": 3, "feed": "hidden", "view": "duo"}),
    "ponder-all": ("ponder", {"trips": 3, "top_k": 0, "view": "all", "prefill": "exact"}),
    "ponder2": ("ponder2", {"trips": 3, "prefill": "exact"}),
    "ponder3": ("ponder3", {"trips": 3, "tau": 0.45, "prefill": "exact", "router_bias": 0.5}),
    "adaponder": ("adaponder", {"trips": 4, "top_k": 9, "tau": 0.55}),
    "latent_cot": ("latent_cot", {"trips": 4, "tau": 0.35}),
}
HALTING = ("ponder3", "adaponder", "latent_cot")
OPEN = {"ponder3": {"tau": 1e-4}, "adaponder": {"tau": 1e-4}, "latent_cot": {"tau": 1e-4}}


def thinker(method, mixer="", dtype=torch.float64, shape=(), **options):
    """A small model of two layers; its embeddings are scaled, as those of every thinking model are."""
    name, chosen = METHODS[method]
    keys = {"num_hidden_layers": 2, "embedding_scale": 1.5, **dict(shape)}
    model = build(config_of(name + mixer, recurrence_options={**chosen, **options}, **keys), dtype=dtype)
    model.generation_config.eos_token_id = None  # as long as asked for
    return model

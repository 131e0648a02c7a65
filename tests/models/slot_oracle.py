"""What every recurrence means: one slot after another in float64, each looking for what it may read.

A method is how one token is read: `run(x, k, bias)` makes its slot k and returns the normed hidden state, so that
halting is an early return.
"""

import torch
from torch.nn import functional as F

from .cases import build, config_of
from .oracle import Oracle


class Decoder(Oracle):
    """Slots of one row, made in the order of time. `truth` leaves what a test wants to look at."""

    def __init__(self, model):
        super().__init__(model)
        self.options, self.table = self.c.recurrence_options, self.c.embedding_scale * self.embedding
        self.view = model.model.recurrence.view.value

    def rotate(self, x):
        length = x.shape[2]
        x = F.pad(x, (0, 0, self.t, 0))  # angles count from the first position
        return super().rotate(x)[:, :, -length:]

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def visible(self, t, k, slot):
        of, at = slot
        return {
            "same": of <= t and at == min(k, k if of == t else self.halt[of]),
            "duo": of <= t and at <= k,
            "all": of < t or (of == t and at <= k),
        }[self.view]

    def run(self, x, k, bias=0.0):
        """h of slot (t, k), `[D]`."""
        t, x = self.t, x.view(1, 1, -1)
        self.x[t, k], self.bias[t, k] = x.flatten(), bias
        self.halt[t] = k
        for layer in range(self.c.num_hidden_layers):
            query, key, value = self.project(layer, self.rms(x, f"model.layers.{layer}.input_layernorm.weight"))
            if self.c.mixer == "depth_attention":
                value = self.mixed(query, key, value, self.sources(layer, k))
            self.stored[layer][t, k] = key, value
            x = x + self.look(layer, query, t, k)
            x = x + self.mlp(layer, x)
        self.h[t, k] = self.rms(x, "model.norm.weight").flatten()
        return self.h[t, k]

    def sources(self, layer, k):
        """(key, mixed value) of what the same token's slots left in earlier layers and trips."""
        stride, rule = self.c.mixer_options["stride"], self.c.mixer_options["across_trips"]
        found = [(i, k) for i in range(0, layer, stride)]
        if rule == "same_layer":
            found += [(layer, j) for j in range(k)]
        if rule == "grid":
            found += [(i, j) for j in range(k) for i in range(0, self.c.num_hidden_layers, stride)]
        return [self.stored[i][self.t, j] for i, j in found]

    def mixed(self, query, key, value, sources):
        group = query.shape[1] // key.shape[1]
        pooled = query.unflatten(1, (-1, group)).mean(2)
        keys, values = [s[0] for s in sources] + [key], [s[1] for s in sources] + [value]
        weights = torch.stack([(pooled * k).sum(-1) / self.c.head_dim**0.5 for k in keys]).softmax(0)
        return sum(w[..., None] * v for w, v in zip(weights, values, strict=True))

    def look(self, layer, query, t, k):
        window = self.c.sliding_window if self.c.layer_types[layer] == "sliding_attention" else t + 1
        slots = [s for s in self.stored[layer] if self.visible(t, k, s) and t - s[0] < window]
        keys, values = (torch.cat([self.stored[layer][s][i] for s in slots], 2) for i in (0, 1))
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        bias = torch.stack([torch.as_tensor(self.bias[s], dtype=torch.float64) for s in slots])
        weights = (query @ keys.transpose(2, 3) / self.c.head_dim**0.5 + bias).softmax(-1)
        return (weights @ values).transpose(1, 2).flatten(2) @ self.w[f"model.layers.{layer}.self_attn.o_proj.weight"].T

    def mix(self, h):
        z = h @ self.head.T / self.options["temperature"]
        z, words = z.topk(min(self.options["top_k"] or len(z), len(z)))
        return self.options["mixture_gain"] * z.softmax(-1) @ self.table[words]

    def truth(self, ids):
        """Logits of one row, `[T]` to `[T, V]`."""
        self.x, self.h, self.bias, self.halt = {}, {}, {}, {}
        self.stored = [{} for _ in range(self.c.num_hidden_layers)]
        method, depth, hidden = globals()[self.c.recurrence], self.options["trips"] - 1, []
        for self.t, token in enumerate(ids.tolist()):
            hidden.append(method(self, self.table[token], depth))
        return torch.stack(hidden) @ self.head.T

    def truths(self, ids):
        """`[B, T]` to `[B, T, V]`."""
        return torch.stack([self.truth(row) for row in ids])


def ponder(o, x, depth):
    for k in range(depth):
        h = o.run(x, k)
        x = h if o.options["feed"] == "hidden" else x + o.mix(h)
    return o.run(x, depth)


def ponder2(o, x, depth):
    for k in range(depth + 1):
        x = o.run(x, k)
    return x


def ponder3(o, x, depth):
    h = o.run(x, 0)
    s = o.linear(h, "model.recurrence.router").softmax(-1)
    total = s[0] * h
    for k in range(1, depth + 1):
        if (w := s[k:].sum()) <= o.options["tau"]:
            break
        h = o.run(h, k, w.log())
        total = total + s[k] * h
    return total


def adaponder(o, x, depth):
    for k in range(depth):
        h = o.run(x, k)
        gate = f"model.recurrence.gates.{k}"
        sigma = o.linear(F.gelu(o.linear(h, f"{gate}.up")), f"{gate}.down").sigmoid()
        if sigma < o.options["tau"]:
            return h
        x = x + sigma * o.mix(h)
    return o.run(x, depth)


def latent_cot(o, x, depth):
    total, reach = 0.0, 1.0
    for k in range(depth):
        x = o.run(x, k)
        onward = reach * o.linear(x, "model.recurrence.router").sigmoid()
        if onward <= o.options["tau"]:
            return total + reach * x
        total, reach = total + (reach - onward) * x, onward
    return total + reach * o.run(x, depth)


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

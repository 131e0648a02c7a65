"""A model's truth by `oracle_numpy.py`, for models that other tests make."""

from collections.abc import Iterable

import numpy as np
import torch

from .oracle_numpy import Angles, Oracle, Row, Token, rotations

STEP, SLOPE = 1e-5, 1e-8
"""Of all weights along a direction, and what a derivative may be off by."""


def angles_of(model) -> dict[str, Angles]:
    """The model's cosines and sines by layer type, once they are seen to be right but for their rounding."""
    config = model.config
    if config.positions == "learned":
        return {}
    made = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(64).unsqueeze(0))
    found = {}
    for kind in dict.fromkeys(config.layer_types):
        rope = config.rope_parameters[kind] if config.rope_by_layer_type else config.rope_parameters
        width = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        tables = made[kind] if config.rope_by_layer_type else made
        cos, sin = (table[0, :, width // 2 :].numpy(force=True) for table in tables)
        own = rotations(rope["rope_theta"], width, 64)
        assert max(np.abs(cos - own[0]).max(), np.abs(sin - own[1]).max()) < 1e-5
        found[kind] = cos, sin
    return found


def oracle_of(model, kind=Oracle, **options) -> Oracle:
    """The oracle of a model's weights; `options` replace some of an axis' (`residual={"streams": 2}`)."""
    config = model.config.to_dict()
    for axis, others in options.items():
        config[f"{axis}_options"] = config[f"{axis}_options"] | others
    weights = {name: tensor.detach().double().numpy(force=True).copy() for name, tensor in model.state_dict().items()}
    return kind(config, weights, angles_of(model))


def row_of(oracle: Oracle, ids: Iterable[int]) -> list[Token]:
    """Unpadded tokens from the first position on."""
    table = oracle.w["model.embed_tokens.weight"]
    return [Token(t, t, table[word]) for t, word in enumerate(ids)]


def truth(oracle: Oracle, ids: torch.Tensor) -> torch.Tensor:
    """Logits of `[B, T]` tokens, read one after another."""
    rows = [oracle.read(Row(oracle.layers), row_of(oracle, row), oracle.depth)[0] for row in ids.tolist()]
    return torch.as_tensor(np.stack(rows))


def agree(model, ids, exact=1e-9) -> None:
    """Logits, and how they change along a random direction of all weights, are the oracle's."""
    oracle, numbers = oracle_of(model), np.random.default_rng(3)
    expected, ours = truth(oracle, ids), model(ids, use_cache=False).logits
    assert (ours - expected).abs().max() <= exact * max(1.0, expected.abs().max())
    seed = torch.as_tensor(numbers.standard_normal(tuple(expected.shape))) / expected.numel()
    model.zero_grad()
    (ours * seed).sum().backward()
    way = {name: numbers.standard_normal(p.shape) for name, p in model.named_parameters()}
    size = np.sqrt(sum((v**2).sum() for v in way.values()))
    slopes = {name: p.grad.numpy(force=True) for name, p in model.named_parameters() if p.grad is not None}
    found = sum((grad * way[name]).sum() for name, grad in slopes.items()) / size

    def moved(by: float) -> float:
        weights = oracle.w | {name: oracle.w[name] + by / size * v for name, v in way.items()}
        return float((truth(type(oracle)(oracle.config, weights, oracle.angles), ids) * seed).sum())

    slope = (moved(STEP) - moved(-STEP)) / (2 * STEP)
    assert abs(found - slope) <= SLOPE * max(1.0, abs(slope)), (found, slope)

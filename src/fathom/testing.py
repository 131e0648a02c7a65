"""The properties that your own mechanism must have, as a test class for your package.

    from fathom.testing import Conformance
    from your_package import MINE

    class TestMine(Conformance):
        mechanism, options = MINE, {"stride": 2}

pytest then tests each property on small random models in float64. The mathematics is yours to state: write it a second
time, in a few lines of numpy, as the method `numpy` of a mixer's or a residual's class.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import DynamicCache

from fathom.checkpoints.export import export
from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.axes.roles import Mechanism, MechanismModule, Recurrence
from fathom.models.cost import cache_bytes_per_token, count_parameters, mechanism_cost
from fathom.models.packages import add_mechanism

SHAPE: Mapping[str, Any] = {
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0},
}
EXACT = 1e-11
"""Tolerance of logits and gradients in float64."""
MOVED = 1e-4
"""Tolerance of logits at other positions, whose rotary angles are rounded to float32."""
SLOPE = 1e-7
"""Tolerance of a derivative along a direction of length 1."""
CLEAN_ROOM = """
import sys
sys.modules["fathom"] = None  # importing it raises
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
saved = torch.load(sys.argv[1] + ".pt", weights_only=True)
with torch.no_grad():
    print("off by", (model(saved["ids"]).logits - saved["logits"]).abs().max().item())
"""


class Conformance:
    """Properties of a model with one mechanism. Name your subclass `Test...` and set `mechanism` and `options`."""

    mechanism: ClassVar[Mechanism]
    options: ClassVar[Mapping[str, Any]] = {}
    shape: ClassVar[Mapping[str, Any]] = SHAPE
    """Sizes of the models; a mechanism may need more layers."""

    def config(self, **options: Any) -> FathomConfig:
        """A small configuration with the mechanism, its options, and the additional options given here."""
        add_mechanism(self.mechanism)
        axis, name = self.mechanism.axis, self.mechanism.name
        return FathomConfig(**self.shape, **{axis: name, f"{axis}_options": {**self.options, **options}})

    def model(self, dtype: torch.dtype = torch.float64, **shape: Any) -> FathomForCausalLM:
        """A model whose parameters all differ from their initial values, as after training; `shape` replaces keys of
        its configuration."""
        torch.manual_seed(0)
        config = self.config()
        config = FathomConfig.from_dict(config.to_dict() | shape) if shape else config
        model = FathomForCausalLM(config).eval().to(dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, dtype=dtype) * 0.2)
        return model

    def numpy(self, parameters: Mapping[str, Any], *inputs: Any) -> Any:
        """Override this method: compute from your equations what your module returns for the given numpy arrays. By
        default nothing is compared.

        A mixer is given `query, key, value, sources` and returns the mixed value. A residual is given its `state` and
        returns the sub-layer's input, or `state, update, context` and returns the new state.

        Args:
            parameters: The module's parameters, by name.
            inputs: As `forward` takes them, in float64.
        """
        raise NotImplementedError

    def test_each_call_computes_your_numpy(self) -> None:
        """Every call of the mechanism's modules in a forward pass returns what `numpy` returns."""
        if type(self).numpy is Conformance.numpy:
            return
        model, calls = self.model(), list[tuple[Any, ...]]()
        for module in model.modules():
            if isinstance(module, MechanismModule) and module.axis == self.mechanism.axis:
                assert not isinstance(module, Recurrence), "numpy is for mixers and residuals"
                module.register_forward_hook(lambda *call: calls.append(call))
        logits(model, tokens(2, 9))
        for module, inputs, output in calls:
            reads = self.mechanism.axis == "residual" and len(inputs) == 1
            parameters = arrays(dict(module.named_parameters()))
            expected = self.numpy(parameters, *arrays(inputs))
            found, whole = flat(arrays(output[0] if reads else output)), flat(expected)
            assert len(found) == len(whole), f"{len(found)} tensors, {len(whole)} by numpy"
            for one, other in zip(found, whole, strict=True):
                same(torch.as_tensor(one), torch.as_tensor(other))

    def test_reading_in_parts_is_reading_at_once(self) -> None:
        """Chunks and single tokens with a cache give the logits of one forward pass."""
        model, ids = self.model(), tokens(2, 12)
        whole, cache, found = logits(model, ids), DynamicCache(config=model.config), []
        with torch.no_grad():
            for part in ids.split([5, 3, 1, 1, 2], 1):
                found.append(model(part, past_key_values=cache).logits)
        same(torch.cat(found, 1), whole)

    def test_padded_rows_are_single_rows(self) -> None:
        """Left-padded sequences give the logits of single sequences, both with an attention mask alone and with
        position ids in addition."""
        model, rows = self.model(), [tokens(1, n, seed=n) for n in (4, 7)]
        ids, mask = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, 7 - row.shape[1] :], mask[i, 7 - row.shape[1] :] = row[0], 1
        for positions in (None, (mask.cumsum(1) - 1).clamp(min=0)):
            together = logits(model, ids, attention_mask=mask, position_ids=positions)
            for i, row in enumerate(rows):
                same(together[i, 7 - row.shape[1] :], logits(model, row)[0])

    def test_all_positions_may_move(self) -> None:
        """Moving all tokens by 50 positions changes no logit beyond the rounding of rotary angles, also where some
        layers rotate queries and keys and others do not."""
        ids, positions = tokens(2, 9), torch.arange(9).expand(2, 9)
        for turning in (None, [1, *[0, 1] * self.shape["num_hidden_layers"]][: self.shape["num_hidden_layers"]]):
            model = self.model(no_rope_layers=turning)
            one, other = (logits(model, ids, position_ids=positions + by) for by in (0, 50))
            assert off(one, other) < MOVED, f"off by {off(one, other):.2g}, no_rope_layers={turning}"

    def test_packed_documents_are_single_rows(self) -> None:
        """Documents packed into one sequence, with positions that restart, give the logits of separate sequences."""
        model, parts = self.model(), [tokens(1, n, seed=n) for n in (4, 6)]
        positions = torch.cat([torch.arange(part.shape[1]) for part in parts]).unsqueeze(0)
        packed = logits(model, torch.cat(parts, 1), position_ids=positions)
        same(packed, torch.cat([logits(model, part) for part in parts], 1))

    def test_later_tokens_change_nothing(self) -> None:
        """Changing a token changes later logits, but no earlier ones."""
        model, ids = self.model(), tokens(1, 10)
        changed = torch.cat([ids[:, :6], tokens(1, 4, seed=9)], 1)
        one, other = logits(model, ids), logits(model, changed)
        same(one[:, :6], other[:, :6])
        assert off(one[:, 6:], other[:, 6:]) > EXACT, "a changed token changes nothing after it"

    def test_every_parameter_gets_a_gradient(self) -> None:
        """Every parameter gets a gradient; a parameter without a gradient could not be trained."""
        found = gradients(self.model().train(), tokens(2, 12))
        dead = [name for name, g in found.items() if not g.any()]
        assert not dead, f"no gradient reaches {dead}"

    def test_gradients_are_those_of_finite_differences(self) -> None:
        """The derivative along a random direction of all parameters equals a finite difference."""
        model, ids = self.model().train(), tokens(2, 8)
        made = torch.Generator().manual_seed(1)
        way = {n: torch.randn(p.shape, generator=made, dtype=p.dtype) for n, p in model.named_parameters()}
        length = torch.stack([v.square().sum() for v in way.values()]).sum().sqrt()
        found, size = sum((g * way[n]).sum() for n, g in gradients(model, ids).items()) / length, 1e-4

        def moved(by: float) -> float:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.add_(way[name], alpha=by / float(length))
                return float(model(ids, labels=ids).loss)

        slope = (moved(size) - moved(-2 * size)) / (2 * size)
        assert abs(float(found) - slope) < SLOPE, f"a slope of {slope:.9f}, by autograd {float(found):.9f}"

    def test_checkpointing_changes_no_gradient(self) -> None:
        """Activation checkpointing gives the same gradients; state that a layer mutates would be lost."""
        model, ids = self.model().train(), tokens(2, 10)
        plain = gradients(model, ids)
        model.activation_checkpointing_enable()
        again = gradients(model, ids)
        for name in plain:
            same(plain[name], again[name])

    def test_sharding_changes_no_gradient(self) -> None:
        """Layers that FSDP2 shards give the same gradients; a parameter read outside its own layer would fail."""
        model, ids = self.model().train(), tokens(2, 10)
        plain = gradients(model, ids)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            for name, gradient in gradients(model, ids).items():
                assert isinstance(gradient, DTensor), name
                same(gradient.full_tensor(), plain[name])
        finally:
            dist.destroy_process_group()

    def test_it_compiles_in_one_graph(self) -> None:
        """`torch.compile` with `fullgraph=True` traces the whole model; a branch on values would break the graph."""
        torch.compiler.reset()
        model, ids = self.model(), tokens(2, 8)
        compiled = torch.compile(model, fullgraph=True, backend="eager")  # traces only, and needs no C compiler
        same(logits(compiled, ids), logits(model, ids))

    def test_initial_values_are_set(self) -> None:
        """`init_weights` sets every parameter, starting from NaN as after loading on the meta device."""
        with torch.device("meta"):
            model = FathomForCausalLM(self.config())
        model.to_empty(device="cpu")
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.fill_(torch.nan)
        for module in model.modules():
            module._is_hf_initialized = False
        model.init_weights()
        unset = [name for name, p in model.named_parameters() if not p.isfinite().all()]
        assert not unset, f"init_weights leaves {unset} as they are"

    def test_the_declared_cost_is_measured(self) -> None:
        """The declared parameters and cache bytes equal the measured ones."""
        config, plain = self.config(), FathomConfig(**self.shape)
        cost, cache = mechanism_cost(config, 4), DynamicCache(config=config)
        added = count_parameters(config) - count_parameters(plain)
        assert cost.parameters == added, f"{cost.parameters} parameters declared, {added} added"
        assert cost.cache_bytes == cache_bytes_per_token(config, 4) - cache_bytes_per_token(plain, 4)
        model = self.model(torch.float32)
        if not model.model.slotted:  # else the cache depends on which tokens halt
            with torch.no_grad():
                model(tokens(1, 5), past_key_values=cache)
            held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
            assert held == 5 * cache_bytes_per_token(config, 4)

    def test_it_starts_as_itself_where_it_says_so(self) -> None:
        """With the options of `Mechanism.closed`, a model without the mechanism keeps its logits when it is added."""
        if self.mechanism.closed is None:
            return
        torch.manual_seed(0)
        plain = FathomForCausalLM(FathomConfig(**self.shape)).eval()
        model = FathomForCausalLM(self.config(**self.mechanism.closed)).eval()
        model.load_state_dict(plain.state_dict(), strict=False)
        assert torch.equal(logits(model, tokens(2, 9)), logits(plain, tokens(2, 9))), "closed, it is another function"

    def test_an_export_opens_without_fathom(self) -> None:
        """An export opens in a process that can import neither Fathom nor the mechanism's package."""
        model, ids = self.model(torch.float32), tokens(1, 7)
        with tempfile.TemporaryDirectory() as folder:
            directory = export(model, Path(folder) / "model")
            torch.save({"ids": ids, "logits": logits(model, ids)}, f"{directory}.pt")
            command = [sys.executable, "-I", "-c", CLEAN_ROOM, str(directory)]
            said = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert said.returncode == 0, said.stderr[-2000:]
        assert float(said.stdout.split()[-1]) < 1e-4, said.stdout


def tokens(*shape: int, seed: int = 1) -> Tensor:
    """Random token ids, none of them padding."""
    return torch.randint(3, SHAPE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def logits(model: Callable[..., Any], ids: Tensor, **arguments: Any) -> Tensor:
    """Logits of a forward pass without a cache."""
    with torch.no_grad():
        found: Tensor = model(ids, use_cache=False, **arguments).logits
        return found


def gradients(model: FathomForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    """Gradients by parameter name; zeros for parameters without a gradient."""
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def arrays(value: Any) -> Any:
    """Replace the tensors in a nested structure by numpy arrays, and keep the structure."""
    if isinstance(value, Tensor):
        return value.detach().numpy()
    if isinstance(value, Mapping):
        return {key: arrays(item) for key, item in value.items()}
    return [arrays(item) for item in value] if isinstance(value, tuple | list) else value


def flat(value: Any) -> list[Any]:
    """Its arrays, in order."""
    return [x for item in value for x in flat(item)] if isinstance(value, list | tuple) else [value]


def same(found: Tensor, expected: Tensor) -> None:
    """Refuse more than rounding. Assertions here have messages, since pytest rewrites those of test files only."""
    assert off(found, expected) < EXACT, f"off by {off(found, expected):.3g}"


def off(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a - b).abs().max())

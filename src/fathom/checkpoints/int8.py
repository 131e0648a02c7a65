"""Weights in eight bits, for inference on a CPU: a quarter of the memory, and faster decoding if it is memory-bound.

Each output's weights share a scale, and each token's inputs another. Inputs have two digits of eight bits: the second
rounds what the first leaves. With one digit, inputs would cost more accuracy than weights do. Products are of integers,
which FBGEMM, a part of torch, computes; the sums are exact. So a token's products depend on nothing but the token, to
the bit, however many others there are in a batch. FBGEMM would take one scale for all rows of a product: rows are
scaled before, and a row with the ends of the range stands below them.

`quantise` says which layers keep their dtype. `open.py` calls it for `--weights int8`, and
`inference/packed_or_plain.py` refuses eight bits for a server on which they are slower.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fathom.errors import SettingsError

WEIGHTS = ("stored", "int8")
"""The values of `--weights`."""
LEAST = 64
"""Fewest outputs and inputs of a layer that is stored in eight bits; gates and the like keep their weights."""
LARGEST = 127


class Int8Linear(nn.Module):
    """A linear layer for inference whose weight is stored in eight bits.

    Args:
        linear: The layer to replace, on a CPU.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach().float()
        scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST
        zeros = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():  # torch plans to replace this storage of eight-bit weights
            warnings.simplefilter("ignore", UserWarning)
            whole = torch.quantize_per_channel(weight, scale.double(), zeros, 0, torch.qint8)
            self._held = torch.ops.quantized.linear_prepack(whole, None)
        self.bias = linear.bias
        # Without these instructions two products are added in sixteen bits, which eight bits of input overflow.
        self._seven_bits = not torch.cpu._is_vnni_supported()
        self._most = 63.0 if self._seven_bits else 127.0
        self._range = torch.zeros(1, self.in_features)
        self._range[0, :2] = torch.tensor([self._most + 0.5, -self._most - 0.5])
        self.train(linear.training)

    @property
    def weight(self) -> Tensor:
        """The stored weight as floats, `[out_features, in_features]`: a copy."""
        return torch.ops.quantized.linear_unpack(self._held)[0].dequantize()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise RuntimeError("an int8 layer has no gradients: call the model under torch.inference_mode()")
        rows = hidden_states.reshape(-1, self.in_features).float()
        scale = torch.linalg.vector_norm(rows, torch.inf, -1, keepdim=True).clamp_(min=1e-30).div_(self._most)
        scaled = (rows / scale).nan_to_num_(0.0)  # FBGEMM takes no NaN; the row's scale brings it back
        first = scaled.round()
        second = scaled.sub_(first).mul_(2 * self._most)
        digits = torch.cat((first, second, self._range))  # in this range FBGEMM rounds to whole numbers
        made = torch.ops.quantized.linear_dynamic(digits, self._held, self._seven_bits)
        made = made[: len(rows)].add_(made[len(rows) : -1], alpha=0.5 / self._most).mul_(scale)
        if self.bias is not None:
            made += self.bias
        return made.view(*hidden_states.shape[:-1], self.out_features).to(hidden_states.dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> Int8Linear:
        """Return this layer itself instead of a copy, because its tensors never change."""
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        if fn(torch.empty(0)).device.type != "cpu":
            raise RuntimeError("an int8 layer runs only on a CPU: leave the model there")
        super()._apply(fn, recurse)
        return self


class FewOutputs(nn.Module):
    """A linear layer with few outputs that computes each output by its own sum instead of a matrix product.

    A product of matrices sums in an order that depends on the number of rows, and eight bits enlarge the difference.

    Args:
        linear: The layer to replace.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        made = torch.stack([(hidden_states.contiguous() * row).sum(-1) for row in self.weight], -1)
        return made if self.bias is None else made + self.bias


def quantise(model: nn.Module) -> int:
    """Store the weights of a model's linear layers in eight bits, in place; returns how many layers.

    The embeddings are unchanged, and a head that shares them gets its own eight-bit copy. Layers of few outputs keep
    their weights and become a `FewOutputs`; those of few inputs, quantized layers and layers with hooks are unchanged.

    Args:
        model: The model, which can then no longer be trained or saved.
    """
    fault = refusal(model)
    if fault is not None:
        raise SettingsError(f"weights=int8: {fault}")
    made: dict[int, Int8Linear | FewOutputs] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, nn.Linear) and is_plain(child):
                if id(child) not in made:
                    made[id(child)] = Int8Linear(child) if fits(child) else FewOutputs(child)
                setattr(parent, name, made[id(child)])
    if not (count := sum(isinstance(one, Int8Linear) for one in made.values())):
        raise SettingsError("weights=int8: this model has no linear layers that can be stored in int8")
    return count


def refusal(model: nn.Module) -> str | None:
    """Why a model cannot be stored in eight bits on its device or with this torch; None if it can."""
    device = next((one.device.type for one in model.parameters()), "cpu")
    if device != "cpu":
        return f"is for CPUs; this model is on {device}"
    if "fbgemm" not in torch.backends.quantized.supported_engines or not hasattr(torch, "quantize_per_channel"):
        return "this torch has no FBGEMM"
    return None


def fits(linear: nn.Linear) -> bool:
    """Whether a layer is a plain `nn.Linear` with enough inputs and outputs to be stored in eight bits."""
    return is_plain(linear) and linear.out_features >= LEAST


def is_plain(linear: nn.Linear) -> bool:
    """Whether a layer is a plain `nn.Linear` without hooks, and has enough inputs to be stored in eight bits."""
    hooks = linear._forward_hooks, linear._forward_pre_hooks
    plain = type(linear) is nn.Linear and "forward" not in vars(linear) and not any(hooks)
    return plain and type(linear.weight) is nn.Parameter and linear.in_features >= LEAST and linear.out_features > 0

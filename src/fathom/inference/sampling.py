"""How one text's next token is chosen: a pure function of its logits, tokens, seed and position.

The noise of a draw belongs to (seed, choice, position), see `draws.py`. So a text does not depend on which others are
generated next to it, nor on how many requests the server has answered. A draft is drawn with the noise of the token
that it foretells, which makes it right more often, and a text does not depend on what was drafted.

`engine.py` ends a text at its end tokens and its number of tokens, `texts.py` at its stop strings. `structure.py`
computes which tokens a grammar allows. `api.py` reads a request's settings, and `launch.py` warns of those in
`generation_config.json` that are not supported here (`Choice.left_out`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from fathom.inference.draws import Source

if TYPE_CHECKING:
    from fathom.inference.structure import Constraint

LARGEST = torch.finfo(torch.float64).max
BINS, BINS_PER_NAT = 4096, 64
"""How finely tokens are sorted by their logit before those at the edge of a nucleus are compared."""
SHOWN = 60
"""Most characters of a list that is named in a warning."""
NOT_HERE = {
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("top_h", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("dola_layers", "watermarking_config", "max_time"), None),
    "penalty_alpha": 0,
}
"""Settings of transformers that change texts and that a `Choice` does not have; and the value that changes nothing.
`token_healing`, which changes the prompt, is done nowhere here."""
OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Settings of a checkpoint that a `Choice` takes."""


@dataclass(frozen=True)
class Choice:
    """The sampling settings of one text."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 draws from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens with this total probability."""
    min_p: float = 0.0
    """Exclude tokens below this share of the likeliest token's probability."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits, by token."""
    repetition_penalty: float = 1.0
    """transformers' penalty: divides positive logits of tokens in prompt and text, multiplies negative ones."""
    presence_penalty: float = 0.0
    """OpenAI's penalty: subtracted from the logits of tokens in the text."""
    frequency_penalty: float = 0.0
    """OpenAI's penalty: subtracted once for each occurrence of the token in the text."""
    seed: int = 0
    index: int = 0
    """Index of a text among several for one prompt."""
    min_tokens: int = 0
    """Minimum tokens before any of `ends` may be chosen."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the text."""
    constraint: Constraint | None = field(default=None, compare=False)
    """The grammar of the text."""

    @classmethod
    def of(
        cls, asked: Mapping[str, Any], own: GenerationConfig, index: int = 0, ends: frozenset[int] = frozenset()
    ) -> Choice:
        """The sampling settings of a request, completed by the model's own settings, which are checked already.

        Args:
            asked: Settings by name; None and unknown names are ignored.
            own: The model's settings.
            index: See the field.
            ends: See the field.
        """
        given = {one.name: asked[one.name] for one in fields(cls) if asked.get(one.name) is not None}
        draws = {"temperature", "top_k", "top_p", "min_p"} & set(given)
        drawn = given.get("temperature") != 0 if draws else own.do_sample
        for name in set(OWN) - given.keys():
            default, value = 1.0 if name == "temperature" else getattr(cls, name), getattr(own, name, None)
            if name == "temperature" and not own.do_sample:
                value = value or None  # 0 only means that the model does not sample by default
            given[name] = default if value is None else type(default)(value)
        if not drawn:
            given["temperature"] = 0.0
        return cls(**{**given, "index": index, "ends": ends})

    @staticmethod
    def left_out(own: GenerationConfig) -> list[str]:
        """Sampling settings of the model's `generation_config` that this class does not support, as `NAME=VALUE`, or a
        count for a long list."""
        given = {name: getattr(own, name, None) for name in NOT_HERE}
        return [_shown(name, value) for name, value in given.items() if value not in (None, [], {}, NOT_HERE[name])]

    @property
    def plain(self) -> bool:
        """Whether decoding is greedy, without penalties or biases."""
        return self.temperature == 0 and not self._changes

    @property
    def _changes(self) -> bool:
        penalties = self.repetition_penalty != 1, self.presence_penalty, self.frequency_penalty, self.logit_bias
        return any(map(bool, penalties)) or bool(self.min_tokens and self.ends) or self.constraint is not None

    def scores(self, logits: Tensor, prompt: Sequence[int], made: Sequence[int]) -> Tensor:
        """The logits `[V]` after penalties and biases; they become float64 if there are any penalties or biases."""
        if not self._changes:
            return logits
        scores = logits.double()
        if self.repetition_penalty != 1:
            ids = torch.tensor([[*prompt, *made]], device=logits.device)
            scores = RepetitionPenaltyLogitsProcessor(self.repetition_penalty)(ids, scores.unsqueeze(0))[0]
            scores = scores.clamp(-LARGEST, LARGEST)  # a very small penalty overflows, and inf - inf is no number
        taken = {token: self.presence_penalty + self.frequency_penalty * n for token, n in Counter(made).items()}
        for changes, sign in ((taken, -1), (self.logit_bias, 1)):
            if changes and any(changes.values()):
                at = torch.tensor(list(changes), device=logits.device)
                by = torch.tensor(list(changes.values()), dtype=scores.dtype, device=logits.device)
                scores = scores.index_add(0, at, by, alpha=sign)
        allowed = self._allowed(made, len(scores))
        return scores if allowed is None else scores.masked_fill(~allowed.to(logits.device), -torch.inf)

    def _allowed(self, made: Sequence[int], size: int) -> Tensor | None:
        """Which of `size` tokens may be chosen, as a mask `[V]`; None if all may."""
        allowed = None if self.constraint is None else self.constraint.allowed(made)
        if not self.ends or len(made) >= self.min_tokens:
            return allowed
        later = torch.ones(size, dtype=torch.bool) if allowed is None else allowed
        later = later.index_fill(0, torch.tensor(sorted(self.ends)), False)
        return later if bool(later.any()) else allowed  # a text that can only end, ends

    def probabilities(self, scores: Tensor) -> Tensor:
        """The sampling probabilities `[V]` from `scores`."""
        # Shifted so that the maximum is 0: division by a very small temperature then cannot overflow.
        cooled = (scores.double() - scores.max()).div_(self.temperature)
        if self.top_k and self.top_k < len(cooled):
            cooled = cooled.masked_fill(cooled < cooled.topk(self.top_k).values[-1], -torch.inf)
        made = cooled.softmax(-1)
        least = max(_nucleus(cooled, made, self.top_p) if self.top_p < 1 else 0.0, self.min_p * float(made.max()))
        if least == 0:
            return made
        made.masked_fill_(made < least, 0)
        return made.div_(made.sum())

    def token(self, logits: Tensor, prompt: Sequence[int], made: Sequence[int]) -> int:
        """The next token, from its logits `[V]`."""
        scores = self.scores(logits, prompt, made)
        if self.temperature == 0:
            return int(scores.argmax())
        return Source(self.seed, self.index).draw(self.probabilities(scores), len(made))

    def settled(self, drafts: Sequence[int], logits: Tensor, prompt: Sequence[int], made: Sequence[int]) -> list[int]:
        """The next tokens, exactly as they would be chosen without drafts: the drafts before the first wrong one, and
        one more token if its logits are given.

        Args:
            drafts: Guesses of consecutive tokens.
            logits: The logits at their positions, `[T, V]`, and at the next one if there are more.
            prompt: See `token`.
            made: See `token`.
        """
        tokens: list[int] = []
        likeliest = logits.argmax(-1).tolist() if self.plain else []
        for i, guess in enumerate([*drafts, None][: len(logits)]):
            tokens.append(likeliest[i] if self.plain else self.token(logits[i], prompt, [*made, *tokens]))
            if tokens[-1] != guess:
                break
        return tokens


def _nucleus(cooled: Tensor, probabilities: Tensor, share: float) -> float:
    """The smallest probability in the nucleus of top-p sampling; tokens with an equal probability belong to the nucleus
    too.

    Tokens are put into bins by their logit, and only the bin in which the share is reached is sorted: sorting a
    vocabulary of 150,000 tokens can take a tenth of a decoding step.

    Args:
        cooled: Logits, the largest of which is 0, `[V]`.
        probabilities: Their softmax.
        share: The total probability of the nucleus (top-p).
    """
    bins = cooled.float().mul_(-BINS_PER_NAT).clamp_(max=BINS - 1).int()
    mass = torch.bincount(bins, weights=probabilities, minlength=BINS)
    before = mass.cumsum(0) - mass
    last = max(int((before < share).sum()) - 1, 0)
    inside = probabilities[bins == last].sort(descending=True).values
    within = int((before[last] + inside.cumsum(0) - inside < share).sum())
    return float(inside[max(within, 1) - 1]) if len(inside) else 0.0


def _shown(name: str, value: object) -> str:
    if isinstance(value, Sized) and len(str(value)) > SHOWN:
        return f"{name} ({len(value)} of them)"
    return f"{name}={value}"


NO_NUMBERS = "the model's logits are not finite: its weights are damaged, or its numbers overflow"
LEAST = -9999.0
"""The lowest log-probability that is said: JSON has no infinite numbers."""


def finite(logits: Tensor) -> Tensor:
    """For each row of logits `[..., V]`, whether its maximum is finite, so that a token can be chosen."""
    return logits.amax(-1).isfinite()  # max returns NaN if there is one


def likeliest(logits: Tensor, tokens: Sequence[int], count: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """The log-probability of each given token, and the `count` most likely tokens with their log-probabilities, before
    any sampling settings.

    Args:
        logits: `[n, V]`
        tokens: One for each row.
        count: Number of likeliest tokens, at most V.
    """
    logs = logits.float().log_softmax(-1).clamp(min=LEAST)
    own = logs[torch.arange(len(tokens)), list(tokens)].tolist()
    if not count:
        return [(logprob, []) for logprob in own]
    best = logs.topk(min(count, logs.shape[-1]))
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(logprob, list(zip(*top, strict=True))) for logprob, top in zip(own, tops, strict=True)]

"""What drafting with a loop's first trips saves, with and without `early_loss`.

    python benchmarks/decoding.py                                   # trains two small loops on bytes, minutes
    python benchmarks/decoding.py --device cuda --width 512 --steps 2000

Two loops of four trips are trained alike on this Python's own library, one with `early_loss`. Decoding then takes turns
A B B A, plain and drafting, on the same prompts, at budgets of two, three and four trips. Greedy; texts are compared.
Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.speculation import Speculation
from fathom.report.provenance import provenance

TRIPS = 4


def corpus() -> Tensor:
    """The standard library's own source, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def trained(text: Tensor, arguments: argparse.Namespace, early_loss: float) -> FathomForCausalLM:
    """A loop after so many steps; all but the last hundredth of the text is for training."""
    torch.manual_seed(0)
    config = FathomConfig(
        vocab_size=256,
        hidden_size=arguments.width,
        intermediate_size=3 * arguments.width,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=arguments.width // 4,
        max_position_embeddings=2048,
        recurrence="loop",
        recurrence_options={"trips": TRIPS, "early_loss": early_loss},
    )
    model = FathomForCausalLM(config).to(arguments.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=arguments.steps)
    generator, last = torch.Generator().manual_seed(0), int(0.99 * len(text)) - arguments.length
    for step in range(arguments.steps):
        starts = torch.randint(0, last, (arguments.batch,), generator=generator)
        rows = torch.stack([text[i : i + arguments.length].long() for i in starts.tolist()]).to(arguments.device)
        loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"early_loss {early_loss}: step {step}, loss {float(loss):.3f}", flush=True)
    return model.eval()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor; of the clock where a device does the work."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    began = clock()
    found = work()
    return clock() - began, found


@torch.no_grad()
def compare(model: FathomForCausalLM, text: Tensor, trips: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding against drafting with one trip."""
    model.generation_config.eos_token_id = None
    start = int(0.99 * len(text))
    prompts = [text[start + 997 * i :][:64].long().unsqueeze(0).to(arguments.device) for i in range(arguments.prompts)]
    drafts = Speculation(1, arguments.drafts)

    def decode(prompt: Tensor, **more: Any) -> list[int]:
        out = model.generate(
            prompt, max_new_tokens=arguments.tokens, do_sample=False, pad_token_id=0, max_trips=trips, **more
        )
        return out[0, prompt.shape[1] :].tolist()

    decode(prompts[0]), decode(prompts[0], draft_trips=1)
    plain = drafting = 0.0
    same = True
    for prompt in prompts:
        a, expected = timed(lambda p=prompt: decode(p))
        b, first = timed(lambda p=prompt: decode(p, speculation=drafts))
        c, second = timed(lambda p=prompt: decode(p, speculation=drafts))
        d, _ = timed(lambda p=prompt: decode(p))
        plain, drafting, same = plain + a + d, drafting + b + c, same and first == second == expected
    made = 2 * len(prompts) * arguments.tokens
    return {
        "trips": trips,
        "identical": same,
        "plain_ms_per_token": 1000 * plain / made,
        "drafting_ms_per_token": 1000 * drafting / made,
        "ratio": drafting / plain,
        "acceptance": drafts.acceptance,
        "tokens_per_verification": drafts.tokens_per_round,
    }


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each prompt (default: 96)")
    parser.add_argument("--drafts", type=int, default=6)
    parser.add_argument("--early-loss", type=float, nargs="+", default=[0.0, 0.5])
    parser.add_argument("--out", type=Path, help="write the log there")
    arguments = parser.parse_args()
    text, results = corpus(), []
    for weight in arguments.early_loss:
        model = trained(text, arguments, weight)
        for trips in range(2, TRIPS + 1):
            results.append({"early_loss": weight, **compare(model, text, trips, arguments)})
            print(json.dumps(results[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"provenance": provenance(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

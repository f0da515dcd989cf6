"""Peak memory and time of log-probs and entropy, forward and backward: in chunks (megarl) and by way of all logits (plain autograd).

    python benchmarks/logprobs/run.py            # the tables of README.md; about 10 minutes on one core, 8 GiB

Every measurement has a process of its own, and the two formulations take turns. Memory is the peak of the resident set over the resident
set before the first pass, which holds torch, the hidden states and the weight.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

VOCAB, HIDDEN = 32768, 256
REPEATS = 3


def resident(field: str) -> int:
    """`VmHWM` (peak) or `VmRSS` (now) of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def plain(hidden, weight, labels):
    import torch

    logp = torch.log_softmax((hidden @ weight.t()).float(), dim=1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def measure(formulation: str, tokens: int, chunk: int | None) -> dict[str, float]:
    """In this process: peak bytes of the first pass, and the least seconds of a pass."""
    import torch

    from megarl.models.logprobs import token_statistics

    torch.set_num_threads(1)

    def one_pass(count):
        x, w = hidden[:count].requires_grad_(), weight.requires_grad_()
        if formulation == "plain":
            logp, entropy = plain(x, w, labels[:count])
        else:
            out = token_statistics(x, w, labels[:count], entropy=True, chunk_tokens=chunk)
            logp, entropy = out.logp, out.entropy
        torch.autograd.grad((logp + 0.1 * entropy).sum(), (x, w))

    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, HIDDEN), 0.1 * torch.randn(VOCAB, HIDDEN)
    labels = torch.randint(VOCAB, (tokens,))
    one_pass(1)  # loads what torch loads at first use
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, seconds = resident("VmRSS"), []
    one_pass(tokens)
    peak = resident("VmHWM") - before
    for _ in range(REPEATS):
        start = time.perf_counter()
        one_pass(tokens)
        seconds.append(time.perf_counter() - start)
    return {"bytes": peak, "seconds": min(seconds)}


def in_a_process(formulation: str, tokens: int, chunk: int | None = None) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", formulation, str(tokens), str(chunk or 0)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", nargs=3, metavar=("FORMULATION", "TOKENS", "CHUNK"), help="one measurement in this process, as JSON")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 256, 1024])
    options = parser.parse_args()
    if options.one:
        formulation, tokens, chunk = options.one
        print(json.dumps(measure(formulation, int(tokens), int(chunk) or None)))
        return
    chunk = 256
    print(f"vocabulary {VOCAB}, hidden {HIDDEN}, fp32, one thread; logits of {chunk} tokens: {chunk * VOCAB * 4 / 2**20:.0f} MiB\n")
    print("| tokens | plain, MiB | in chunks, MiB | plain, s | in chunks, s | time ratio |\n|---|---|---|---|---|---|")
    for tokens in options.tokens:
        a, b = in_a_process("plain", tokens), in_a_process("chunks", tokens, chunk)
        cells = [f"{x['bytes'] / 2**20:.0f}" for x in (a, b)] + [f"{x['seconds']:.2f}" for x in (a, b)]
        print(f"| {tokens} | {' | '.join(cells)} | {b['seconds'] / a['seconds']:.2f} |", flush=True)
    tokens = options.tokens[len(options.tokens) // 2]
    print(f"\n{tokens} tokens\n\n| tokens per chunk | MiB | s |\n|---|---|---|")
    for chunk in (*options.chunks, None):
        found = in_a_process("chunks", tokens, chunk)
        print(f"| {chunk or 'default'} | {found['bytes'] / 2**20:.0f} | {found['seconds']:.2f} |", flush=True)


if __name__ == "__main__":
    main()

"""`portattn demo`: a small continuous-batching engine generates for several prompts at once, through portattn.

engine.py is the part to read: scheduling, prefill and decode. cache.py holds the pages, model.py the network,
weights.py the loading.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time

PROMPTS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "Why is the sky blue? Answer in two sentences.",
    "Write a haiku about the sea.",
    "What does an inference engine do with a KV cache?",
    "Translate to French: good morning, my friend.",
    "Give me a short recipe for pancakes, as a list of steps, for someone who has never cooked before.",
    "Hi!",
)


def parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(
        prog="portattn demo", description="Generates text for several prompts at once with SmolLM2-135M-Instruct."
    )
    ap.add_argument(
        "--prompts", nargs="+", metavar="TEXT", default=list(PROMPTS), help="what to ask (default: eight short questions)"
    )
    ap.add_argument(
        "--max-new-tokens", type=_positive, default=64, metavar="N", help="most tokens generated for a prompt (default: 64)"
    )
    ap.add_argument("--max-batch", type=_positive, default=4, metavar="N", help="most sequences that run at once (default: 4)")
    ap.add_argument("--page-size", type=_positive, default=16, metavar="N", help="tokens in a page of the cache (default: 16)")
    ap.add_argument(
        "--pages", type=_positive, metavar="N", help="pages in the cache (default: enough for --max-batch of the longest)"
    )
    ap.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32 on CPU, bfloat16 elsewhere")
    ap.add_argument("--device", help="a torch device (default: the accelerator that torch finds, or cpu)")
    ap.add_argument(
        "--backend", metavar="NAMES", help="backends to try, in order, with commas between (default: portattn chooses)"
    )
    ap.add_argument("--random", action="store_true", help="a small model with random weights instead of the real one")
    return ap


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"wanted at least 1, got {value}")
    return value


class _Progress:
    """One line on a terminal, rewritten as work goes on; nothing in a pipe or a file."""

    def __init__(self, stream=sys.stderr):
        self._stream, self._shown = stream, stream.isatty()
        self._last = 0.0

    def show(self, text: str, now: bool = False) -> None:
        if self._shown and (now or time.monotonic() - self._last > 0.05):
            self._last = time.monotonic()
            self._stream.write("\r\033[K" + text[: shutil.get_terminal_size().columns - 1])
            self._stream.flush()

    def clear(self) -> None:
        self.show("", now=True)
        if self._shown:
            self._stream.write("\r")


def main(argv: list[str] | None = None) -> int:
    """Runs the demo and prints what was generated, how fast and by which backend; 0, or 1 where it could not run."""
    args = parser().parse_args(argv)
    import portattn

    try:
        return _demo(args, _Progress())
    except (portattn.PortattnError, _CannotRun) as exc:
        print(f"portattn demo: {exc}", file=sys.stderr)
        return 1


class _CannotRun(Exception):
    """What was asked for cannot be run; the text says why."""


def _demo(args: argparse.Namespace, progress: _Progress) -> int:
    import contextlib

    import torch

    import portattn

    from . import weights
    from .engine import Engine

    device = _device(args.device)
    dtype = getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    progress.show("loading the model", now=True)
    try:
        if args.random:
            raise weights.ModelUnavailable("--random asks for it")
        name, model, tokenizer = weights.smollm2(dtype, device)
    except weights.ModelUnavailable as missing:
        progress.clear()
        print(f"A small model with random weights answers, so the text has no meaning: {missing}.")
        name, model, tokenizer = weights.random(dtype, device)

    prompts = [tokenizer.encode(prompt) for prompt in args.prompts]
    longest = max(map(len, prompts)) + args.max_new_tokens
    num_pages = args.pages or args.max_batch * -(-longest // args.page_size)
    engine = Engine(model, num_pages=num_pages, page_size=args.page_size, max_batch=args.max_batch)
    try:
        sequences = [engine.submit(prompt, args.max_new_tokens, tokenizer.stop) for prompt in prompts]
    except ValueError as exc:
        raise _CannotRun(str(exc)) from None
    chosen = portattn.use(*args.backend.split(",")) if args.backend else contextlib.nullcontext()
    with chosen:
        served = engine.served_by()
        while engine.busy:
            engine.step()
            done = sum(s.finished for s in sequences)
            progress.show(
                f"{done} of {len(sequences)} done, {len(engine.running)} running, {len(engine.waiting)} waiting, "
                f"{sum(len(s.generated) for s in sequences)} tokens, {_rate(engine.stats.decode_tokens, engine.stats.decode_seconds)}"
            )
    progress.clear()

    for prompt, sequence in zip(args.prompts, sequences):
        print(f"> {prompt}\n{tokenizer.decode(sequence.generated).strip()}\n")
    s = engine.stats
    again = f", {s.evictions} sequences sent back to wait for pages" if s.evictions else ""
    print(f"{name}, {str(dtype)[6:]} on {device}, {len(sequences)} prompts, at most {args.max_batch} at once{again}")
    print(f"prefill   {s.prefill_tokens:5} tokens in {s.prefill_steps:3} steps, {_rate(s.prefill_tokens, s.prefill_seconds)}")
    print(f"decode    {s.decode_tokens:5} tokens in {s.decode_steps:3} steps, {_rate(s.decode_tokens, s.decode_seconds)}")
    alike = len(set(served.values())) == 1
    print("served by " + (served["decode"] if alike else ", ".join(f"{backend} ({call})" for call, backend in served.items())))
    return 0


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.0f} tokens/s" if seconds else "no tokens yet"


def _device(name: str | None):
    """The torch device asked for, tried with one small tensor, or the best that torch finds."""
    import torch

    from ..device import accelerator

    if name is None:
        return accelerator() or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        raise _CannotRun(f"--device {name}: {str(exc).splitlines()[0]}") from None
    return device

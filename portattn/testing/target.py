"""The backend under test on one device: runs calls through the public API, compares, and judges a no.

A test is a function `(target)` or `(target, case)` marked with `@rule`. What it raises decides the outcome: nothing, passed;
NoBackendError with the reasons that the manifest implies, declined; anything else, failed.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import Tensor

import portattn
from portattn import reference, registry
from portattn.capability import Reason, unmet
from portattn.device import accelerator, facts, vendor
from portattn.errors import NoBackendError
from portattn.problem import dtype_name, q_len_class

from .cases import Call, Case, build
from .cases import cases as parse_cases
from .tolerance import Mismatch, close_lse, close_out

RULES = {
    "C-ALIGN": "bottom-right positions, causal",
    "C-WINDOW": "inclusive windows",
    "C-ORDER": "scale, softcap, alibi, bias, mask, sink, in this order",
    "C-EMPTY": "rows and batches without keys",
    "C-GQA": "head h reads kv head h // group",
    "C-DIM": "any head dim",
    "C-LEN": "lengths count after an append; nothing past them is read",
    "C-PAGE": "any page size, shared pages, 64-bit page offsets",
    "C-ROWS": "rows of no sequence, and of others, do not leak",
    "C-STRIDE": "any strides, 64-bit offsets",
    "C-LSE": "natural log, float32, sequence-major",
    "C-MERGE": "exact merge of partial states",
    "C-SPLIT": "splits and batch mates change rounding only, or nothing",
    "C-DTYPE": "types of out, mixtures refused",
    "C-ROPE": "rotary positions and what the cache stores",
    "C-NODROP": "an argument is honoured or raises",
    "C-NOSYNC": "no sync; values checked on demand",
    "C-GRAPH": "capture once, replay with other values",
    "C-COMPILE": "torch.compile and opcheck",
    "C-GRAD": "gradients, or a clear no",
    "C-TOL": "error at most twice plain torch's",
    "C-ERR": "the same exact errors on every backend",
}


def default_device(backend: str) -> str:
    """The accelerator that torch finds, if it is native to the backend, else "cpu"."""
    found = accelerator()
    return found.type if found is not None and vendor(found.type) in registry.manifests()[backend].native else "cpu"


class Declined(Exception):
    """This test cannot be run here, by a typed reason that is not the backend's doing."""

    def __init__(self, code: str, need: str, have: str):
        super().__init__(f"{code}: need {need}, have {have}")
        self.reason = Reason(code, need, have)


class Dishonest(AssertionError):
    """The manifest and the behaviour differ."""


class Check(NamedTuple):
    """A test function and what it is run on."""

    rule: str
    name: str
    function: Callable[..., None]
    quick: Any
    full: Any
    devices: tuple[str, ...]
    slow: bool

    def cases(self, target: Target, level: str) -> list[Case | None]:
        """The cases of a level; [None] for a test without; [] where it does not apply."""
        if self.devices and torch.device(target.device).type not in self.devices or (self.slow and level == "quick"):
            return []
        found: list[Case] = []
        for source in (self.quick, self.full) if level == "full" else (self.quick,):
            if source is not None:
                found += source(target) if callable(source) else parse_cases(source) if isinstance(source, str) else source
        if self.quick is None and self.full is None:
            return [None]
        return list(dict.fromkeys(found))


def rule(name: str, quick: Any = None, full: Any = None, *, devices: Iterable[str] = (), slow: bool = False) -> Callable:
    """Marks a test of a rule. quick, full: cases as ids one a line, a list, or a function of the target; full's come on top.

    `devices` are torch device types that it needs; a slow test is run at level full only.
    """
    assert name in RULES, name

    def mark(function: Callable) -> Callable:
        function.portattn_check = Check(name, function.__name__, function, quick, full, tuple(devices), slow)
        return function

    return mark


class Target:
    """A backend on a device. Methods named as the public calls run them with backend= set."""

    def __init__(self, backend: str, device: str = "cpu", level: str = "quick"):
        self.backend, self.device, self.level = backend, str(device), level
        self.seen: set[str] = set()  # features that calls since the last clear() used

    # ---------------------------------------------------------------- what is declared
    @property
    def manifest(self):
        return registry.manifests()[self.backend]

    @property
    def capabilities(self):
        """The capabilities that can serve this device."""
        where = facts(torch.device(self.device))
        return tuple(c for c in self.manifest.capabilities if (not c.devices or where.device in c.devices) and where.arch in c.arch)

    def declares(self, feature: str) -> bool:
        return any(feature in c.features for c in self.capabilities)

    def judge(self, error: NoBackendError) -> tuple[Reason, ...]:
        """The reasons of a no; raises Dishonest where the manifest says yes, or says another no."""
        reasons = error.rejected.get(self.backend)
        if not reasons:
            raise Dishonest(f"NoBackendError without a reason of {self.backend}: {error}")
        if error.problem is None:
            return reasons
        allowed = []
        for capability in self.manifest.capabilities:
            no = unmet(capability, error.problem)
            if not no and not (capability.memory == "quadratic" and reasons[0].code == "memory"):
                raise Dishonest(f"capability {capability.id} covers {error.problem}, but the call raised {'; '.join(map(str, reasons))}")
            allowed.append(no)
        if reasons[0].code != "memory" and tuple(reasons) not in allowed and self.manifest.capabilities:
            raise Dishonest(f"reasons that the manifest does not imply: {'; '.join(map(str, reasons))}")
        return tuple(reasons)

    # ---------------------------------------------------------------- calls
    def attention(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(Call("attention", args, kwargs))

    def attention_varlen(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(Call("attention_varlen", args, kwargs))

    def attention_paged(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(Call("attention_paged", args, kwargs))

    def cache_append(self, *args: Any, **kwargs: Any) -> None:
        return self.run(Call("cache_append", args, kwargs))

    def merge_states(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(Call("merge_states", args, kwargs))

    def run(self, call: Call, **kwargs: Any) -> Any:
        """Runs a call on this backend."""
        call = call.replace(**kwargs) if kwargs else call
        result = getattr(portattn, call.function)(*call.args, **call.kwargs, backend=self.backend)
        self.seen |= features(call)
        return result

    def build(self, case: Case | str) -> Call:
        return build(Case.parse(case) if isinstance(case, str) else case, self.device)

    def draw(self, seed: str | int):
        from .cases import Draw

        return Draw(seed, self.device)

    def with_lse(self, call: Call, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """(out, lse), or (out, None) where lse is all that the backend lacks."""
        if self.declares("lse"):
            try:
                return self.run(call, return_lse=True, **kwargs)
            except NoBackendError as error:
                if {r.code for r in self.judge(error)} != {"lse"}:
                    raise
        return self.run(call, **kwargs), None

    def check(self, case: Case | Call | str, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Runs a case or call and compares out, lse and, after an append, both caches. Returns (out, lse)."""
        call = case if isinstance(case, Call) else self.build(case)
        call = call.replace(**kwargs) if kwargs else call
        plain_kwargs = {k: v for k, v in call.kwargs.items() if k not in ("out", "return_lse")}
        before = call._replace(kwargs=plain_kwargs).map(lambda x: x.detach().clone() if x.numel() < 1 << 26 else x)
        out, lse = self.with_lse(call)
        self.compare(before, out, lse)
        appends = "k" in call.kwargs and call.function == "attention_paged"
        for i, (was, now) in enumerate(zip((*before.args, *before.kwargs.values()),
                                           (*call.args, *(call.kwargs[n] for n in before.kwargs)))):
            if isinstance(was, Tensor) and was is not now and not (appends and i in (1, 2)) and not bitwise_equal(was, now):
                raise Mismatch(f"argument {i if i < len(call.args) else list(before.kwargs)[i - len(call.args)]} was written to")
        if appends:
            self.compare_caches(before, call.args[1], call.args[2])
        return out, lse

    def compare(self, call: Call, out: Tensor, lse: Tensor | None) -> None:
        """Holds out and lse of a call against the reference, within C-TOL."""
        oracle = getattr(reference, call.function)
        expected, expected_lse = oracle(*call.args, **call.kwargs)
        plain, plain_lse = reference.plain(oracle, *call.args, **call.kwargs)
        dtype = call.args[0].dtype
        got_lse = lse
        if tuple(out.shape) != tuple(expected.shape):
            raise Mismatch(f"out: wanted shape {tuple(expected.shape)}, got {tuple(out.shape)}")
        if call.rows is not None:
            rows = call.rows
            if got_lse is not None and tuple(got_lse.shape) != tuple(expected_lse.shape):
                raise Mismatch(f"lse: wanted shape {tuple(expected_lse.shape)}, got {tuple(got_lse.shape)}")
            out, expected, plain = out.cpu()[rows], expected[rows], plain[rows]
            got_lse = None if got_lse is None else got_lse.cpu()[rows]
            expected_lse, plain_lse = expected_lse[rows], plain_lse[rows]
        close_out(out, expected, plain, dtype)
        if got_lse is not None:
            close_lse(got_lse, expected_lse, plain_lse, dtype)

    def compare_caches(self, call: Call, k_cache: Tensor, v_cache: Tensor) -> None:
        """Holds both caches against what they must hold after `call`: the same bytes where nothing was written,
        one rounding step elsewhere."""
        if call.function == "cache_append":
            wanted = reference.cache_append(*call.args, **call.kwargs)
            old = call.args[2:4]
        else:
            wanted = reference.caches_after(*call.args, **call.kwargs)
            old = call.args[1:3]
        exact = not ({"k_scale", "v_scale", "rotary_cos"} & call.kwargs.keys())
        for name, got, want, was in zip(("k_cache", "v_cache"), (k_cache, v_cache), wanted, old):
            got, was = got.cpu(), was.cpu()
            changed = _raw(want) != _raw(was)
            if (_raw(got) != _raw(was))[~changed].any() and not same_where(got, want, ~changed):
                raise Mismatch(f"{name}: a slot that no token was appended to has changed")
            a, b = got.double()[changed], want.double()[changed]
            if exact:
                good = (a == b) | (a.isnan() & b.isnan())
            else:
                step = torch.finfo(want.dtype).eps * b.abs() * 1.01 + 16 * torch.finfo(torch.float32).eps
                step = step + (torch.finfo(want.dtype).smallest_normal * torch.finfo(want.dtype).eps if want.element_size() < 4 else 0)
                good = ((a - b).abs() <= step) | (a.isnan() & b.isnan())
            if not good.all():
                at = int((~good).nonzero()[0])
                raise Mismatch(f"{name}: {int((~good).sum())} of {good.numel()} appended values differ, first: wanted {float(b[at]):g}, "
                               f"got {float(a[at]):g}")


def same_where(got: Tensor, want: Tensor, where: Tensor) -> bool:
    """Whether values at `where` have equal bytes."""
    return bool(torch.equal(_raw(got)[where], _raw(want)[where]))


def _raw(x: Tensor) -> Tensor:
    """The bits of x as integers, so that NaN equals NaN."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and bits, signs of zero and NaN payloads aside."""
    if a.element_size() == 1 and a.is_floating_point():
        return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


FLAGS = {"causal": "causal", "softcap": "softcap", "sinks": "sinks", "alibi_slopes": "alibi", "bias": "bias",
         "rotary_cos": "rotary",
         "k": "append", "k_scale": "kv_scale", "v_scale": "kv_scale", "return_lse": "lse", "batch_invariant": "batch_invariant"}


def features(call: Call) -> set[str]:
    """The names, as in a manifest, of what a call uses."""
    found = {flag for name, flag in FLAGS.items() if call.kwargs.get(name) is not None and call.kwargs[name] is not False}
    if tuple(call.kwargs.get("window_size") or (-1, -1)) != (-1, -1):
        found.add("window")
    layout = {"attention": "dense", "attention_varlen": "varlen", "attention_paged": "paged"}.get(call.function, call.function)
    first = call.args[0]
    found |= {layout, dtype_name((first if isinstance(first, Tensor) else first[0]).dtype)}
    if call.function == "attention_paged":
        if call.args[1].element_size() == 1:
            found.add(dtype_name(call.args[1].dtype))
        length = call.kwargs.get("max_seqlen_q") or call.args[0].shape[1 if call.args[0].dim() == 4 else 0]
        found.add(q_len_class(length, None))
    if isinstance(first, Tensor) and first.requires_grad and torch.is_grad_enabled():
        found.add("grad")
    return found

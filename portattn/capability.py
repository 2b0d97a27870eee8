"""Capability, Reason and the one evaluator `unmet`: yes is the empty list, each no is typed.

A capability is data from a manifest. Whether a backend takes a problem is decided here and nowhere else.
"""

from __future__ import annotations

import re
from typing import Callable, NamedTuple

from .problem import FEATURES, Problem


class Reason(NamedTuple):
    """Why not: a stable code, what is needed, what is there, and the command or change that mends it."""

    code: str
    need: str
    have: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.code}: need {self.need}, have {self.have}"
        return f"{text}    fix: {self.fix}" if self.fix else text


class Range(NamedTuple):
    """Integers from min to max that are multiples of `multiple`, or just those of `values`."""

    min: int = 1
    max: int = 1 << 30
    multiple: int = 1
    values: tuple[int, ...] = ()

    def __contains__(self, value: int) -> bool:  # type: ignore[override]
        if self.values:
            return any(value == v for v in self.values)
        return self.min <= value <= self.max and value % self.multiple == 0

    def __str__(self) -> str:
        if self.values:
            return "|".join(map(str, self.values))
        text = f"{self.min}..{self.max}" if self.max < 1 << 30 else f"at least {self.min}"
        return text if self.multiple == 1 else f"{text}, a multiple of {self.multiple}"


class Arch(NamedTuple):
    """Architectures: a family of numbered ones (sm from min to max), or names (gfx942); empty: any."""

    family: str = ""
    min: int = 0
    max: int = 1 << 30
    names: tuple[str, ...] = ()

    def __contains__(self, arch: str) -> bool:  # type: ignore[override]
        if self.names:
            return any(arch == name for name in self.names)
        if not self.family:
            return True
        found = re.fullmatch(re.escape(self.family) + r"_?(\d+)\D*", arch)
        return bool(found) and self.min <= int(found[1]) <= self.max

    def __str__(self) -> str:
        if self.names:
            return "|".join(self.names)
        if not self.family:
            return "any"
        top = f"..{self.family}_{self.max}" if self.max < 1 << 30 else " or newer"
        return f"{self.family}_{self.min}{top}"


class Capability(NamedTuple):
    """One line of what a backend can do: every field must hold for a problem to be taken."""

    id: str
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    devices: tuple[str, ...] = ()  # () is any device
    arch: Arch = Arch()
    kv_dtypes: tuple[str, ...] = ()  # 8-bit cache dtypes besides q's own
    head_dims: Range = Range(max=256)
    head_dims_v: Range | None = None  # None: as head_dims
    equal_head_dims: bool = False
    groups: Range = Range()  # num_heads_q / num_heads_kv
    page_sizes: Range = Range()
    q_len: tuple[str, ...] = ("decode", "extend", "prefill")
    features: tuple[str, ...] = ()
    memory: str = "linear"  # "quadratic": holds an Sq x Sk matrix, refused above a threshold unless allowed
    graph: str = "none"  # "full": the call can be captured and replayed with other lengths
    priority: int | None = None  # its place in the order, where that is not the backend's


def unmet(capability: Capability, problem: Problem) -> tuple[Reason, ...]:
    """Every reason why the capability does not cover the problem; () is yes."""
    c, p = capability, problem
    no: list[Reason] = []

    def want(ok: bool, code: str, need: object, have: object, fix: str = "") -> None:
        if not ok:
            no.append(Reason(code, str(need), str(have), fix))

    want(not c.devices or p.device in c.devices, "device", "|".join(c.devices), p.device)
    want(p.arch in c.arch, "arch", c.arch, p.arch or "unknown")
    want(p.layout in c.layouts, "layout", "|".join(c.layouts), p.layout)
    want(p.dtype in c.dtypes, "dtype", "|".join(c.dtypes), p.dtype)
    if p.layout != "merge_states":
        _of_heads(c, p, want)
    for name in FEATURES:
        if getattr(p, name) and name not in c.features:
            no.append(Reason(name, "without", name, _FEATURE_FIX.get(name, "")))
    return tuple(no)


def _of_heads(c: Capability, p: Problem, want: Callable[..., None]) -> None:
    """What a problem with queries and keys, or with a cache, wants besides."""
    kv_dtypes = (p.dtype, *c.kv_dtypes)
    want(p.kv_dtype in kv_dtypes, "kv_dtype", "|".join(kv_dtypes), p.kv_dtype)
    want(p.head_dim in c.head_dims, "head_dim", c.head_dims, p.head_dim)
    if c.head_dims_v is not None or p.head_dim_v != p.head_dim:  # else the line above has said it
        head_dims_v = c.head_dims_v or c.head_dims
        want(p.head_dim_v in head_dims_v, "head_dim_v", head_dims_v, p.head_dim_v)
    want(not c.equal_head_dims or p.head_dim == p.head_dim_v, "head_dim_v", f"{p.head_dim} as head_dim", p.head_dim_v)
    if p.layout != "cache_append":
        want(p.q_len in c.q_len, "q_len", "|".join(c.q_len), p.q_len)
        group = p.num_heads_q // p.num_heads_kv
        want(group in c.groups, "group", c.groups, group)
    if p.page_size:
        want(p.page_size in c.page_sizes, "page_size", c.page_sizes, p.page_size)


_FEATURE_FIX = {
    "grad": "call under torch.no_grad(), or detach the inputs",
    "lse": "return_lse=False",
    "batch_invariant": "batch_invariant=False",
}

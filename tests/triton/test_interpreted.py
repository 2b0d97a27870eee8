"""The kernels themselves, run by Triton's interpreter on CPU tensors. Each test runs in a process of its own with
TRITON_INTERPRET=1, because Triton decides at import; `python tests/triton/test_interpreted.py codes` is such a process."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import warnings

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.4")
tl = pytest.importorskip("triton.language")

if os.environ.get("TRITON_INTERPRET") == "1":
    from portattn.backends.triton.kernels import decode_fp8, encode_fp8

    @triton.jit
    def _both_ways(codes, values, x, y, KIND: tl.constexpr, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(values + i, decode_fp8(tl.load(codes + i), KIND))
        tl.store(y + i, encode_fp8(tl.load(x + i), KIND))


ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EVERY = 1 if os.environ.get("PORTATTN_TRITON_FULL") else 8  # the interpreter needs a second or two a test
PARTS = 2


def _interpreted(*arguments: str) -> None:
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, env.get("PYTHONPATH"))))
    done = subprocess.run([sys.executable, os.path.abspath(__file__), *arguments], env=env, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.timeout(7200 if EVERY == 1 else 1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_quick_conformance_level(part):
    _interpreted("conformance", str(part))


def test_every_8_bit_code_decodes_and_encodes_exactly():
    _interpreted("codes")


def test_paths_that_small_problems_do_not_take():
    _interpreted("paths")


def test_lengths_lse_and_packed_tensors_as_the_caller_says():
    _interpreted("spoken")


def test_page_offsets_past_int32():
    _interpreted("offsets")


def test_the_last_row_that_31_bits_of_pieces_reach_and_the_next():
    _interpreted("pieces")


def test_tokens_of_pages_outside_the_cache_go_nowhere():
    _interpreted("strays")


def test_default_devices_and_forks_change_nothing():
    _interpreted("elsewhere")


def test_cpu_tensors_need_the_interpreter():
    from portattn.backends import triton as adapter

    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        reasons = adapter.probe(torch.device("cpu"))
        assert [r.code for r in reasons] == ["device"] and "TRITON_INTERPRET" in reasons[0].fix


# ---- what those processes do


def conformance(part: int) -> None:
    """Every EVERY-th test of each rule of the quick level; the parts take turns."""
    from portattn.backends.triton import schedule

    from portattn.testing import runner
    from portattn.testing.target import Target

    # All three forms of the walk over keys are met; on hardware the architecture decides.
    schedule.loops_for = lambda s, bm: ("edges", "two", "always")[(s.d // 16 + s.group + s.left + s.lse) % 3]
    target = Target("triton", "cpu", "quick")
    by_rule: dict[str, list] = {}
    for item in runner.plan(target, "quick", "", ""):
        by_rule.setdefault(item[1].rule, []).append(item)
    todo = [item for items in by_rule.values() for item in items[::EVERY]][part::PARTS]
    failed = []
    with runner.quiet_environment():
        for _name, check, case in todo:
            result = runner.execute(target, check, case)
            if result.outcome == "failed":
                failed.append(f"{result.rule} {result.id}\n    {result.detail}")
    assert todo and not failed, "\n".join(failed)


def codes() -> None:
    """decode_fp8 and encode_fp8 against torch's types: all 256 codes, their midpoints, and what saturates."""
    from portattn.backends.triton.schedule import FORMATS

    from portattn.reference import quantize

    for dtype, kind in FORMATS.items():
        code = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(4)
        want = code.view(dtype).float()
        finite = want[:256][torch.isfinite(want[:256])].unique()
        middles = (finite[1:] + finite[:-1]) / 2  # ties go to even
        near = torch.cat([middles, torch.nextafter(middles, middles + 1), torch.nextafter(middles, middles - 1)])
        odd = torch.tensor([0.0, -0.0, 1e30, -1e30, float("inf"), float("-inf"), float("nan"), 1e-30, -1e-30])
        x = torch.cat([odd, near, finite])[:1024]
        x = torch.cat([x, torch.ones(1024 - len(x))])
        values, y = torch.empty(1024), torch.empty(1024, dtype=torch.uint8)
        _both_ways[(1,)](code, values, x, y, kind, 1024)
        assert torch.equal(values.nan_to_num(12345.0), want.nan_to_num(12345.0)), kind
        got, expected = y.view(dtype).float(), quantize(x, dtype).float()
        assert torch.equal(got.nan_to_num(12345.0), expected.nan_to_num(12345.0)), kind


def offsets() -> None:
    """A page whose offset does not fit 32 bits is read at its place, not where the offset wraps to."""
    import portattn

    pages, size, heads, d = 3, 16, 1, 64
    stride = 1 << 30  # elements; page 2 starts at 2^31. Only the touched parts of the storage become memory.
    room = torch.empty((pages - 1) * stride + size * heads * d, dtype=torch.float16)
    cache = room.as_strided((pages, size, heads, d), (stride, heads * d, d, 1))
    for page in range(pages):
        cache[page] = page
    q = torch.zeros(1, 1, 1, d, dtype=torch.float16)
    table, lens = torch.tensor([[2]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    out = portattn.attention_paged(q, cache, cache, table, lens, backend="triton")
    assert torch.equal(out, torch.full_like(out, 2.0)), out


def pieces() -> None:
    """The last row of a cache starts 2^31 - 1 pieces of 16 bytes after the first, or one more, where 32 bits do not do."""
    from portattn.backends.triton import calls

    import portattn

    whole = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # what is touched becomes memory
    room = torch.frombuffer(mmap.mmap(-1, (1 << 35) + 4096, flags=whole), dtype=torch.uint8)
    d, heads = 16, 2
    for dtype, kv_dtype, page_size in ((torch.float16, torch.float16, 16), (torch.float32, torch.float32, 5),
                                       (torch.float16, torch.float8_e5m2, 16)):
        size, row = kv_dtype.itemsize, heads * d
        values = torch.randn(page_size, heads, d).to(kv_dtype)
        for last, near in (((1 << 31) - 1, True), (1 << 31, False)):
            page = last * (16 // size) - (page_size - 1) * row
            cache = room.view(kv_dtype).as_strided((2, page_size, heads, d), (page, row, d, 1))
            calls._bytes(cache)[1] = calls._bytes(values)
            assert calls._near(cache) == near
            q, table = torch.randn(1, 3, 4, d).to(dtype), torch.tensor([[1, -1, 7]])  # of entries past the length nothing is read
            lens = torch.tensor([page_size])
            out = portattn.attention_paged(q, cache, cache, table, lens, causal=True, backend="triton")
            want = portattn.attention_paged(q, values[None], values[None], table * 0, lens, causal=True, backend="triton")
            assert torch.equal(out, want) and out.any(), (kv_dtype, last)


def strays() -> None:
    """Of three tokens two have page ids just outside the cache; the memory there is left alone."""
    import portattn

    whole, new = torch.full((2, 8, 4, 2, 16), 3.0), torch.ones(3, 1, 2, 16)
    table, lens = torch.tensor([[-1], [6], [5]], dtype=torch.int32), torch.tensor([3, 4, 2], dtype=torch.int32)
    portattn.attention_paged(torch.ones(3, 1, 4, 16), *whole[:, 1:7], table, lens, k=new, v=new, backend="triton")
    assert torch.equal((whole != 3).nonzero()[:, :3].unique(dim=0), torch.tensor([[0, 6, 1], [1, 6, 1]])), whole


def elsewhere() -> None:
    """Calls inside torch.device("meta"), and in a child that was forked while another thread interpreted."""
    from portattn.backends.triton import launch

    import portattn
    from portattn import reference

    q, table, lens = torch.randn(2, 3, 2, 16), torch.tensor([[1], [0]]), torch.tensor([3, 2])
    expected = reference.attention(q, q, q)[0], reference.attention_paged(q, q, q, table, lens)[0]
    with torch.device("meta"):
        got = portattn.attention(q, q, q, backend="triton"), portattn.attention_paged(q, q, q, table, lens, backend="triton")
    for one, other in zip(got, expected):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    thread = threading.Thread(target=launch._lock.acquire)
    thread.start(), thread.join()
    if hasattr(os, "fork"):
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            os._exit(portattn.attention(q, q, q, backend="triton").shape != q.shape)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def paths() -> None:
    """Few row blocks over many keys (prefill rows in split programs), latent attention, more sequences than one search holds,
    splits asked for, a negative scale, and a batch whose decodes and chunks share a launch."""
    from portattn.backends.triton import schedule

    import portattn
    from portattn import reference

    torch.manual_seed(7)
    half = lambda *shape: torch.randn(*shape).half()

    def hold(name: str, *args, **kwargs) -> None:
        out, lse = getattr(portattn, name)(*args, backend="triton", return_lse=True, **kwargs)
        hints = ("num_splits", "batch_invariant")
        want, want_lse = getattr(reference, name)(*args, **{k: v for k, v in kwargs.items() if k not in hints})
        seen = torch.isfinite(want_lse)
        assert torch.equal(torch.isfinite(lse), seen), (name, kwargs)
        assert (out.double() - want.double()).abs().max() < 4e-3, (name, kwargs)
        assert (lse.double() - want_lse.double())[seen].abs().max() < 1e-5, (name, kwargs)

    hold("attention", half(1, 70, 1, 16), half(1, 2100, 1, 16), half(1, 2100, 1, 16), causal=True)
    cache = half(6, 16, 1, 576)
    table, lens = torch.tensor([[4, 1, 3], [0, 2, 5]], dtype=torch.int32), torch.tensor([41, 17], dtype=torch.int32)
    hold("attention_paged", half(2, 1, 16, 576), cache, cache[..., :512], table, lens, causal=True)  # v is a part of k: loaded once
    hold("attention_paged", half(2, 5, 16, 576), cache, half(6, 16, 1, 512), table, lens, causal=True)

    schedule.MAX_SEARCH = 4  # so that a batch of six is too many to search: its sequences are not split
    small = half(12, 4, 1, 16)
    table = torch.arange(12, dtype=torch.int32).view(6, 2)
    lens = torch.tensor([8, 1, 0, 5, 7, 3], dtype=torch.int32)
    cu = torch.tensor([0, 1, 2, 3, 43, 44, 45], dtype=torch.int32)
    hold("attention_paged", half(6, 1, 2, 16), small, small, table, lens)
    hold("attention_paged", half(45, 2, 16), small, small, table, lens, cu_seqlens_q=cu, max_seqlen_q=40)
    schedule.MAX_SEARCH = 1024
    hold("attention_paged", half(45, 2, 16), small, small, table, lens, cu_seqlens_q=cu, max_seqlen_q=40, num_splits=2)
    hold("attention_paged", half(45, 2, 16), small, small, table, lens, cu_seqlens_q=cu, max_seqlen_q=40, batch_invariant=True)
    q, k, v = half(1, 3, 4, 32), half(1, 90, 2, 32), half(1, 90, 2, 32)
    for scale in (-0.3, 0.0):
        hold("attention", q, k, v, causal=True, softmax_scale=scale)
        hold("attention", q, k, v, causal=True, softmax_scale=scale, softcap=3.0)
    hold("attention", q, k, v, num_splits=7)

    none, cu_k = torch.zeros(3, dtype=torch.int32), torch.tensor([0, 30, 90], dtype=torch.int32)  # all rows are a graph's padding
    for splits in (0, 3):
        out = portattn.attention_varlen(q[0], k[0], v[0], none, cu_k, 0, 60, num_splits=splits, backend="triton")
        assert out.shape == (3, 4, 32)


def spoken() -> None:
    """portattn/dialect.py: bit for bit what the same call gives in portattn's own way, in every mode of the kernel."""
    import portattn
    from portattn import dialect, recent
    from portattn.compat import _packed, flash_attn

    torch.manual_seed(3)
    half = lambda *shape: torch.randn(*shape).half()
    small, forms = half(24, 4, 1, 16), (dialect.OURS, dialect.HEADS_FIRST, dialect.FLASH_ATTN_2)

    def same(got, want, form):
        lse = got[1].mT if form else got[1]
        empty = want[1] == -torch.inf
        assert empty.any() and torch.equal(got[0], want[0])
        assert torch.equal(lse, want[1].masked_fill(empty, torch.inf) if form == dialect.FLASH_ATTN_2 else want[1])

    cases = {  # name: (lengths, of q, options)
        "splits": ([8, 0, 16], [2] * 3, {}),
        "tiles": ([16, 0], [33] * 2, {}),
        "both": ([16, 0, 7], [1, 1, 40], {}),
        "invariant": ([16, 0, 7], [1, 1, 40], dict(batch_invariant=True)),
    }
    for name, (lens, q_lens, options) in cases.items():
        for index in (torch.int32, torch.int64) if name == "both" else (torch.int32,):
            lens, rows = torch.tensor(lens, dtype=index), torch.tensor(q_lens, dtype=index)
            q, table = half(len(q_lens), q_lens[0], 2, 16), torch.randperm(24)[: 4 * len(q_lens)].view(-1, 4).int()
            if len(set(q_lens)) > 1:
                cu = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).to(index)
                q, options = half(sum(q_lens), 2, 16), options | dict(cu_seqlens_q=cu, max_seqlen_q=max(q_lens))
            new = {n: half(*q.shape[:-2], 1, 16) for n in "kv"}
            for append in ({}, new) if name in ("splits", "both") else ({},):
                run = lambda lens, **more: (caches := [small.clone(), small.clone()]) and (portattn.attention_paged(
                    q, *caches, table, lens, causal=True, return_lse=True, backend="triton", **append, **options, **more), caches)
                want, filled = run(lens)
                for counting, given in ((dialect.AFTER, lens), (dialect.BEFORE, lens - rows),
                                        (dialect.PREFIX_SUMS, torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(index))):
                    for form in forms if index is torch.int32 and counting == dialect.AFTER and not append else forms[2:]:
                        got, caches = run(given, _counting=counting, _lse=form)
                        same(got, want, form)
                        assert all(map(torch.equal, caches, filled)) and torch.equal(caches[0], small) == (not append)
            lens, options = lens.tolist(), {k: v for k, v in options.items() if k == "batch_invariant"}

    q, k = half(2, 40, 4, 16), half(2, 20, 2, 16)
    cu, cu_k = torch.tensor([0, 40, 80]), torch.tensor([0, 20, 40])
    for form in forms:
        same(portattn.attention(q, k, k, causal=True, return_lse=True, backend="triton", _lse=form),
             portattn.attention(q, k, k, causal=True, return_lse=True, backend="triton"), form)
        ragged = (q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), cu, cu_k, 40, 20)
        options = dict(causal=True, return_lse=True, backend="triton")
        same(portattn.attention_varlen(*ragged, _lse=form, **options), portattn.attention_varlen(*ragged, **options), form)

    with portattn.use("triton"):
        for _ in range(5):
            x, kv = half(2, 9, 3, 2, 16), half(2, 9, 2, 2, 16)
            got = flash_attn.flash_attn_qkvpacked_func(x, causal=True), flash_attn.flash_attn_kvpacked_func(x[:, :, 0], kv)
            assert torch.equal(got[0], portattn.attention(*x.unbind(2), causal=True))
            assert torch.equal(got[1], portattn.attention(x[:, :, 0], *kv.unbind(2)))
        assert _packed._recent.kinds or not recent._Guards


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ.setdefault("PORTATTN_VERIFY", "0")
    {"conformance": lambda: conformance(int(sys.argv[2])), "codes": codes, "elsewhere": elsewhere, "offsets": offsets, "paths": paths,
     "pieces": pieces, "spoken": spoken, "strays": strays}[sys.argv[1]]()

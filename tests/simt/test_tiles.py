"""Each operation of mma.h by itself: CUDA's over emulated ldmatrix and mma.sync, AMD's over emulated MFMA and WMMA."""

from __future__ import annotations

import ctypes

import pytest
import torch

from . import host

pytestmark = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize("order", [host.FORWARD, host.RANDOM])
@pytest.mark.parametrize("wave, gfx", [(32, 0), (64, 9), (32, 11), (32, 12)])
@pytest.mark.parametrize("name, dtype", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_tiles(name, dtype, wave, gfx, order):
    g = torch.Generator().manual_seed(wave)
    a, b = torch.randn(16, 16, generator=g).to(dtype), torch.randn(16, 16, generator=g).to(dtype)
    nan = lambda *s: torch.full(s, float("nan"))
    product, chained, rows, stored, narrow = nan(16, 16), nan(16, 16), nan(2, 16), nan(16, 16), nan(16, 16).to(dtype)
    params = (ctypes.c_void_p * 7)(*(x.data_ptr() for x in (a, b, product, chained, rows, stored, narrow)))
    host.run(host.build("tiles", wave, gfx, t=name), "portattn_simt_tiles", bytes(params), (1, 1), order)
    close = lambda x, y: torch.allclose(x, y, rtol=1e-5, atol=1e-5)
    assert close(product, a.float() @ b.float().T)
    assert close(chained, product.to(dtype).float() @ b.float())
    assert torch.equal(rows[0], product.amax(1)) and close(rows[1], product.sum(1))
    assert torch.equal(stored, product) and torch.equal(narrow, (product * 0.5).to(dtype))


@pytest.mark.parametrize("order", [host.FORWARD, host.RANDOM])
@pytest.mark.parametrize("name, dtype", [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_tiles_of_32_rows(name, dtype, order):
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(32, 32, generator=g).to(dtype), torch.randn(32, 32, generator=g).to(dtype)
    nan = lambda *s: torch.full(s, float("nan"))
    product, chained, rows, stored, narrow = nan(32, 32), nan(32, 32), nan(2, 32), nan(32, 32), nan(32, 32).to(dtype)
    params = (ctypes.c_void_p * 7)(*(x.data_ptr() for x in (a, b, product, chained, rows, stored, narrow)))
    host.run(host.build("large_tiles", 64, 9, t=name), "portattn_simt_large_tiles", bytes(params), (1, 1), order)
    close = lambda x, y: torch.allclose(x, y, rtol=1e-5, atol=1e-5)
    assert close(product, a.float() @ b.float().T)
    assert close(chained, product.to(dtype).float() @ b.float())
    assert torch.equal(rows[0], product.amax(1)) and close(rows[1], product.sum(1))
    assert torch.equal(stored, 2 * product) and torch.equal(narrow, (product * 0.5).to(dtype))

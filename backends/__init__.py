"""Backends of portattn, one folder each. Adding one changes no other file:

1. Make a folder `NAME` with `backend.yaml` (the manifest: what it can do; portattn/manifest.py documents the
   keys) and `__init__.py` (the adapter: the functions below). Out of tree, name the folder's module in the
   entry-point group `portattn.backends` instead: `NAME = "module"`.
2. Write the adapter. It is imported at the first call that may use it, never by `import portattn`:

       def probe(device: torch.device) -> tuple[Reason, ...]: ...
           # () if this backend works on the device; asked once per device, may touch it, may raise
       def attention(call: Call, bound: Bound) -> Tensor | tuple[Tensor, Tensor]: ...
           # dense, varlen and paged: out, or (out, lse) if call.return_lse. The call is validated and
           # normalised (portattn/problem.py); bound.problem is what was chosen by, and bound.state is a
           # dict that lives as long as calls of exactly these shapes, strides, dtypes and options repeat
       def cache_append(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, bound) -> None: ...
           # optional; declared as layout cache_append. Caches are (N, P, Hkv, D) views
       def merge_states(outs, lses, sinks, bound) -> tuple[Tensor, Tensor]: ...
           # optional; declared as layout merge_states. outs (n, ..., Hq, Dv), lses (n, ..., Hq) float32
       def notes(call: Call, bound: Bound) -> tuple[str, ...]: ...
           # optional: what explain() should say of the route taken (padding, copies, kernels)
       def identity() -> str: ...
           # optional: versions that a known-answer verdict depends on, besides torch, device and this folder

3. `portattn conformance --backend NAME` until it is green: what the manifest declares must run and be right,
   what it does not must be declined with exactly that reason.
4. `portattn support-table --write README.md`, and commit the table with the folder.
"""

if __name__ == "backends":
    raise ImportError("import portattn.backends, not backends: this folder is a part of the package portattn")

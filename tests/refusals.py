"""What a bound call refuses before it launches anything, whichever backend bound it."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch

from portattn.errors import ArgumentError
from portattn.problem import Call


def refuses_tokens_over_a_cache(bind: Callable[[Call], Any], call: Call, name: str, forget: Callable[[], None]) -> None:
    """Of a call that appends, `name` (k or v) lies in the cache, or was freed. `forget`: launches until then."""
    new = torch.zeros(3, 1, 2, 64, dtype=torch.bfloat16)
    run, known = bind(call._replace(k_new=new, v_new=new)), {"k_new": new, "v_new": new}
    for _ in range(2):
        run(call._replace(**known))
    forget()
    with pytest.raises(ArgumentError, match=f"attention_paged: {name}: wanted memory of its own"):
        run(call._replace(**known | {f"{name}_new": call.k[1, 2:5, None]}))
    with pytest.raises(ArgumentError, match=f"attention_paged: {name}: wanted a storage"):
        run(call._replace(**known | {f"{name}_new": freed(new)}))


def refuses_what_was_freed(run: Any, directly: Callable[..., Any], call: Call, name: str) -> None:
    """`run` knows the call."""
    gone = freed(getattr(call, name))
    assert directly(run, call, **{name: gone}) is None
    with pytest.raises(ArgumentError, match=f"attention_paged: {name}(_cache)?: wanted a storage"):
        run(call._replace(**{name: gone}))


def freed(x: torch.Tensor) -> torch.Tensor:
    """A tensor like x, without memory."""
    gone = x.clone()
    gone.untyped_storage().resize_(0)
    return gone

"""The package flash_attn (FlashAttention 2) on portattn: its public functions, with its signatures, returns and conventions.

    from portattn.compat.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

or, for a program that imports flash_attn itself, `portattn.compat.install()`.
"""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# The release whose signatures these are. Its first three parts are numbers, as those take for granted who split it at the dots.
__version__ = "2.8.4.post0+portattn"

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache",
]

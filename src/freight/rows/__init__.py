"""Features larger than GPU memory: tables in host memory whose rows GPU kernels read in place.

_tensor, _placement, _index   the unified tensor, where operations on it compute, what an index asks for
_table                        the memory of one table, what it has served, ids outside it
_op, _gather, _put            the operator, the kernel that reads rows, the kernel that writes them
_order                        when ids are ordered by address
_hot, _cache                  rows that also lie in GPU memory: the map of them, and which they are
_files                        .npy and .safetensors, read straight into place
"""

from freight.rows._op import gather_rows
from freight.rows._table import RowStats
from freight.rows._tensor import UnifiedTensor, unified

__all__ = ["RowStats", "UnifiedTensor", "gather_rows", "unified"]

"""The short name of a GPU model, by which records, shipped defaults and caches are filed."""

import re

_VENDOR = {"nvidia", "geforce", "tesla", "quadro", "graphics", "gpu", "generation", "with", "max", "q", "design"}
_BUILD = re.compile(
    r"\d+(gb|mb)|hbm\d*e?|sxm\d*|pcie|nvl|nvgpu|integrated"
)  # memory and form factor: one model, one name


def slug(name: str | None) -> str:
    """The GPU model in `name`, as lower-case letters and digits; None, for no GPU, is `"cpu"`.

    >>> slug("NVIDIA H200"), slug("NVIDIA A100-SXM4-80GB"), slug("NVIDIA GeForce RTX 4090"), slug(None)
    ('h200', 'a100', 'rtx4090', 'cpu')
    """
    if name is None:
        return "cpu"
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _VENDOR and not _BUILD.fullmatch(word)) or "gpu"

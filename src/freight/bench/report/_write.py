"""Writing a text file whole or not at all."""

import os
import tempfile
from pathlib import Path

from freight.errors import DiskError


def write(path: Path, text: str) -> None:
    """Put `text` into `path`; what was there stays until the new file is complete. Line ends are kept as given."""
    target = path.resolve()  # a link stays one: what it points to is replaced
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        with tempfile.NamedTemporaryFile("wb", dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            temporary = file.name
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DiskError(error.errno, f"file could not be written ({error.strerror})", str(path)) from None
        raise

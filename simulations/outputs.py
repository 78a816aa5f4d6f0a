"""Whether results can be written, asked before hours of training and not after."""

import tempfile
from pathlib import Path
from typing import Final

from fl_strategies.errors import InvalidParameter

OUTPUT_HINT: Final = "Name another one: --set output-dir=FOLDER"


def require_folder(owner: str, parameter: str, folder: Path, hint: str = OUTPUT_HINT) -> None:
    """Make a folder and raise `InvalidParameter`, saying what to do, if it takes no file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidParameter(
            f"{owner}: {parameter} must be writable, got {str(folder)!r} "
            f"({error.strerror}). {hint}."
        ) from error


def require_files(owner: str, **paths: Path | None) -> None:
    """Raise unless each file, named by the option that gives it, can be written."""
    for name, path in paths.items():
        if path is None:
            continue
        if path.is_dir():
            raise InvalidParameter(
                f"{owner}: --{name} must be a file, got the folder {str(path)!r}."
            )
        hint = f"Name another file: --{name} OUT"
        require_folder(owner, f"the folder of --{name}", path.parent, hint)

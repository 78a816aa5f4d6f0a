"""Results as standard JSON, which has no word for infinity.

A number that is not finite becomes null. Where it was infinite, such as an epsilon that
promises nothing, a flag beside it says so: ``"epsilon-party": null`` and
``"epsilon-party-unbounded": true``.
"""

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fl_strategies._util import SHARED, replace_file
from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.wire.keys import UNBOUNDED


def finite(content: Any) -> Any:
    """Return None for what is no finite number, and everything else as it is."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    return [*map(finite, content)] if isinstance(content, list | tuple) else content


def flagged(content: Any) -> Any:
    """Return content with a flag beside every infinite number, which becomes None.

    Examples
    --------
    >>> flagged({"epsilon": math.inf, "accuracy": math.nan, "seed": 0})
    {'epsilon': None, 'epsilon-unbounded': True, 'accuracy': None, 'seed': 0}
    """
    if isinstance(content, Mapping):
        told: dict[str, Any] = {}
        for key, value in content.items():
            told[key] = flagged(value)
            if isinstance(value, float) and math.isinf(value):
                told[f"{key}{UNBOUNDED}"] = True
        return told
    return [*map(flagged, content)] if isinstance(content, list | tuple) else finite(content)


def unflagged(content: Any) -> Any:
    """Undo `flagged`; what was not a number stays None."""
    if isinstance(content, Mapping):
        told = {key: unflagged(v) for key, v in content.items() if not _is_flag(key, content)}
        return {
            key: math.inf
            if content.get(f"{key}{UNBOUNDED}") is True and value is None
            else value
            for key, value in told.items()
        }
    return [*map(unflagged, content)] if isinstance(content, list) else content


def _is_flag(key: str, content: Mapping[str, Any]) -> bool:
    return key.endswith(UNBOUNDED) and key.removesuffix(UNBOUNDED) in content


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write results for programs, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(flagged(content), indent=2, allow_nan=False)
    replace_file(path, f"{text}\n".encode(), SHARED)


def read_json(owner: str, path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote, infinities included."""
    try:
        content = unflagged(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{path} must be a result of a run, got: {error}."
        raise InvalidData(f"{owner}: {reason}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise InvalidData(f"{owner}: {path} must be an object of JSON, got {kind}.")
    return content


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

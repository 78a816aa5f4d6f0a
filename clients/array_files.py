"""Arrays in a file that needs no trust: an ``.npz`` archive of plain numbers.

`numpy.load` reads what `write_arrays` writes. `read_arrays` takes less than numpy does: no
objects, nothing compressed and nothing that claims to be larger than the file is, so that
memory follows the bytes on the disk.
"""

import io
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from fl_strategies.arrays import Array
from fl_strategies.exceptions import InvalidData, require_data
from fl_strategies.runtime.atomic_files import SHARED, replace_file

SUFFIX: Final = ".npy"
NUMBERS: Final = "biuf"
FIRST_FORMAT: Final = (1, 0)
MOST_ARRAYS: Final = 100_000


def write_arrays(arrays: Mapping[str, Array], path: Path) -> None:
    """Write named arrays; equal arrays give equal bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            plain = np.asarray(array, order="C")
            np.lib.format.write_array(content, plain, allow_pickle=False)
            # A member without a date, which would make every file another one.
            archive.writestr(zipfile.ZipInfo(f"{name}{SUFFIX}"), content.getvalue())
    replace_file(path, file.getvalue(), SHARED)


def read_arrays(owner: str, path: Path) -> dict[str, Array]:
    """Read named arrays of numbers; raise `InvalidData`, with the reason, for anything else."""
    try:
        size = path.stat().st_size
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_members(owner, members, size)
            return {
                member.filename.removesuffix(SUFFIX): _array(owner, archive.read(member))
                for member in members
            }
    except InvalidData:
        raise
    except Exception as error:  # a hostile archive may fail in any way
        kind = type(error).__name__
        raise InvalidData(
            f"{owner}: {path} must be an archive of arrays, got {kind}."
        ) from error


def _check_members(owner: str, members: list[zipfile.ZipInfo], size: int) -> None:
    names = {member.filename for member in members}
    few = len(names) == len(members) <= MOST_ARRAYS
    rule = f"at most {MOST_ARRAYS} different arrays"
    require_data(few, owner, "the archive", rule, f"{len(members)} of {len(names)} names")
    plain = all(
        member.compress_type == zipfile.ZIP_STORED and member.filename.endswith(SUFFIX)
        for member in members
    )
    require_data(plain, owner, "the archive", f"{SUFFIX} files, not compressed", "others")
    claimed = sum(member.file_size for member in members)
    require_data(claimed <= size, owner, "the archive", f"at most {size} bytes", claimed)


def _array(owner: str, content: bytes) -> Array:
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    require_data(version == FIRST_FORMAT, owner, "an array", "of format 1.0", version)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    require_data(dtype.kind in NUMBERS, owner, "an array", "of numbers", dtype)
    claimed, there = math.prod(shape) * dtype.itemsize, len(content) - file.tell()
    require_data(claimed == there, owner, "an array", f"of {there} bytes", claimed)
    return np.asarray(np.lib.format.read_array(io.BytesIO(content), allow_pickle=False))

"""The notebooks of examples/: ``python -m tests.notebooks`` runs them and keeps the outputs."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
MOST_SECONDS_A_CELL = 600


def executed(path: Path) -> Any:
    """Return a notebook after all its cells, which ran in an empty folder.

    What belongs to the machine or to the moment is left out, so that equal outputs are equal
    files.
    """
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        # Sockets in the folder: no port that others could connect to.
        sockets = {"transport": "ipc", "ip": f"{folder}/.kernel"}
        client = NotebookClient(
            notebook,
            config=Config(KernelManager=sockets),
            coalesce_streams=True,
            timeout=MOST_SECONDS_A_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
        )
        client.execute()
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return notebook


def main(names: list[str]) -> None:
    """Run all notebooks, or those that are named, one after another."""
    import nbformat

    # The kernel is another process, which must find this checkout from the empty folder.
    os.environ["PYTHONPATH"] = str(ROOT)
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            nbformat.write(executed(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])

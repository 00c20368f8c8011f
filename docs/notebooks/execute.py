"""Run a notebook from top to bottom and write its outputs into it; of one_grpo_step also a picture, one_grpo_step.png.

    python docs/notebooks/execute.py                   # one_grpo_step: about ten seconds on one CPU core
    python docs/notebooks/execute.py gsm8k_smollm2     # ten minutes, with a real model

It needs the extra notebook. The kernel is the Python that runs this file. Metadata that an editor
stores beside the cells are left out, so that git shows only changes of content.
"""

import base64
import os
import sys
from pathlib import Path

import nbformat
import zmq
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

NOTEBOOK = Path(__file__).resolve().parent / "one_grpo_step.ipynb"
PICTURE = NOTEBOOK.with_suffix(".png")
IS_PICTURED = "Tokens colored by push on the log-prob"  # how the words for the picture begin


def execute(notebook: nbformat.NotebookNode, directory: Path) -> nbformat.NotebookNode:
    """Give the notebook the outputs that it has when it is started in `directory`, and return it.

    Raises:
        CellExecutionError: a cell fails.
    """
    # Without directories of kernels it is ipykernel's own: this Python, whatever else is registered as python3.
    manager = AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        transport_encryption="auto" if zmq.has("curve") else "disabled",
    )
    resources = {"metadata": {"path": str(directory)}}
    settings = {"timeout": 3600, "record_timing": False, "coalesce_streams": True}
    client = NotebookClient(notebook, km=manager, resources=resources, **settings)
    client.execute(cleanup_kc=True)  # also ends the kernel
    return without_traces(notebook)


def without_traces(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without the metadata that an editor or a kernel of another version would write into it."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = nbformat.from_dict({"kernelspec": kernel, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    return notebook


def picture(notebook: nbformat.NotebookNode) -> bytes:
    """The PNG that is also shown elsewhere."""
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    (png,) = (data["image/png"] for data in outputs if data.get("text/plain", "").startswith(IS_PICTURED))
    return base64.b64decode(png)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    path = NOTEBOOK.with_stem(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    try:
        executed = execute(nbformat.read(path, as_version=4), path.parent)
    except CellExecutionError as error:
        sys.exit(f"error: {path.name}: a cell fails, and nothing was written\n{error}")
    nbformat.write(executed, path)
    if path == NOTEBOOK:
        PICTURE.write_bytes(picture(executed))

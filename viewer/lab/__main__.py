"""Write the laboratory: one page in which the bundled policy learns in the reader's browser.

python -m viewer.lab lab.html          # a file that needs no network; open it with a browser
"""

import sys
from pathlib import Path

from viewer.lab.build import write_lab
from viewer.runs import RunError

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m viewer.lab OUT.html")
    try:
        path = write_lab(Path(sys.argv[1]))
    except (RunError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")

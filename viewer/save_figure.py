"""How figures are saved."""

from pathlib import Path


def save_figure(figure, path: Path, dpi: int = 110) -> None:
    """Save a matplotlib figure and close it. A PNG has at most 256 colours, which halves its size."""
    import matplotlib.pyplot as plt
    from PIL import Image

    figure.savefig(path, dpi=dpi)
    plt.close(figure)
    if path.suffix == ".png":
        with Image.open(path) as image:
            reduced = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)

"""Takes the pictures of results/index.html that the documentation shows: docs/pictures/*.png.

    python scripts/screenshots.py [--results results] [--at disk-table_6] [--to docs/pictures]

Needs Chromium (on Debian and Ubuntu: apt-get install chromium) and Pillow, which torchvision brings along. Prints, for
each width, whether anything on the page sticks out of it, and fails if so.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

WIDTHS = {"wide": (1280, 1500), "narrow": (390, 1500)}
SCHEMES = {"light": 1, "dark": 0}  # as Chromium numbers them
COLOURS = 128
MOST_BYTES = 300_000
NAMES = ("chromium", "chromium-browser", "google-chrome")

# A window of Chromium is at least 500 pixels wide; a frame may be as narrow as a phone.
FRAME = """<!DOCTYPE html><style>* {{ margin: 0; border: 0 }} iframe {{ display: block }}</style>
<iframe id="page" src="{address}" width="{width}" height="{height}"></iframe>
<script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const root = frame.contentDocument.documentElement;
  if ({unfold}) for (const folded of root.querySelectorAll("details")) folded.open = true;
  frame.dataset.needs = root.scrollWidth;
}};
</script>"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="FOLDER", help="holds index.html")
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"), metavar="FOLDER", help="gets the pictures")
    parser.add_argument("--at", metavar="ANCHOR", help="a second view, such as disk-table_6 or methods")
    chosen = parser.parse_args(arguments)
    page = (chosen.results / "index.html").resolve()
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None or not page.is_file():
        print(f"needs {page}" if chromium else f"needs one of the programs {', '.join(NAMES)}", file=sys.stderr)
        return 2
    chosen.to.mkdir(parents=True, exist_ok=True)
    fits = [_fits(chromium, page, width) for width, _ in WIDTHS.values()]
    for name, size in WIDTHS.items():
        for scheme in SCHEMES:
            for view in ("", chosen.at) if chosen.at else ("",):
                path = chosen.to / f"{view or 'scorecard'}-{name}-{scheme}.png"
                _picture(chromium, f"{page.as_uri()}#{view}" if view else page.as_uri(), size, scheme, path)
                print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0 if all(fits) else 1


def _run(chromium: str, address: str, size: tuple[int, int], unfold: bool, *options: str) -> str:
    """Show a page in a frame of a size, and return the document as it then is."""
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder) / "frame.html"
        width, height = size
        outer.write_text(FRAME.format(address=address, width=width, height=height, unfold=str(unfold).lower()))
        done = subprocess.run(
            [
                chromium,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--allow-file-access-from-files",
                "--virtual-time-budget=10000",
                f"--user-data-dir={folder}/profile",
                f"--window-size={max(width, 500)},{height}",
                *options,
                outer.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stdout


def _fits(chromium: str, page: Path, width: int) -> bool:
    """Whether nothing sticks out to the right, with all that is folded open."""
    document = _run(chromium, page.as_uri(), (width, 1000), True, "--dump-dom")
    found = re.search(r'data-needs="(\d+)"', document)
    needs = int(found[1]) if found else None
    print(f"{width} pixels: the page needs {needs}")
    return needs is not None and needs <= width


def _picture(chromium: str, address: str, size: tuple[int, int], scheme: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.png"
        colours = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
        _run(chromium, address, size, False, f"--screenshot={whole}", colours)
        with Image.open(whole) as image:
            image.convert("RGB").crop((0, 0, *size)).quantize(COLOURS).save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        path.unlink()
        raise SystemExit(f"{path} would be larger than {MOST_BYTES // 1000} kB")


if __name__ == "__main__":
    sys.exit(main())

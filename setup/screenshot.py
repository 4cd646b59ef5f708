"""``python setup/screenshot.py URL PNG``: a picture of a frontend's status page, for the docs.

Needs Chromium and ``pip install playwright``. The frontend should have workers and have answered
requests for some minutes, else there is nothing to see. Without an admin key it must be on this
host.
"""

import argparse
import importlib
import shutil
import sys
from pathlib import Path
from typing import Any, Final

LARGEST: Final = 200_000
"""Bytes of a picture that may be committed."""

WAIT_MS: Final = 30_000


def take(page: Any, url: str, key: str, png: Path) -> None:
    """Open the page, show the key if there is one, open the first decision, and take the picture.

    Args:
        page: of playwright.
    """
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{url}/status")
    if key:
        page.fill("#key", key)
        page.keyboard.press("Enter")
    page.wait_for_selector("#workers td")
    page.wait_for_selector("#plots polyline")
    page.click("#decisions summary >> nth=0")
    page.wait_for_selector("#decisions tr.chosen .bar")
    page.screenshot(path=str(png))


def main() -> None:
    """Read the command line, and end with a sentence if there is no picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the frontend")
    parser.add_argument("png", type=Path)
    parser.add_argument("--admin-key-file", type=Path)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    key = args.admin_key_file.read_text().split()[0] if args.admin_key_file else ""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        playwright = importlib.import_module("playwright.sync_api")
    except ImportError:
        sys.exit("needs a browser's driver: pip install playwright")
    if chromium is None:
        sys.exit("needs a browser: install Chromium")
    args.png.parent.mkdir(parents=True, exist_ok=True)
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": 1180, "height": 900},
            color_scheme="dark" if args.dark else "light",
        )
        take(page, args.url, key, args.png)
        browser.close()
    if args.png.stat().st_size > LARGEST:
        sys.exit(f"{args.png} has more than {LARGEST} bytes")


if __name__ == "__main__":
    main()

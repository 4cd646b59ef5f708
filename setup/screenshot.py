"""``python setup/screenshot.py URL PNG``: a picture of a frontend's status page, for the docs.

Needs Chromium. The frontend should have workers and have answered requests for some minutes, else
there is nothing to see. Without an admin key it must be on this host.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Final

from playwright.sync_api import Page, sync_playwright

LARGEST: Final = 200_000
"""Bytes of a picture that may be committed."""

WAIT_MS: Final = 240_000


def take(page: Page, url: str, key: str, png: Path) -> None:
    """Open the page with the key if there is one, and take the picture."""
    page.set_default_timeout(WAIT_MS)
    if key:  # where the page keeps it
        page.add_init_script(f"sessionStorage.setItem('mmrouter-admin-key', {json.dumps(key)})")
    with page.expect_response("**/mmrouter/workers") as told:
        page.goto(f"{url}/status")
    if not told.value.ok:
        sys.exit(f"{url} answers {told.value.status}: give a key of its --admin-key-file")
    page.wait_for_selector("#workers td")
    page.wait_for_selector("#plots polyline[points*=',']")
    page.wait_for_selector("#decisions .bar")
    page.screenshot(path=str(png))


def first_key(file: Path | None) -> str:
    """Of a file with one a line, as a frontend reads it; empty without a file."""
    lines = [line.strip() for line in file.read_text().splitlines()] if file else []
    return next((line for line in lines if line and not line.startswith("#")), "")


def main() -> None:
    """Read the command line, and end with a sentence if there is no picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the frontend")
    parser.add_argument("png", type=Path)
    parser.add_argument("--admin-key-file", type=Path)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    key = first_key(args.admin_key_file)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("needs a browser: install Chromium")
    args.png.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": 1180, "height": 1150},
            color_scheme="dark" if args.dark else "light",
        )
        take(page, args.url.rstrip("/"), key, args.png)
        browser.close()
    if args.png.stat().st_size > LARGEST:
        sys.exit(f"{args.png} has more than {LARGEST} bytes")


if __name__ == "__main__":
    main()

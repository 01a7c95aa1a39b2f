"""Take the screenshot of the web page of `i2cl serve` for the documentation, with its example fitted.

    python scripts/serve_screenshot.py docs/_static/serve.png

Needs the extra ``serve``, playwright, and Chromium; Pillow makes the file small.
"""

import os
import re
import shutil
import signal
import sys
import time
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from processes import COMMAND, Program

MAX_BYTES = 150_000


def main() -> None:
    """Start a server, fit and query its example, and save a screenshot."""
    from PIL import Image
    from playwright.sync_api import expect, sync_playwright

    with TemporaryDirectory() as folder, sync_playwright() as play:
        program = Program(COMMAND, "serve", "reference", "--tasks", folder, "--port", 0)
        while not (address := re.search(r"http://\S+", program.output()[0])):
            assert program.process.is_alive(), program.output()
            time.sleep(0.1)
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 600})
        page.goto(address[0])
        page.click("#example")
        expect(page.locator("#label-column")).to_have_value("label")
        page.click("#begin")
        page.wait_for_selector("#evaluation table", timeout=120_000)
        page.click("#ask .main")
        page.wait_for_selector("#answers table")
        shot = Image.open(BytesIO(page.screenshot(full_page=True)))
        browser.close()
        os.kill(program.process.pid, signal.SIGTERM)
        program.wait()
    out = Path(sys.argv[1])
    shot.convert("P", palette=Image.Palette.ADAPTIVE).save(out, optimize=True)
    assert out.stat().st_size <= MAX_BYTES, out.stat().st_size


if __name__ == "__main__":
    main()

"""Take the screenshots of the README from a report: its head and its roofline, light and dark.

``cpuopt profile --html report.html``, then ``python docs/screenshot.py report.html`` with ``.[browser]`` and Chromium.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
LEFT_OUT = "#matrix, #arena, #steps, #ops, #layers, #theme, nav { display: none; } main { padding-bottom: 12px; }"


def main(report: str) -> None:
    """Write ``report-light.png`` and ``report-dark.png`` beside this file."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            # the page's policy allows no other style
            tab = browser.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 800}, bypass_csp=True)
            page = tab.new_page()
            page.goto(Path(report).resolve().as_uri())
            page.add_style_tag(content=LEFT_OUT)
            page.locator("main").screenshot(path=HERE / f"report-{scheme}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])

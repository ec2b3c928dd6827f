"""The parts that tests of the page in a browser share."""

from __future__ import annotations

import pathlib
import unittest

import assemble
import chromium
import page_server

_HERE = pathlib.Path(__file__).parent
DESKTOP = (1440, 900)
PHONE = (360, 740)
# A test says itself when the page asks for a report, and a machine under load may take its time.
NO_POLLS = """
AbortSignal.timeout = () => new AbortController().signal;
const wait = setTimeout;
window.setTimeout = (call, ms) => (call === window.poll ? 0 : wait(call, ms));
"""

# Returns texts whose colour has a contrast below 4.5 with the ground behind (WCAG 2, AA).
FAINT_TEXTS = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const groundOf = (node) => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(node).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.closest("script, option, svg")) continue;
    const colour = parse(getComputedStyle(node).color).slice(0, 3);
    const [a, b] = [colour, groundOf(node)].map(light).sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) faint.push(`${node.textContent.slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return faint;
})()"""


@unittest.skipUnless(chromium.find_chromium(), "no Chromium is installed: deploy/setup --browser")
class PageCase(unittest.TestCase):
    """A test of the page in a browser, on a server of its own."""

    @classmethod
    def setUpClass(cls):
        cls.server = page_server.PageServer(assemble.assemble(_HERE / "page.html"))
        cls.addClassCleanup(cls.server.close)
        cls.browser = chromium.Chromium(chromium.find_chromium())
        cls.addClassCleanup(cls.browser.close)
        cls.pause = cls.browser.run_before_pages(NO_POLLS)

    def show(self, make_report, size=DESKTOP, scheme="light", polls=1, address=""):
        """Opens the page, and has it ask for this many reports, and for no more by itself."""
        self.size = size
        self.server.begin(make_report)
        self.browser.resize(*size, is_phone=size == PHONE)
        self.browser.prefer(scheme)
        self.browser.open(self.server.url + address)
        self.browser.wait_until("daemon.report !== null")
        self.poll(polls - 1)

    def poll(self, count):
        for _ in range(count):
            self.browser.run("poll()")

    def text(self, selector="body"):
        return self.browser.run(f"document.querySelector({selector!r}).innerText")

    def texts(self, selector):
        return self.browser.run(
            f"[...document.querySelectorAll({selector!r})].map((node) => node.innerText)"
        )

    def select(self, name):
        self.browser.run(
            "[...document.querySelectorAll('.pick')]"
            f".find((button) => button.textContent === {name!r}).click()"
        )

    def choose(self, select, value):
        self.browser.run(
            f"document.getElementById({select!r}).value = {value!r};"
            f"document.getElementById({select!r}).dispatchEvent(new Event('change'));"
        )

    def assert_quiet(self):
        """Checks that nothing was logged, thrown or denied by the Content-Security-Policy."""
        self.browser.run("0")  # takes what is still on its way
        self.assertEqual(self.browser.complaints, [])

    def assert_fits(self):
        """Checks that the page is no wider than the screen."""
        # A phone's innerWidth grows with a page that is too wide.
        width = self.browser.run("Math.max(document.documentElement.scrollWidth, innerWidth)")
        self.assertLessEqual(width, self.size[0])

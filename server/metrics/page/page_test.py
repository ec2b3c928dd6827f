"""Tests the page: its sources, and what it shows in a headless Chromium.

Usage: page_test.py [--screenshot FILE.png | --require-browser] [unittest's options]. Run from the
repository's root, or by Bazel. Without a Chromium the tests in it are skipped; with
--require-browser nothing is run then, and the exit status is 3. --screenshot makes the README's
picture instead.
"""

from __future__ import annotations

import pathlib
import sys

import canned_nodes as canned
import case_results
import chromium
import page_case

# unittest finds them here.
from sources_test import BrowserTest, FieldsTest, SourceTest  # noqa: F401

# deploy/nightly's status of a stage that cannot run on this machine.
_CANNOT_RUN = 3


class PageTest(page_case.PageCase):
    """The page shows what reports say, and asks for them."""

    def test_jobs_are_shown_the_most_urgent_first(self):
        self.show(canned.busy_node)
        names = self.texts(".pick")
        self.assertEqual(
            names[:4], ["whisper-ft", "bert-probe", "t5-ablation-3", "qwen-32b-resume"]
        )
        self.assertEqual(sorted(names), sorted(one["name"] for one in canned.busy_node(1)["jobs"]))
        rows = self.texts("#jobs tbody tr")
        for part in ("failed", "0/4", "10400", "1011", "22.0 GiB", "291", "8.0G", "adamw"):
            self.assertIn(part, rows[0])
        self.assertIn("train-17.example", self.text("header"))
        self.assertIn("1.2 TiB locked", self.text("header"))
        self.assertIn("412.0 GiB left", self.text("header"))
        self.assert_quiet()

    def test_why_a_job_failed_is_shown_in_its_row_and_beside_its_facts(self):
        self.show(canned.busy_node)
        reason = next(one["reason"] for one in canned.busy_node(1)["jobs"] if one["reason"])
        self.assertIn(
            reason[:60], self.browser.run("document.querySelector('.note.bad').textContent")
        )
        self.assertEqual(self.text("#job-title"), "whisper-ft")
        self.assertEqual(self.text("#job-reason"), reason)
        self.assertIn("no answer within 2 s", self.texts("#jobs tbody tr")[1])
        self.assertIn("(1 failed)", self.browser.run("document.title"))

    def test_a_selected_job_shows_ranks_times_disks_and_durability(self):
        self.show(canned.busy_node, polls=12)
        self.select("llama-70b-pretrain")
        self.assertEqual(len(self.texts("#ranks tbody tr")), 16)
        self.assertIn("grpc", self.texts("#ranks tbody tr")[8])
        step = int(canned.busy_node(12)["jobs"][0]["committed_step"])
        self.assertIn(f"{step // 10 * 10} ({step % 10} behind)", self.text("#job-facts"))
        self.assertIn("every 10 steps", self.text("#job-facts"))
        self.assertEqual([one.split()[0] for one in self.texts("#histograms tbody tr")],
                         ["staging", "waiting", "decide", "update", "publish", "disk"])  # fmt: skip
        self.assertIn("≤ 3 s", self.texts("#histograms tbody tr")[3])
        disks = self.texts("#disk tbody tr")
        self.assertIn("/mnt/nvme0/optstate", disks[0])
        self.assertRegex(disks[0], r"\d GiB/s")
        self.assertFalse(self.browser.run("document.querySelector('#phases-panel').hidden"))
        areas = self.browser.run(
            "[...document.querySelectorAll('#phases-plot .area')]"
            ".map((area) => area.getAttribute('d').length)"
        )
        self.assertTrue(all(length > 40 for length in areas), areas)
        self.select("mistral-7b-sft")
        self.assertIn("30%", self.text("#devices-note"))
        self.assertEqual(len(self.texts("#devices tbody tr")), 2)
        self.assertTrue(self.browser.run("document.querySelector('#disk-panel').hidden"))
        self.select("vit-22b")
        self.assertIn("7 of 8 attached; not: 5", self.text("#ranks-note"))
        self.assert_quiet()

    def test_the_rate_is_that_of_the_commits(self):
        def steps_each(period_s):
            def make(tick):
                step = int(tick / period_s)
                at = canned.timestamp(step * period_s)
                return canned.node_report(tick, [canned.job("a", 1000 + step, 1, at=at)])

            return make  # fmt: skip

        for period_s, expected in ((0.25, "4.00"), (3, "0.333")):
            with self.subTest(period_s=period_s):
                self.show(steps_each(period_s), polls=20)
                self.assertEqual(
                    self.browser.run("document.querySelector('#jobs td.spark').innerText"), expected
                )

    def test_a_job_that_stands_still_is_said_to_be_idle(self):
        def make(tick):
            step = min(tick, 4)
            return canned.node_report(tick, [canned.job("a", step, 1, at=canned.timestamp(step))])

        self.show(make, polls=4)
        self.assertEqual(self.text("#jobs td.spark"), "1.00")
        self.poll(10)
        self.assertRegex(self.text("#jobs td.spark"), "^idle 10 s$")
        self.assertEqual(self.browser.run("histories.get('a').last.rate"), 0)

    def test_a_job_that_is_made_anew_begins_a_new_past(self):
        def make(tick):
            jobs = [canned.job("a", 10 + tick, 1, created_at=canned.timestamp(tick // 5))]
            return canned.node_report(tick, jobs)

        self.show(make, polls=4)
        self.assertEqual(self.browser.run("histories.get('a').samples.length"), 4)
        self.poll(2)
        self.assertEqual(self.browser.run("histories.get('a').samples.length"), 2)

    def test_history_ends_after_five_minutes_and_jobs_that_are_gone_are_forgotten(self):
        def make(tick):
            jobs = [canned.job("a", tick, 1)] + ([canned.job("b", tick, 1)] if tick < 5 else [])
            return canned.node_report(tick * 60, jobs)

        self.show(make, polls=10)
        self.assertEqual(self.browser.run("[...histories.keys()].join()"), "a")
        self.assertEqual(self.browser.run("histories.get('a').samples.length"), 6)

    def test_texts_of_strangers_are_not_parsed(self):
        self.show(canned.hostile_node, polls=3)
        self.assertEqual(
            self.browser.run("document.querySelectorAll('body img, body script').length"), 1
        )
        self.assertIsNone(self.browser.run("window.ran"))
        places = (
            "pick job-title job-reason job-open host notices ranks disk devices histograms tiers"
        )
        for place in [*places.split(), "devices-none", "events"]:
            selector = ".pick" if place == "pick" else f"#{place}"
            shown = self.browser.run(f"document.querySelector('{selector}').textContent")
            self.assertIn(canned.HOSTILE, shown, place)
        # A choice of events by such a name works too.
        self.choose("event-job", canned.HOSTILE)
        self.assertEqual(len(self.texts("#events li")), 1)
        self.assertEqual(
            [one for one in self.server.requests if one not in ("GET /", "GET /status.json")], []
        )
        self.assert_quiet()

    def test_a_report_of_wrong_types_is_shown_as_far_as_it_goes(self):
        wrong = {
            "at": canned.timestamp(1),
            "status": [],
            "jobs": [{"name": 5, "sessions": {}, "disk": [], "step_phases": [{}]}, None, "x"],
            "tiers": {"memory": {"jobs": 3}},
            "events": [{"at": "never", "sequence": {}}],
        }
        self.show(lambda tick: wrong)
        self.assertIn("live", self.text("#connection"))
        self.assertEqual(len(self.texts(".pick")), 1)

    def test_a_daemon_that_stops_answering_is_said_and_one_that_is_back(self):
        self.show(canned.busy_node, polls=2)
        answered = self.browser.run("formatClock(daemon.answeredAt)")
        for failure, said in (
            ((503, "the daemon is starting"), "HTTP 503 the daemon is starting"),
            ((0, ""), "no connection"),
            ((200, "<html>"), "is not valid JSON"),
            ((200, "{}"), "the answer is no report of a node"),
        ):
            with self.subTest(failure=failure):
                self.server.failure = failure
                self.poll(1)
                banner = self.text("#banner")
                self.assertIn("The daemon has not answered since " + answered, banner)
                self.assertIn(said, banner)
                self.assertIn("What is shown is of 09:2", banner)
                self.assertIn("no answer for", self.text("#connection"))
        self.assertEqual(self.browser.run("nextPollMs()"), 8000)
        # The last report stays on the page.
        self.assertIn("whisper-ft", self.texts(".pick"))
        self.server.failure = None
        self.poll(1)
        self.assertFalse(self.browser.run("document.querySelector('#banner').checkVisibility()"))
        self.assertIn("live", self.text("#connection"))
        self.assertEqual(self.browser.run("nextPollMs()"), 1000)

    def test_a_report_that_stays_the_same_is_said(self):
        self.show(lambda tick: canned.busy_node(1))
        self.poll(9)
        self.assertEqual(self.text("#banner"), "")
        self.poll(1)
        self.assertIn("its report has not changed since 09:20:01", self.text("#banner"))

    def test_the_page_asks_by_itself(self):
        self.browser.stop_running_before_pages(self.pause)
        try:
            self.show(canned.busy_node)
            self.server.await_requests(3)
        finally:
            type(self).pause = self.browser.run_before_pages(page_case.NO_POLLS)
        self.assertEqual(self.browser.run("[POLL_MS, HIDDEN_POLL_MS].join()"), "1000,10000")
        self.assertEqual(set(self.server.requests), {"GET /", "GET /status.json"})

    def test_a_hidden_page_asks_seldom(self):
        self.show(canned.busy_node)
        self.browser.run(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true})"
        )
        self.assertEqual(self.browser.run("nextPollMs()"), 10000)

    def test_what_has_to_be_noticed_stands_above(self):
        lock = {
            "locked_bytes": "1",
            "pending_bytes": "0",
            "unlocked_bytes": "3145728",
            "reason": "RLIMIT_MEMLOCK",
        }
        upgrade = {"id": "1", "done": True, "engines_replaced": 1, "problems": ["engine b stays"]}
        self.show(
            lambda tick: canned.node_report(
                tick, [], draining=True, memory_lock=lock, upgrade=upgrade
            )
        )
        notices = self.text("#notices")
        for part in (
            "DRAINING",
            "3.0 MiB of the state may go to swap: RLIMIT_MEMLOCK",
            "engine b stays",
        ):
            self.assertIn(part, notices)

    def test_an_empty_node_is_said_to_be_empty(self):
        self.show(lambda tick: canned.node_report(tick, []))
        self.assertIn("No job is on this node", self.text("#jobs-empty"))
        self.assertTrue(self.browser.run("document.querySelector('#job').hidden"))
        self.assertIn("Nothing has happened", self.text("#events-empty"))
        self.assert_fits()
        self.assert_quiet()

    def test_a_report_without_messages_is_no_error(self):
        self.show(lambda tick: {"at": canned.timestamp(tick), "jobs": [{"name": "a"}]}, polls=2)
        self.assertEqual(self.texts(".pick"), ["a"])
        self.assert_quiet()

    def test_256_jobs(self):
        self.show(canned.crowded_node, polls=3)
        self.assertEqual(len(self.texts(".pick")), 256)
        self.assertEqual(self.text(".pick"), "sweep-200")
        self.assertEqual(self.text("#job-counts"), "1 failed, 255 ready")
        self.assertEqual(
            len(self.browser.run("[...document.querySelectorAll('#events li')].map(() => 1)")), 200
        )
        self.browser.run(
            "(() => { const find = document.querySelector('#job-filter'); find.value = 'P-01';"
            "find.dispatchEvent(new Event('input')); })()"
        )
        self.assertEqual(len(self.texts(".pick")), 10)
        self.assert_fits()
        self.assert_quiet()

    def test_more_jobs_than_a_report_has_are_counted(self):
        self.show(lambda tick: canned.node_report(tick, [canned.job("a")], job_count=300))
        self.assertIn("299 more not shown", self.text("#job-counts"))

    def test_events_are_filtered_by_job_and_severity(self):
        self.show(canned.busy_node)
        self.assertEqual(len(self.texts("#events li")), 8)
        self.assertIn("rank_attached", self.texts("#events li")[0])
        self.browser.run("document.querySelector('#event-severe').click()")
        self.assertEqual(len(self.texts("#events li")), 4)
        self.choose("event-job", "llama-70b-pretrain")
        self.assertEqual(len(self.texts("#events li")), 1)
        self.choose("event-job", "the selected job")
        self.assertIn("job_failed", self.texts("#events li")[0])
        self.select("rl-policy-a")
        self.assertIn("No event matches", self.text("#events-empty"))

    def test_the_keyboard_selects(self):
        self.show(canned.busy_node)
        self.browser.run("document.querySelector('.pick').focus()")
        for key in ("ArrowDown", "ArrowDown", "Enter"):
            self.browser.press(key)
        self.assertEqual(self.text("#job-title"), "t5-ablation-3")
        self.assertEqual(
            self.browser.run("document.querySelector('.pick[aria-pressed=true]').textContent"),
            "t5-ablation-3",
        )
        # A new report takes neither the focus nor the selection.
        self.poll(1)
        self.assertEqual(self.browser.run("document.activeElement.textContent"), "t5-ablation-3")
        self.assertEqual(self.text("#job-title"), "t5-ablation-3")
        self.assertEqual(self.browser.run("location.hash"), "#job=t5-ablation-3")

        # Nor when its row goes to another place.
        def with_failure(tick):
            report = canned.busy_node(tick)
            report["jobs"][6]["phase"] = "JOB_PHASE_FAILED"
            return report

        self.server.make_report = with_failure
        self.poll(1)
        self.assertEqual(self.texts(".pick")[0], "t5-ablation-3")
        self.assertEqual(self.browser.run("document.activeElement.textContent"), "t5-ablation-3")

    def test_an_address_names_a_job(self):
        self.show(canned.busy_node, address="#job=vit-22b")
        self.assertEqual(self.text("#job-title"), "vit-22b")

    def test_parts_have_names_and_headings(self):
        self.show(canned.busy_node)
        named = "button, input, select, section, [role=img], [role=group]"
        unnamed = self.browser.run(
            f"[...document.querySelectorAll('{named}')]"
            ".filter((node) => !node.ariaLabel && !node.getAttribute('aria-labelledby'))"
            ".filter((node) => !node.closest('label') && !node.textContent.trim())"
            ".map((node) => node.outerHTML)"
        )
        self.assertEqual(unnamed, [])
        self.assertEqual(
            self.browser.run(
                "[...document.querySelectorAll('th')].filter((th) => !th.scope).length"
            ),
            0,
        )

    def test_texts_have_contrast(self):
        for scheme in ("light", "dark"):
            with self.subTest(scheme=scheme):
                self.show(canned.busy_node, scheme=scheme)
                faint = self.browser.run(page_case.FAINT_TEXTS)
                self.assertEqual(faint, [])

    def test_a_phone_has_no_horizontal_overflow(self):
        for make in (canned.busy_node, canned.hostile_node, canned.crowded_node):
            with self.subTest(make=make.__name__):
                self.show(make, size=page_case.PHONE, polls=3)
                self.assert_fits()
                self.assertTrue(
                    self.browser.run("document.querySelector('.pick').checkVisibility()")
                )
                self.assert_quiet()
        self.show(canned.busy_node, size=page_case.PHONE)
        for name in ("llama-70b-pretrain", "mistral-7b-sft"):
            self.select(name)
            self.assert_fits()


def take_screenshot(path: str) -> None:
    """Makes the picture of the README: a busy node after five minutes, on a desktop."""
    test = PageTest("assert_quiet")
    PageTest.setUpClass()
    try:
        test.browser.command("Emulation.setScrollbarsHidden", hidden=True)
        # A report of each third second gives the same lines in a third of the time.
        test.show(lambda tick: canned.busy_node(3 * tick), size=(1440, 1370), polls=102)
        test.select("llama-70b-pretrain")
        test.browser.run("document.activeElement.blur()")
        pathlib.Path(path).write_bytes(test.browser.screenshot())
        test.assert_quiet()
    finally:
        PageTest.doClassCleanups()


def main() -> int:
    if sys.argv[1:2] == ["--screenshot"]:
        take_screenshot(sys.argv[2])
        return 0
    if sys.argv[1:2] == ["--require-browser"]:
        if chromium.find_chromium() is None:
            print("SKIPPED: no Chromium is installed: deploy/setup --browser")
            return _CANNOT_RUN
        del sys.argv[1]
    return case_results.run_cases()


if __name__ == "__main__":
    sys.exit(main())

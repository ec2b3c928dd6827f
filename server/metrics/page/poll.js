const POLL_MS = 1000;
const HIDDEN_POLL_MS = 10000;
// A daemon that does not answer is asked after 1, 2, 4... seconds, and at last after this time.
const FAILED_POLL_MS_MAX = 15000;
// The daemon itself waits 2 s for each engine.
const ANSWER_MS_MAX = 8000;
// So many answers with one report are no accident: the daemon has a new one each second.
const REPEATS_MAX = 10;

// The outcome of asking the daemon. Times are the browser's.
const daemon = {
  report: null,     // the last one
  answeredAt: null,
  repeats: 0,       // answers in a row with the report that was there already
  failures: 0,
  problem: "",
  polling: null,    // a promise, while a request is under way
  timer: 0,
};
const openedAt = Date.now();

// The address is relative, so that the page also works behind a proxy that puts a path before it.
async function fetchReport() {
  const signal = AbortSignal.timeout(ANSWER_MS_MAX);
  const response = await fetch("status.json", {cache: "no-store", redirect: "error", signal});
  if (!response.ok) throw new Error(`HTTP ${response.status} ${(await response.text()).slice(0, 200)}`.trim());
  const report = decode("NodeReport", await response.json());
  if (!report || report.at === null) throw new Error("the answer is no report of a node");
  return report;
}

function describeFailure(error) {
  if (error.name === "TimeoutError") return `no answer within ${ANSWER_MS_MAX / 1000} s`;
  if (error instanceof TypeError) return "no connection";
  return error.message;
}

// Asks the daemon once, and plans the next time. A second call while one is under way waits for that.
function poll() {
  clearTimeout(daemon.timer);
  daemon.polling ??= pollOnce().finally(() => {
    daemon.polling = null;
    daemon.timer = setTimeout(poll, nextPollMs());
  });
  return daemon.polling;
}

async function pollOnce() {
  let report;
  try {
    report = await fetchReport();
  } catch (error) {
    daemon.failures += 1;
    daemon.problem = describeFailure(error);
    renderConnection();
    return;
  }
  const repeats = report.at === daemon.report?.at ? daemon.repeats + 1 : 0;
  Object.assign(daemon, {report, repeats, answeredAt: Date.now(), failures: 0, problem: ""});
  recordHistory(report);
  render();
}

function nextPollMs() {
  const pause = Math.min(FAILED_POLL_MS_MAX, POLL_MS * 2 ** Math.max(0, daemon.failures - 1));
  return document.hidden ? Math.max(HIDDEN_POLL_MS, pause) : pause;
}

// Draws the last report. A page that nobody sees is drawn when it is seen again.
function render() {
  renderConnection();
  const report = daemon.report;
  if (!report || document.hidden) return;
  keepSelection(report.jobs);
  renderHeader(report);
  renderJobs(report);
  renderJob(report);
  renderNode(report);
  renderEvents(report);
}

function renderConnection() {
  const now = Date.now();
  const isStale = daemon.repeats >= REPEATS_MAX;
  const [tone, text, banner] = connectionTexts(isStale, now);
  setClass(byId("connection"), `connection ${tone}`);
  setText(byId("connection-text"), text);
  showText(byId("banner"), banner);
  setClass(byId("main"), banner ? "old" : "");
}

// Returns a tone, a short text, and a sentence where something is wrong.
function connectionTexts(isStale, now) {
  const at = daemon.report ? formatClock(daemon.report.at) : "";
  if (daemon.failures > 0) {
    const since = daemon.answeredAt ?? openedAt;
    const shown = at ? ` What is shown is of ${at}.` : "";
    const banner = `The daemon has not answered since ${formatClock(since)}: ${daemon.problem}.${shown}`;
    return ["bad", `no answer for ${formatSpan(now - since)}`, banner];
  }
  if (isStale) return ["warn", `stale, ${at}`, `The daemon answers, but its report has not changed since ${at}.`];
  return at ? ["good", `live, ${at}`, ""] : ["off", "connecting", ""];
}

function start() {
  startJobsTable();
  startJob();
  startJobTables();
  startEvents();
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    render();
    poll();
  });
  setInterval(renderConnection, 1000);
  poll();
}

start();

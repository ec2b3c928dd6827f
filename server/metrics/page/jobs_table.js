// The choices made on the page. `name` is the selected job's, as in the address after "#job=".
const selection = {name: null, filter: ""};

// Texts and tones of phases; the most urgent come first in the table.
const JOB_PHASES = {
  JOB_PHASE_FAILED: {text: "failed", tone: "bad", urgency: 0},
  JOB_PHASE_RECOVERING: {text: "recovering", tone: "warn", urgency: 2},
  JOB_PHASE_LOADING: {text: "loading", tone: "info", urgency: 3},
  JOB_PHASE_EMPTY: {text: "empty", tone: "off", urgency: 4},
  JOB_PHASE_READY: {text: "ready", tone: "good", urgency: 5},
};

function phaseOf(job) {
  if (job.ranks_unknown) return {text: "no answer", tone: "warn", urgency: 1};
  return JOB_PHASES[job.phase] ?? {text: enumName(job.phase, "JOB_PHASE_"), tone: "off", urgency: 4};
}

// The columns of a Table. One that is "wide" is left out on a phone.
const JOB_COLUMNS = [
  ["job", "", (job, report) => (node) => drawJobName(node, job, report)],
  ["phase", "", phaseCell],
  ["step", "number", (job) => known(job, String(job.committed_step))],
  ["steps/s", "number spark", (job, {at}) => (node) => drawRate(node, job, at)],
  ["ranks", "number", ranksCell],
  ["optimizer", "wide", optimizerOf],
  ["params", "number wide", (job) => known(job, formatCount(job.parameter_count))],
  ["elements", "number wide", (job) => known(job, formatCount(job.element_count))],
  ["state", "number wide", (job) => known(job, formatBytes(job.state_bytes))],
  ["uid", "number wide", (job) => String(job.uid)],
];

function known(job, text) {
  return job.state_unknown ? UNKNOWN : text;
}

function optimizerOf(job) {
  return enumName(job.optimizer, "OPTIMIZER_KIND_");
}

function phaseCell(job) {
  const {text, tone} = phaseOf(job);
  return {text, tone: `phase ${tone}`};
}

function lastRate(job) {
  return histories.get(job.name)?.last?.rate ?? null;
}

// Returns steps a second, or for how long there has been none.
function rateText(job, at) {
  const rate = lastRate(job);
  if (rate) return significant(rate);
  if (job.ranks_unknown || job.state_unknown) return UNKNOWN;
  const idleMs = at - job.committed_at;
  if (job.committed_at === null) return NONE;
  return rate === null && idleMs < 5000 ? UNKNOWN : `idle ${formatSpan(idleMs)}`;
}

function drawRate(node, job, at) {
  const samples = histories.get(job.name)?.samples ?? [];
  drawSparkline(node, samples.map((sample) => [sample.at, sample.rate]), rateText(job, at));
}

function ranksCell(job) {
  const attached = job.ranks_unknown ? UNKNOWN : job.session_count;
  const isShort = !job.ranks_unknown && job.session_count > 0 && job.session_count < job.world_size;
  return {text: `${attached}/${known(job, String(job.world_size))}`, tone: isShort ? "warn" : ""};
}

// Returns a line below the job's row: why it failed, gave no answer or waits. "": there is nothing to say.
function noteOf(job, status) {
  if (job.phase === "JOB_PHASE_FAILED" && !job.ranks_unknown) return job.reason || "no reason was given";
  if (job.ranks_unknown) return unansweredReason(job, status);
  if (job.phase === "JOB_PHASE_RECOVERING") return job.open_step || job.open_load;
  return job.open_load;
}

function unansweredReason(job, status) {
  return status?.unanswered.find(({name}) => name === job.name)?.reason || "the engine runs and gave no answer";
}

// The most urgent come first.
function sortedJobs(jobs) {
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  return [...jobs].sort((a, b) => phaseOf(a).urgency - phaseOf(b).urgency || compare(a.name, b.name));
}

function renderJobs(report) {
  const needle = selection.filter.toLowerCase();
  const shown = sortedJobs(report.jobs).filter((job) => job.name.toLowerCase().includes(needle));
  tables.jobs.show(shown, ({name}) => name, report);
  setText(byId("job-counts"), countsText(report));
  showText(byId("jobs-empty"), emptyText(report.jobs, shown));
}

function emptyText(jobs, shown) {
  if (jobs.length === 0) return "No job is on this node.";
  return shown.length === 0 ? "No job's name contains this text." : "";
}

// Returns e.g. "1 failed, 7 ready", in the order of urgency. A report has the 256 most urgent jobs.
function countsText({jobs, status}) {
  const counts = new Map();
  for (const phase of jobs.map(phaseOf).sort((a, b) => a.urgency - b.urgency)) {
    counts.set(phase.text, (counts.get(phase.text) ?? 0) + 1);
  }
  const texts = [...counts].map(([text, count]) => `${count} ${text}`);
  if (status?.job_count > jobs.length) texts.push(`${status.job_count - jobs.length} more not shown`);
  return texts.join(", ");
}

// Draws the button that selects the job, and the note below.
function drawJobName(node, job, report) {
  if (!node.firstChild) node.append(makePick(job.name), element("p", "note"));
  const [button, note] = node.children;
  const isSelected = job.name === selection.name;
  setClass(node.parentNode, isSelected ? "selected" : "");
  // One tab stop for all rows; arrow keys move between them.
  setAttributes(button, {"aria-pressed": isSelected, tabindex: isSelected ? 0 : -1});
  setClass(note, `note ${phaseOf(job).tone}`);
  showText(note, noteOf(job, report.status));
  setTitle(note, note.textContent);
}

function makePick(name) {
  const button = element("button", "pick", name);
  return Object.assign(button, {type: "button", title: name});
}

function selectJob(name) {
  selection.name = name;
  history.replaceState(null, "", `#job=${encodeURIComponent(name)}`);
  render();
}

// Selects the job of the address, else the first of the table, when the selected one is gone.
function keepSelection(jobs) {
  if (jobs.some((job) => job.name === selection.name)) return;
  const named = nameInAddress();
  const found = jobs.find((job) => job.name === named) ?? sortedJobs(jobs)[0];
  selection.name = found?.name ?? null;
}

function nameInAddress() {
  try {
    return location.hash.startsWith("#job=") ? decodeURIComponent(location.hash.slice(5)) : null;
  } catch {
    return null;  // not a valid encoding
  }
}

// Arrow keys move between the jobs' buttons.
function moveFocus(event) {
  const buttons = [...tables.jobs.body.querySelectorAll(".pick")];
  const at = buttons.indexOf(document.activeElement);
  const to = {ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1}[event.key];
  if (at < 0 || to === undefined) return;
  event.preventDefault();
  buttons[Math.min(buttons.length - 1, Math.max(0, to))].focus();
}

function startJobsTable() {
  tables.jobs = new Table(byId("jobs"), JOB_COLUMNS);
  tables.jobs.body.addEventListener("keydown", moveFocus);
  tables.jobs.body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row) selectJob(row.querySelector(".pick").textContent);
  });
  byId("job-filter").addEventListener("input", (event) => {
    selection.filter = event.target.value;
    render();
  });
}

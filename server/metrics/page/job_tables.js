// The table of ranks has at most this many rows.
const RANK_ROWS_MAX = 256;

const tables = {};  // by what they show, made with the page

// Makes the tables of the selected job.
function startJobTables() {
  tables.histograms = new Table(byId("histograms"), [
    ["phase", "", ({phase}) => (node) => drawPhaseName(node, phase)],
    ["", "bars", (row) => (node) => drawBuckets(node, row.steps, phaseTone(row.phase), row.titles)],
    ["mean", "number wide", (row) => formatMs((row.sum_s / row.count) * 1000)],
    ["p50", "number", (row) => row.bounds[bucketAt(row.steps, row.count * 0.5)]],
    ["p99", "number", (row) => row.bounds[bucketAt(row.steps, row.count * 0.99)]],
  ]);
  tables.ranks = new Table(byId("ranks"), [
    ["rank", "number", ({rank}) => String(rank)],
    ["step", "number", rankStep],
    ["staged", "number", rankStaged],
    ["wire", "", ({wire}) => wire],
    ["client", "", (session) => session.client_version],
    ["pid", "number", ({pid}) => String(pid)],
    ["gradients", "number", (session) => formatBytes(session.gradient_bytes)],
    ["attached", "number", (session, {at}) => spanText(session.attached_at, at)],
  ]);
  tables.disk = new Table(byId("disk"), [
    ["directory", "path", ({directory}) => ({text: directory, title: directory})],
    ["read", "number", ({now}) => formatByteRate(now?.read ?? null)],
    ["written", "number", ({now}) => formatByteRate(now?.written ?? null)],
    ["busy", "number", ({now}) => busyText(now?.busyNs ?? null)],
    ["queue", "number spark", ({io, queues}) => (node) => drawSparkline(node, queues, String(io?.queue_depth ?? UNKNOWN))],
    ["errors", "number", ({io}) => ({text: String(io?.errors ?? UNKNOWN), tone: io?.errors > 0 ? "bad" : ""})],
  ]);
  tables.devices = new Table(byId("devices"), [
    ["device", "", ({index, name}) => `${index} ${name}`],
    ["share", "number", ({elements}, all) => share(elements, all)],
    ["elements/s", "number", (use) => (use.elements_per_s > 0 ? formatCount(use.elements_per_s) : NONE)],
    ["copied", "number", (use) => (use.copied_bytes_per_s > 0 ? formatByteRate(use.copied_bytes_per_s) : NONE)],
    ["buffers", "number", (use) => formatBytes(use.buffer_bytes)],
    ["resident", "number", (use) => formatBytes(use.resident_bytes)],
    ["problem", "long", deviceProblem],
  ]);
}

function renderHistograms(job) {
  const rows = job.step_phases.map(histogramRow).filter(({count}) => count > 0);
  byId("histogram-panel").hidden = rows.length === 0;
  if (rows.length === 0) return;
  setAxis(rows[0].bounds_s);
  tables.histograms.show(rows, ({phase}) => phase);
}

// Adds to a histogram the words for its buckets.
function histogramRow(histogram) {
  const {bounds_s, steps} = histogram;
  const ms = bounds_s.map((bound) => plain(formatMs(bound * 1000)));
  const bounds = steps.map((_, index) => (index < ms.length ? `≤ ${ms[index]}` : `> ${ms[index - 1]}`));
  const titles = steps.map((count, index) => `${bounds[index]}: ${plural(count, "step")}`);
  return {...histogram, bounds, titles, count: steps.reduce((sum, count) => sum + count, 0)};
}

// Labels every fourth bound, in the head of the bars: 1 ms, 100 ms, 10 s.
function setAxis(bounds) {
  const shown = bounds.map((bound, index) => ({bound, index})).filter(({index}) => index % 4 === 0);
  const axis = tables.histograms.head.cells[1];
  keepChildren(axis, shown, ({index}) => index, () => element("span"), (node, {bound, index}) => {
    setText(node, plain(formatMs(bound * 1000)).replace(" ", ""));
    node.style.left = `${(100 * (index + 1)) / (bounds.length + 1)}%`;
  });
}

function phaseTone(phase) {
  return PHASES.includes(phase) ? phase : "";
}

function drawPhaseName(node, phase) {
  if (!node.firstChild) node.append(element("span", `swatch ${phaseTone(phase)}`), phase);
}

// Returns the bucket in which the count-th step lies.
function bucketAt(steps, count) {
  let sum = 0;
  return Math.max(0, steps.findIndex((one) => (sum += one) >= count));
}

function renderRanks(job, at) {
  const furthest = Math.max(0, ...job.sessions.map((session) => session.committed_step));
  const sessions = [...job.sessions].sort((a, b) => a.rank - b.rank).slice(0, RANK_ROWS_MAX);
  setText(byId("ranks-note"), ranksText(job, sessions.length));
  tables.ranks.show(sessions, ({rank}) => rank, {furthest, job, at});
  byId("ranks").hidden = sessions.length === 0;
}

function rankStep(session, {furthest}) {
  return {text: String(session.committed_step), tone: session.committed_step < furthest ? "warn" : ""};
}

function rankStaged(session, {job}) {
  return `${formatCount(session.staged_parameters)}/${formatCount(job.parameter_count)}`;
}

function ranksText(job, shown) {
  if (job.ranks_unknown) return "not known";
  const attached = new Set(job.sessions.map(({rank}) => rank));
  const ranks = Array.from({length: Math.min(job.world_size, 65536)}, (_, rank) => rank);
  const missing = ranks.filter((rank) => !attached.has(rank));
  const texts = [`${job.session_count} of ${job.world_size} attached`];
  if (missing.length) texts.push(`not: ${shortList(missing)}`);
  if (shown < job.sessions.length) texts.push(`the first ${shown} are shown`);
  return texts.join("; ");
}

function shortList(items) {
  return items.slice(0, 12).join(", ") + (items.length > 12 ? "…" : "");
}

function renderDisk(job, past, at) {
  const disk = job.disk;
  byId("disk-panel").hidden = !disk;
  if (!disk) return;
  const samples = past?.samples ?? [];
  const values = (rates) => [rates?.read ?? null, rates?.written ?? null];
  plots.disk.draw(samples.map((sample) => ({at: sample.at, values: values(sample.disk)})));
  setText(byId("disk-note"), `records by ${disk.io_engine}`);
  const rows = disk.directories.map((directory, index) => directoryRow(directory, index, disk, samples));
  tables.disk.show(rows, ({index}) => index);
  keepFacts(byId("disk-facts"), diskFacts(disk, at));
}

function directoryRow(directory, index, disk, samples) {
  const ofSample = (sample) => sample?.disk?.directories[index];
  return {
    directory,
    index,
    now: ofSample(samples[samples.length - 1]),
    io: disk.directory_io[index],
    queues: samples.map((sample) => [sample.at, ofSample(sample)?.queue ?? null]),
  };
}

function busyText(busyNs) {
  return busyNs === null ? UNKNOWN : formatPercent(Math.min(1, busyNs / 1e9));
}

function diskFacts(disk, at) {
  return [
    ["in memory", disk.frames > 0 ? `${formatCount(disk.frames)} of ${formatCount(disk.records)} records` : "all"],
    ["step waited", disk.step_ns > 0 ? formatPercent(disk.step_waited_ns / disk.step_ns) : NONE],
    ["since verified", spanText(disk.last_verified_at, at)],
    ["damaged", disk.damaged_records > 0 ? plural(disk.damaged_records, "record") : "", "bad"],
  ];
}

function renderDevices(job) {
  const updates = job.device_updates;
  byId("devices-panel").hidden = !updates;
  if (!updates) return;
  const all = updates.cpu_elements + updates.device_elements;
  setText(byId("devices-note"), devicesText(updates, all));
  const parts = [{bytes: updates.cpu_elements, tone: "cpu", name: `CPU: ${share(updates.cpu_elements, all)}`}];
  for (const {elements, index, name} of updates.uses) {
    parts.push({bytes: elements, tone: "device", name: `${index} ${name}: ${share(elements, all)}`});
  }
  drawBar(byId("devices-bar"), parts, all, `Updated elements: ${parts.map(({name}) => name).join(", ")}`);
  tables.devices.show(updates.uses, ({index}) => index, all);
}

function share(part, all) {
  return all > 0 ? formatPercent(part / all) : NONE;
}

function devicesText(updates, all) {
  const done = `the CPU updates ${share(updates.cpu_elements, all)} of elements`;
  const asked = `asked for: ${formatPercent(updates.offload_fraction)}`;
  const log = updates.log_bytes > 0 ? `${formatBytes(updates.log_bytes)} of gradients are kept` : "";
  return [done, asked, log, updates.problem].filter((text) => text).join("; ");
}

function deviceProblem(use) {
  if (use.is_lost) return {text: `lost: ${use.problem}`, tone: "bad"};
  return {text: use.problem || NONE, tone: use.problem ? "warn" : ""};
}

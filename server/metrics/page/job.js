const plots = {};  // by what they show, made with the page

function startJob() {
  plots.rate = new TimePlot(byId("rate-plot"), [{name: "steps/s", tone: "rate"}], significant);
  const phases = PHASES.map((name) => ({name, tone: name}));
  plots.phases = new TimePlot(byId("phases-plot"), phases, formatMs);
  const disk = [{name: "read", tone: "read"}, {name: "written", tone: "written"}];
  plots.disk = new TimePlot(byId("disk-plot"), disk, formatByteRate, 1024);
}

// Shows the selected job.
function renderJob(report) {
  const job = report.jobs.find(({name}) => name === selection.name);
  byId("job").hidden = !job;
  if (!job) return;
  const past = histories.get(job.name);
  const {text, tone} = phaseOf(job);
  setText(byId("job-title"), job.name);
  setText(byId("job-phase"), text);
  setClass(byId("job-phase"), `phase ${tone}`);
  setText(byId("job-open"), job.ranks_unknown ? "" : job.open_load || job.open_step);
  const isStopped = job.phase === "JOB_PHASE_FAILED" || job.ranks_unknown;
  showText(byId("job-reason"), isStopped ? noteOf(job, report.status) : "");
  keepFacts(byId("job-facts"), jobFacts(job, report.at));
  renderStepPlots(job, past, report.at);
  renderHistograms(job);
  renderRanks(job, report.at);
  renderDisk(job, past, report.at);
  renderDevices(job);
}

function jobFacts(job, at) {
  const outcome = job.last_outcome;
  return [
    ["committed step", job.state_unknown ? UNKNOWN : String(job.committed_step)],
    ["durable step", durableText(job)],
    ["since commit", spanText(job.committed_at, at)],
    ["gradient norm", outcome?.step ? significant(outcome.gradient_norm) : ""],
    ["skipped", skippedText(job), outcome?.found_inf ? "warn" : ""],
    ["optimizer", optimizerOf(job)],
    ["parameters", job.state_unknown ? UNKNOWN : formatCount(job.parameter_count)],
    ["elements", job.state_unknown ? UNKNOWN : formatCount(job.element_count)],
    ["state", formatBytes(job.state_bytes)],
    ["locked", job.memory_lock ? formatLock(job.memory_lock) : "", lockTone(job.memory_lock), job.memory_lock?.reason],
    ["placement", placementText(job.storage)],
    ["durability", durabilityText(job.storage)],
    ["owner", `uid ${job.uid}${job.ephemeral ? ", ephemeral" : ""}`],
    ["made", job.created_at === null ? NONE : formatClock(job.created_at, at)],
    ["engine", engineText(job), job.engine_restarts > 0 ? "warn" : ""],
    ["recovered", job.recovered_steps > 0 ? plural(job.recovered_steps, "step") : ""],
  ];
}

// Says how far the job would go back when the machine lost its power.
function durableText({disk, storage, committed_step}) {
  if (!disk) return "";
  if (durabilityText(storage) === "none") return "none";
  const behind = committed_step - disk.durable_step;
  return `${disk.durable_step}${behind > 0 ? ` (${behind} behind)` : ""}`;
}

function durabilityText(storage) {
  const name = enumName(storage?.durability ?? "", "DURABILITY_KIND_");
  switch (name) {
    case "step":
      return "each step";
    case "every":
      return `every ${plural(storage.every_steps, "step")}`;
    case "interval":
      return `every ${formatMs(storage.interval_ms)}`;
  }
  return name === NONE ? "none" : name;
}

function placementText(storage) {
  const name = enumName(storage?.placement ?? "", "PLACEMENT_");
  return name === NONE ? "host" : name;
}

function skippedText(job) {
  const infinite = job.last_outcome?.found_inf ? "; the last: inf or NaN" : "";
  return job.skipped_steps > 0 || infinite ? `${job.skipped_steps}${infinite}` : "";
}

function engineText(job) {
  if (job.engine_pid === 0) return "none";
  return `pid ${job.engine_pid}${job.engine_restarts > 0 ? `, ${plural(job.engine_restarts, "restart")}` : ""}`;
}

function renderStepPlots(job, past, at) {
  const samples = past?.samples ?? [];
  byId("rate-panel").hidden = samples.every(({rate}) => rate === null);
  byId("phases-panel").hidden = samples.every(({phases}) => phases === null);
  plots.rate.draw(samples.map((sample) => ({at: sample.at, values: [sample.rate]})));
  plots.phases.draw(samples.map((sample) => ({at: sample.at, values: sample.phases ?? PHASES.map(() => null)})));
  const rate = lastRate(job);
  setText(byId("rate-note"), rate ? `a step every ${formatMs(1000 / rate)}` : rateText(job, at));
  setText(byId("phases-note"), shareText(past, rate));
}

// Says how much of an iteration the daemon takes; the rest is the ranks' own.
function shareText(past, rate) {
  const phases = past?.last?.phases;
  if (!phases) return "";
  const sumMs = phases.reduce((sum, ms) => sum + ms, 0);
  const share = rate ? `, ${formatPercent(Math.min(1, (sumMs * rate) / 1000))} of an iteration` : "";
  return `${formatMs(sumMs)}${share}`;
}

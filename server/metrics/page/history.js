// The page keeps this much of each job's past, from the moment it was opened.
const HISTORY_MS = 5 * 60 * 1000;
// Steps are counted over this time, or since the commit before when that is longer ago.
const RATE_WINDOW_MS = 10 * 1000;
// In the order in which they are stacked.
const PHASES = ["staging", "waiting", "decide", "update", "publish"];

const histories = new Map();  // by job name

// Adds a report to the past of its jobs, and forgets jobs that are gone.
function recordHistory(report) {
  const names = new Set(report.jobs.map((job) => job.name));
  for (const name of histories.keys()) {
    if (!names.has(name)) histories.delete(name);
  }
  for (const job of report.jobs) {
    let past = histories.get(job.name);
    if (!past || !past.continues(job, report.at)) {
      past = new JobHistory(job);
      histories.set(job.name, past);
    }
    past.add(job, report.at);
  }
}

// The past of one job: samples with `at` (of the daemon's clock, in ms), `step`, `committedAt`, `rate` (steps a
// second), `phases` (ms of a step, in the order of PHASES) and `disk`. What is not known is null.
class JobHistory {
  constructor(job) {
    this.job = job;  // as the last report has it
    this.samples = [];
  }

  get last() {
    return this.samples[this.samples.length - 1] ?? null;
  }

  // A job that was made anew, or went back to its durable step, begins a new past, and so does a clock that was
  // set back.
  continues(job, at) {
    const last = this.last;
    if (job.created_at !== this.job.created_at) return false;
    return !last || (at >= last.at && (last.step === null || job.state_unknown || job.committed_step >= last.step));
  }

  add(job, at) {
    if (this.last?.at === at) return;  // the same report again
    const isKnown = !job.ranks_unknown && !job.state_unknown;
    const sample = {at, step: job.state_unknown ? null : job.committed_step, committedAt: job.committed_at};
    // Another engine counts from 0.
    const before = this.job.engine_pid === job.engine_pid ? this.job.disk : null;
    sample.rate = isKnown ? rateOf(this.samples, sample) : null;
    sample.phases = isKnown ? phaseTimes(job, sample.rate) : null;
    sample.disk = isKnown && job.disk ? diskRates(job.disk, before, at - (this.last?.at ?? at)) : null;
    this.job = job;
    this.samples.push(sample);
    while (this.samples[0].at < at - HISTORY_MS) this.samples.shift();
  }
}

// Returns steps a second up to `now`; null: no two steps have been seen yet.
// The times of commits count, not those of the polls: this way a job with a step a minute has a rate too. A job
// that has not committed for three steps' time and two seconds stands still.
function rateOf(samples, now) {
  const base = rateBase(samples, now);
  if (!base || base.committedAt === null || now.committedAt === null) return null;
  const ms = now.committedAt - base.committedAt;
  if (ms <= 0) return null;
  const stepMs = ms / (now.step - base.step);
  const idleMs = now.at - now.committedAt;
  if (idleMs > 3 * stepMs + 2000) return 0;
  return 1000 / Math.max(stepMs, idleMs);
}

// Returns the oldest sample of the window with a lower step, else the last one before it.
function rateBase(samples, now) {
  let base = null;
  for (let i = samples.length - 1; i >= 0; --i) {
    const sample = samples[i];
    if (base && sample.at < now.at - RATE_WINDOW_MS) break;
    if (sample.step !== null && sample.step < now.step) base = sample;
  }
  return base;
}

// Returns the times of the phases in ms: means of up to 16 steps for a job that takes many between two polls, else
// those of the last step.
function phaseTimes(job, rate) {
  const times = rate > 4 ? job.mean_step_times : job.last_step_times;
  if (!times) return null;
  const {staging_ns, waiting_ns, decide_ns, update_ns, publish_ns} = times;
  return [staging_ns, waiting_ns, decide_ns, update_ns, publish_ns].map((ns) => ns / 1e6);
}

// Returns what happens in a second, by directory and in all together. Without an earlier report of the same engine
// the rates are null.
function diskRates(now, before, ms) {
  const directories = now.directory_io.map((io, index) => {
    const earlier = ms > 0 ? before?.directory_io[index] : null;
    const perS = (name) => (earlier ? (Math.max(0, io[name] - earlier[name]) / ms) * 1000 : null);
    return {read: perS("bytes_read"), written: perS("bytes_written"), busyNs: perS("busy_ns"), queue: io.queue_depth};
  });
  // Directories are known all together or not at all.
  const sum = (name) => directories.reduce((all, one) => (one[name] === null ? null : all + one[name]), 0);
  return {directories, read: sum("read"), written: sum("written")};
}

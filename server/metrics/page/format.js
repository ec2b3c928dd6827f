// Signs for a value that is absent, and for one that is not known.
const NONE = "–";
const UNKNOWN = "?";

// Returns three significant digits, without an exponent.
function significant(value) {
  if (!Number.isFinite(value)) return UNKNOWN;
  const digits = value === 0 ? 0 : Math.floor(Math.log10(Math.abs(value)));
  return value.toFixed(Math.min(6, Math.max(0, 2 - digits)));
}

// Returns a text without zeros that say nothing: "10 ms" for "10.0 ms".
function plain(text) {
  return text.replace(/(\.\d*?)0+(?!\d)/, "$1").replace(/\.(?!\d)/, "");
}

function scaled(value, step, units) {
  let unit = 0;
  while (value >= step && unit + 1 < units.length) {
    value /= step;
    ++unit;
  }
  return [value, units[unit]];
}

function formatCount(count) {
  if (count < 10000) return String(Math.round(count));
  const [value, unit] = scaled(count, 1000, ["", "K", "M", "G", "T"]);
  return `${value.toFixed(1)}${unit}`;
}

function formatBytes(bytes) {
  const [value, unit] = scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
  return `${unit === "B" ? Math.round(value) : value.toFixed(1)} ${unit}`;
}

function formatByteRate(bytesPerS) {
  return bytesPerS === null ? UNKNOWN : `${formatBytes(bytesPerS)}/s`;
}

function formatPercent(share) {
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)}%`;
}

// Returns a short time, e.g. of a step.
function formatMs(ms) {
  if (ms < 1000) return `${ms < 0.01 ? "0" : significant(ms)} ms`;
  return ms < 120000 ? `${significant(ms / 1000)} s` : formatSpan(ms);
}

// Returns a long time in its two largest units.
function formatSpan(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

// Returns how long ago something was.
function spanText(then, now) {
  return then === null ? NONE : formatSpan(now - then);
}

function two(number) {
  return String(number).padStart(2, "0");
}

// Returns the time of day, after the date where that is not the date of `now`.
function formatClock(ms, now = ms) {
  const time = new Date(ms);
  const clock = `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
  if (time.toDateString() === new Date(now).toDateString()) return clock;
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${clock}`;
}

// Returns JOB_PHASE_READY as "ready"; the unspecified value as "–".
function enumName(value, prefix) {
  const name = value.startsWith(prefix) ? value.slice(prefix.length) : value;
  return name === "" || name === "UNSPECIFIED" ? NONE : name.toLowerCase();
}

function plural(count, word) {
  return `${formatCount(count)} ${word}${count === 1 ? "" : "s"}`;
}

// Returns how much of a state is locked in memory.
function formatLock(lock) {
  const parts = [`${formatBytes(lock.locked_bytes)} locked`];
  if (lock.pending_bytes > 0) parts.push(`${formatBytes(lock.pending_bytes)} being locked`);
  if (lock.unlocked_bytes > 0) parts.push(`${formatBytes(lock.unlocked_bytes)} not`);
  return parts.join(", ");
}

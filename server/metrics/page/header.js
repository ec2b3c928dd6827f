function renderHeader(report) {
  const status = report.status;
  if (!status) return;
  setText(byId("host"), status.host || NONE);
  const failed = report.jobs.filter((job) => phaseOf(job).tone === "bad").length;
  document.title = `${failed ? `(${failed} failed) ` : ""}${status.host || "optstate"} · optstate`;
  keepFacts(byId("node-facts"), [
    ["version", status.version || NONE],
    ["up", spanText(status.started_at, report.at)],
    ["ranks", status.unanswered.length ? `${status.session_count}+` : String(status.session_count)],
    ["memory", status.memory_lock ? formatLock(status.memory_lock) : NONE, lockTone(status.memory_lock)],
    ["workers", `${status.workers} × ${status.instruction_set || NONE}`],
  ]);
  renderState(status);
  renderNotices(status);
}

function lockTone(lock) {
  return lock?.unlocked_bytes > 0 ? "warn" : "";
}

function renderState(status) {
  const used = status.state_bytes;
  const left = status.state_bytes_available;
  const text = `state ${formatBytes(used)} used, ${left === null ? UNKNOWN : formatBytes(left)} left`;
  setText(byId("state-text"), text);
  drawBar(byId("state-bar"), [{bytes: used, tone: "job", name: text}], used + (left ?? 0), text);
}

// Lists what an operator has to know before all else.
function renderNotices(status) {
  const notices = [];
  if (status.draining) {
    notices.push(["warn", "DRAINING: new steps and sessions are refused until optctl drain --resume."]);
  }
  if (status.state_bytes_problem) {
    notices.push(["warn", `How much state there is room for is not known: ${status.state_bytes_problem}`]);
  }
  const lock = status.memory_lock;
  if (lock?.unlocked_bytes > 0) {
    notices.push(["warn", `${formatBytes(lock.unlocked_bytes)} of the state may go to swap: ${lock.reason}`]);
  }
  const upgrade = status.upgrade;
  if (upgrade && !upgrade.done) {
    notices.push(["info", `Upgrade under way: ${plural(upgrade.engines_replaced, "engine")} replaced.`]);
  }
  for (const problem of upgrade?.problems ?? []) notices.push(["warn", `Last upgrade: ${problem}`]);
  keepChildren(byId("notices"), notices, ([, text]) => text, () => element("li"), (item, [tone, text]) => {
    setClass(item, tone);
    setText(item, text);
  });
}

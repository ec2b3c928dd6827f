// The list shows at most this many, the newest.
const EVENTS_MAX = 200;
const SEVERITIES = {
  EVENT_SEVERITY_WARNING: {text: "warning", tone: "warn"},
  EVENT_SEVERITY_ERROR: {text: "error", tone: "bad"},
};

// Two choices stand before the names of jobs. No job's name has a blank.
const SELECTED = "the selected job";
const EVENT_FILTERS = [["", "everything"], [SELECTED, SELECTED]];
const eventFilter = {job: "", isSevere: false};

function renderEvents(report) {
  offerJobs(report);
  const matching = report.events.filter(isShown);
  const shown = matching.sort((a, b) => b.sequence - a.sequence).slice(0, EVENTS_MAX);
  keepChildren(byId("events"), shown, ({sequence}) => sequence, makeEvent, () => {});
  const none = report.events.length ? "No event matches." : "Nothing has happened since the daemon remembers.";
  showText(byId("events-empty"), shown.length ? "" : none);
  byId("events").hidden = shown.length === 0;
}

function isShown(event) {
  if (eventFilter.isSevere && !SEVERITIES[event.severity]) return false;
  const job = eventFilter.job === SELECTED ? selection.name : eventFilter.job;
  return job === "" || event.job === job;
}

function offerJobs(report) {
  const names = new Set([...report.jobs.map(({name}) => name), ...report.events.map(({job}) => job)]);
  names.delete("");
  const offers = [...EVENT_FILTERS, ...[...names].sort().map((name) => [name, name])];
  keepChildren(byId("event-job"), offers, ([value]) => value, () => element("option"), (option, [value, text]) => {
    setAttribute(option, "value", value);
    setText(option, text);
  });
  // A job of which nothing is left is no choice any more.
  if (byId("event-job").value !== eventFilter.job) {
    eventFilter.job = "";
    byId("event-job").value = "";
  }
}

function makeEvent(event) {
  const {text, tone} = SEVERITIES[event.severity] ?? {text: "", tone: ""};
  const head = element("div", "event-head");
  const time = element("time", "dim", event.at === null ? UNKNOWN : formatClock(event.at, daemon.report.at));
  if (event.at !== null) setTitle(time, new Date(event.at).toISOString());
  head.append(time);
  if (text) head.append(element("b", `phase ${tone}`, text));
  head.append(element("span", "kind", event.kind));
  if (event.job) head.append(element("span", "of", event.job));
  if (event.actor) head.append(element("span", "dim", `by ${event.actor}`));
  return append(element("li", tone), head, element("p", "", event.text));
}

function startEvents() {
  byId("event-job").addEventListener("change", (event) => {
    eventFilter.job = event.target.value;
    render();
  });
  byId("event-severe").addEventListener("change", (event) => {
    eventFilter.isSevere = event.target.checked;
    render();
  });
}

// Shows memory, directories and devices, each as a bar of what jobs have there.
function renderNode({tiers, devices}) {
  const rows = [];
  if (tiers?.memory) rows.push(...memoryRows(tiers.memory));
  rows.push(...(tiers?.directories ?? []).map(diskRow), ...(devices?.devices ?? []).map(deviceRow));
  keepChildren(byId("tiers"), rows, ({key}) => key, makeTier, updateTier);
  const unknown = devices?.unanswered.map(({name}) => `The devices of ${name} are not known.`) ?? [];
  showText(byId("devices-none"), [devices?.note, ...unknown].filter((text) => text).join(" "));
}

// The state directory, and the budget for frames of jobs on disk where there is one.
function memoryRows(memory) {
  const free = memory.free_bytes === null ? `${UNKNOWN} free` : `${formatBytes(memory.free_bytes)} free`;
  const rate = memory.bytes_per_s > 0 ? `${formatByteRate(memory.bytes_per_s)} of bandwidth` : "";
  const rows = [tierRow("memory", memory, [free, rate], memory.free_bytes ?? 0)];
  if (memory.budget_bytes > 0 || memory.frames_bytes > 0) {
    const jobs = memory.jobs.map(({job, frames_bytes}) => ({job, bytes: frames_bytes}));
    const budget = memory.budget_bytes || memory.frames_bytes;
    rows.push({
      key: "frames",
      name: "frames in memory",
      text: `${formatBytes(memory.frames_bytes)} of ${memory.budget_bytes > 0 ? formatBytes(budget) : "no budget"}`,
      notes: ["records of jobs on disk"],
      parts: jobParts(jobs, memory.frames_bytes),
      total: budget,
      problem: "",
    });
  }
  return rows;
}

function diskRow(tier) {
  const {read_bytes_per_s, write_bytes_per_s} = tier;
  const measured = `measured ${formatByteRate(read_bytes_per_s)} read, ${formatByteRate(write_bytes_per_s)} written`;
  const limit = tier.limit_bytes > 0 ? `limit ${formatBytes(tier.limit_bytes)}` : "";
  const rates = read_bytes_per_s > 0 ? measured : "not measured";
  const notes = [`${formatBytes(tier.free_bytes)} free`, limit, rates, `weight ${tier.weight}`];
  return tierRow(tier.directory, tier, notes, tier.free_bytes);
}

// Bytes that are neither free nor our jobs' are other users' of the file system, or beyond a limit.
function tierRow(name, tier, notes, freeBytes) {
  const others = Math.max(0, tier.capacity_bytes - tier.used_bytes - freeBytes);
  return {
    key: `tier ${name}`,
    name,
    text: `${formatBytes(tier.used_bytes)} of ${formatBytes(tier.capacity_bytes)}`,
    notes,
    parts: [
      ...jobParts(tier.jobs, tier.used_bytes),
      {bytes: others, tone: "others", name: `not for jobs: ${formatBytes(others)}`},
    ],
    total: tier.capacity_bytes,
    problem: tier.problem,
  };
}

function makeTier() {
  const title = append(element("div", "tier-title"), element("b", "path"), element("span"));
  return append(element("div", "tier"), title, element("div", "bar"), element("small"), element("p", "note warn"));
}

function updateTier(node, {name, text, notes, parts, total, problem}) {
  const [heading, bar, small, warning] = node.children;
  setText(heading.firstChild, name);
  setTitle(heading.firstChild, name);
  setText(heading.lastChild, text);
  drawBar(bar, parts, total, `${name}: ${text}`);
  setText(small, notes.filter((note) => note).join(" · "));
  showText(warning, problem);
}

function deviceRow({index, name, memory_bytes, jobs}) {
  const uses = jobs.filter(({use}) => use);
  const parts = uses.map(({job, use}) => ({job, bytes: use.buffer_bytes + use.resident_bytes}));
  const used = parts.reduce((sum, {bytes}) => sum + bytes, 0);
  return {
    key: `device ${index}`,
    name: `${index} ${name}`,
    text: `${formatBytes(used)} of ${formatBytes(memory_bytes)}`,
    notes: jobs.map(({job, offload_fraction}) => `${job}: devices update ${formatPercent(1 - offload_fraction)}`),
    parts: jobParts(parts, used),
    total: memory_bytes,
    problem: uses.filter(({use}) => use.is_lost).map(({job, use}) => `lost to ${job}: ${use.problem}`).join("; "),
  };
}

// Draws parts of a total as one bar. A part is {bytes, tone, name}; the rest of the bar stays empty.
function drawBar(bar, parts, total, label) {
  const shown = parts.filter(({bytes}) => bytes > 0);
  setAttribute(bar, "role", "img");
  setAttribute(bar, "aria-label", label);
  const keyed = shown.map((part, index) => ({...part, index}));
  keepChildren(bar, keyed, ({index}) => index, () => element("div"), (node, {bytes, tone, name}) => {
    setClass(node, `part ${tone}`);
    setTitle(node, name);
    const width = `${total > 0 ? Math.min(100, (100 * bytes) / total) : 0}%`;
    if (node.style.width !== width) node.style.width = width;
  });
}

// Returns the parts of the largest jobs, largest first, and one of the others together. The selected job's is marked.
function jobParts(jobs, usedBytes) {
  const named = [...jobs].sort((a, b) => b.bytes - a.bytes).slice(0, 6);
  const parts = named.map(({job, bytes}) => ({
    bytes,
    tone: job === selection.name ? "job selected" : "job",
    name: `${job}: ${formatBytes(bytes)}`,
  }));
  const othersBytes = usedBytes - named.reduce((sum, {bytes}) => sum + bytes, 0);
  if (othersBytes > 0) parts.push({bytes: othersBytes, tone: "job", name: `other jobs: ${formatBytes(othersBytes)}`});
  return parts;
}

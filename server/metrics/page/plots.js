const SPARK_WIDTH = 72;
const SPARK_HEIGHT = 16;
const PLOT_HEIGHT = 132;
// Room for the labels of the axes.
const PLOT_LEFT = 58;
const PLOT_BOTTOM = 16;
const PLOT_TOP = 6;

// Returns the path of a line through [x, y] points; null breaks it.
function linePath(points) {
  let path = "";
  let isOpen = false;
  for (const point of points) {
    if (point) path += `${isOpen ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    isOpen = point !== null;
  }
  return path;
}

// Returns the path of the area between two lines with the same x; a null in either breaks it.
function areaPath(upper, lower) {
  let path = "";
  for (let begin = 0; begin < upper.length; ++begin) {
    let end = begin;
    while (end < upper.length && upper[end] && lower[end]) ++end;
    if (end > begin) {
      path += linePath(upper.slice(begin, end)) + linePath(lower.slice(begin, end).reverse()).replace("M", "L") + "Z";
    }
    begin = end;
  }
  return path;
}

// Draws the values of `samples` ([at, value]) over the page's history into a cell, before a text.
function drawSparkline(cell, samples, text) {
  if (!cell.firstChild) {
    const svg = svgElement("svg", "spark");
    setAttributes(svg, {viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, "aria-hidden": "true"});
    svg.append(svgElement("path"));
    cell.append(svg, element("span"));
  }
  setText(cell.lastChild, text);
  // A row of many need not have each sample: one in six seconds will do.
  const bucket = ([at]) => Math.floor(at / 6000);
  samples = samples.filter((sample, i) => !samples[i + 1] || bucket(sample) !== bucket(samples[i + 1]));
  const end = samples.length ? samples[samples.length - 1][0] : 0;
  const most = 1.2 * Math.max(...samples.map(([, value]) => value ?? 0), 1e-9);
  const points = samples.map(([at, value]) => value === null ? null : [
    SPARK_WIDTH * (1 - (end - at) / HISTORY_MS),
    (SPARK_HEIGHT - 1) * (1 - value / most),
  ]);
  setAttribute(cell.firstChild.firstChild, "d", linePath(points));
}

// Returns a limit of an axis that is not below the value: 1, 2, 2.5 or 5 times a power of ten, in units of a power of
// `base`.
function niceLimit(value, base) {
  if (!(value > 0)) return 1;
  const unit = base ** Math.max(0, Math.floor(Math.log(value) / Math.log(base)));
  const power = unit * 10 ** Math.floor(Math.log10(value / unit));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((limit) => limit >= value * 0.999);
}

// A plot of the last five minutes: areas that lie one on the other. The legend says the values of the last sample, or
// of the one under the pointer.
class TimePlot {
  // A series is {name, tone}; `format` makes the text of a value, in units of powers of `base`.
  constructor(parent, series, format, base = 1000) {
    Object.assign(this, {parent, series, format, base, samples: [], pointerX: null});
    this.svg = svgElement("svg");
    setAttribute(this.svg, "role", "img");
    this.grid = [0, 0.5, 1].map((share) => this.#makeGridLine(share));
    this.times = [300, 240, 180, 120, 60, 0].map((s) => this.#makeTimeLabel(s));
    this.areas = series.map(({tone}) => this.#add("path", `area ${tone}`));
    this.cursor = this.#add("line", "cursor");
    this.legend = element("ul", "legend");
    this.values = series.map(({name, tone}) => this.#makeLegend(name, tone));
    this.when = append(this.legend, element("li", "when")).lastChild;
    parent.append(this.svg, this.legend);
    this.svg.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.#point(null));
    new ResizeObserver(() => this.redraw()).observe(parent);
  }

  // Shows samples of {at, values}, where `values` has one number or null for each series.
  draw(samples) {
    this.samples = samples;
    this.redraw();
  }

  redraw() {
    this.width = this.parent.clientWidth;
    if (this.width <= PLOT_LEFT) return;
    this.end = this.samples.length ? this.samples[this.samples.length - 1].at : 0;
    this.limit = niceLimit(Math.max(...this.samples.map(({values}) => this.#top(values)), 0), this.base);
    setAttribute(this.svg, "viewBox", `0 0 ${this.width} ${PLOT_HEIGHT}`);
    this.#drawAxes();
    this.#drawSeries();
    this.#drawLegend();
  }

  #add(tag, classes) {
    return this.svg.appendChild(svgElement(tag, classes));
  }

  #makeGridLine(share) {
    const line = this.#add("line", "rule");
    const label = this.#add("text", "end");
    return {share, line, label};
  }

  #makeTimeLabel(s) {
    const label = this.#add("text", {0: "end", 300: ""}[s] ?? "middle");
    label.textContent = s === 0 ? "now" : `−${s / 60} min`;
    return {s, label};
  }

  #makeLegend(name, tone) {
    const value = element("b");
    this.legend.append(append(element("li"), element("span", `swatch ${tone}`), name, " ", value));
    return value;
  }

  #top(values) {
    return values.reduce((sum, value) => sum + (value ?? 0), 0);
  }

  #x(at) {
    return PLOT_LEFT + (this.width - PLOT_LEFT - 1) * (1 - (this.end - at) / HISTORY_MS);
  }

  #y(value) {
    return PLOT_TOP + (PLOT_HEIGHT - PLOT_TOP - PLOT_BOTTOM) * (1 - Math.min(1, value / this.limit));
  }

  #drawAxes() {
    for (const {share, line, label} of this.grid) {
      const y = this.#y(share * this.limit);
      setAttributes(line, {x1: PLOT_LEFT, x2: this.width, y1: y, y2: y});
      setAttributes(label, {x: PLOT_LEFT - 6, y: y + 4});
      setText(label, share === 0 ? "0" : plain(this.format(share * this.limit)));
    }
    for (const {s, label} of this.times) {
      // A narrow plot has every other label.
      const visibility = this.width < 420 && [240, 120].includes(s) ? "hidden" : "visible";
      setAttributes(label, {x: this.#x(this.end - s * 1000), y: PLOT_HEIGHT - 3, visibility});
    }
  }

  #drawSeries() {
    let lower = this.samples.map(() => 0);
    this.series.forEach((_, index) => {
      const upper = this.samples.map(({values}, i) => {
        if (values[index] === null || lower[i] === null) return null;
        return values[index] + lower[i];
      });
      setAttribute(this.areas[index], "d", areaPath(this.#points(upper), this.#points(lower)));
      lower = upper;
    });
  }

  #points(values) {
    return values.map((value, i) => (value === null ? null : [this.#x(this.samples[i].at), this.#y(value)]));
  }

  #point(x) {
    this.pointerX = x;
    if (this.width > PLOT_LEFT) this.#drawLegend();
  }

  #drawLegend() {
    const shown = this.pointerX === null ? this.samples[this.samples.length - 1] : this.#nearest(this.pointerX);
    const isPast = this.pointerX !== null && shown !== undefined;
    const texts = this.series.map((_, index) => {
      const value = shown?.values[index] ?? null;
      return value === null ? UNKNOWN : this.format(value);
    });
    texts.forEach((text, index) => setText(this.values[index], text));
    setText(this.when, isPast ? formatClock(shown.at) : "");
    setAttribute(this.cursor, "visibility", isPast ? "visible" : "hidden");
    if (isPast) {
      const x = this.#x(shown.at);
      setAttributes(this.cursor, {x1: x, x2: x, y1: PLOT_TOP, y2: PLOT_HEIGHT - PLOT_BOTTOM});
    } else {
      const now = this.series.map(({name}, index) => `${name} ${texts[index]}`).join(", ");
      setAttribute(this.svg, "aria-label", `Last five minutes. Now: ${now}`);
    }
  }

  #nearest(x) {
    const distance = (sample) => Math.abs(this.#x(sample.at) - x);
    return this.samples.reduce((best, one) => (distance(one) < distance(best) ? one : best), this.samples[0]);
  }
}

// Draws the counts of buckets as bars; one that is not 0 is at least a pixel high.
function drawBuckets(cell, counts, tone, titles) {
  const bars = cell.querySelector("svg")?.children ?? makeBuckets(cell, counts.length);
  const most = Math.max(...counts, 1);
  counts.forEach((count, index) => {
    const bar = bars[index];
    const height = count === 0 ? 0 : Math.max(1.5, (20 * count) / most);
    setAttributes(bar, {class: `bucket ${tone}`, y: 22 - height, height});
    setText(bar.firstChild, titles[index]);
  });
}

function makeBuckets(cell, count) {
  const svg = cell.appendChild(svgElement("svg", "buckets"));
  setAttributes(svg, {viewBox: `0 0 ${count * 10} 22`, preserveAspectRatio: "none", "aria-hidden": "true"});
  for (let i = 0; i < count; ++i) {
    const bar = svg.appendChild(svgElement("rect"));
    setAttributes(bar, {x: i * 10 + 1, width: 8});
    bar.append(svgElement("title"));
  }
  return svg.children;
}

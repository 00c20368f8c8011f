// How the curves are drawn and read: with the pointer, the arrow keys, and a table.

const PLOT = { width: 300, height: 150 }; // pixels, before a panel knows its width, and on paper
const STEP_SIZES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]; // between the ticks of an axis

/** A colour of report.css: canvases do not follow the style sheet by themselves. */
function color(name) {
  byId("probe").style.color = `var(${name})`;
  return getComputedStyle(byId("probe")).color;
}

/** Pixels that an axis needs for its numbers, which are large where a run has gone wrong. */
const axisWidth = (_, texts) => Math.max(46, 12 + 7 * Math.max(0, ...(texts ?? []).map((text) => text.length)));

/** Two points are no trend: they are drawn without a line between them, unless more of them will come. */
const isSparse = ({ values, isLive }) => !isLive && values.filter(isNumber).length < 3;
const hasDots = (curve) => isEvaluation(curve.key) || isSparse(curve);

/** One panel: a figure with its curves, a legend with values, and a table of all of them. */
class Panel {
  constructor({ title, about, curves, floor, ceiling }, { onPoint, onChoose }) {
    Object.assign(this, { title, curves, floor, ceiling, onPoint, onChoose });
    this.at = element("span", { class: "at" });
    this.plotPlace = element("div", {
      class: "plot",
      tabindex: 0,
      role: "slider",
      "aria-label": `${title}: step`,
      on: { keydown: (event) => this.onKey(event), focus: () => onPoint(this.index ?? this.last) },
    });
    this.outputs = curves.map(() => element("output"));
    const entries = curves.map((curve, i) => {
      const css = { "--swatch": `var(${this.colorOf(i)})` };
      const kind = `${hasDots(curve) ? " dotted" : ""}${isSparse(curve) ? " alone" : ""}`;
      const swatch = element("span", { class: `swatch${kind}`, css });
      return element("li", {}, swatch, element("span", {}, curve.label), this.outputs[i]);
    });
    const heading = element("h3", {}, title, element("span", { class: "unit" }, ` ${about}`));
    const parts = [heading, this.at, this.plotPlace, element("ul", { class: "legend" }, entries), this.values()];
    this.root = element("div", { class: "panel", "data-panel": title }, parts);
    this.plot = new uPlot(this.options(), [allSteps, ...curves.map(({ values }) => values)], this.plotPlace);
    this.point(null);
    new ResizeObserver(() => this.resize()).observe(this.plotPlace);
  }

  /** The place in `allSteps` that is shown while the reader points at none. */
  get last() {
    return allSteps.length - 1;
  }

  colorOf(place) {
    const isTotal = ["reward/total", "time/step"].includes(this.curves[place].key);
    return isTotal ? "--ink" : `--c${place % 8}`;
  }

  /** The table of all values is made when it is opened. */
  values() {
    const draw = ({ target }) => {
      const cells = (step, i) => [String(step), ...this.curves.map(({ values }) => short(values[i]))];
      const rows = allSteps.map(cells).filter(([, ...numbers]) => numbers.some((text) => text !== "–"));
      const head = ["step", ...this.curves.map(({ label }) => label)];
      if (target.open) target.lastChild.replaceWith(table(`Values of ${this.title}`, head, rows));
    };
    const summary = element("summary", {}, "Values", element("span", { class: "unseen" }, ` of ${this.title}`));
    return element("details", { class: "values", on: { toggle: draw } }, summary, element("div"));
  }

  options() {
    const axis = { stroke: () => color("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: () => color("--grid"), width: 1 };
    return {
      ...PLOT,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { size: 6, width: 0, fill: (_, i) => color(this.colorOf(i - 1)) },
      },
      scales: {
        x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        { ...axis, size: 26, gap: 4, space: 44, incrs: STEP_SIZES, grid: { show: false } },
        { ...axis, size: axisWidth, gap: 6, space: 26, grid, values: (_, splits) => splits.map(short) },
      ],
      series: [{}, ...this.curves.map((curve, i) => this.line(curve, i))],
      hooks: {
        setCursor: [(plot) => !this.quiet && this.onPoint(plot.cursor.idx ?? null)],
        draw: [(plot) => this.markChosen(plot)],
        ready: [(plot) => plot.over.addEventListener("click", () => this.choose())],
      },
    };
  }

  line(curve, place) {
    return {
      label: curve.label,
      stroke: () => color(this.colorOf(place)),
      width: curve.key === "reward/total" ? 2.5 : 1.5,
      spanGaps: true,
      ...(isSparse(curve) && { paths: () => null }),
      points: { show: hasDots(curve), size: 6, fill: () => color("--surface") },
    };
  }

  /** Of the vertical axis, for data from `low` to `high`. */
  range(low, high) {
    if (low === null) return [0, 1];
    const { floor, ceiling } = this;
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    const top = ceiling !== null && high <= ceiling && high > ceiling / 2 ? ceiling * 1.03 : high + room;
    return [floor !== null && low >= floor ? floor : low - room, top];
  }

  /** A line at the step whose samples are shown. */
  markChosen({ bbox, scales, ctx, valToPos }) {
    if (!isNumber(Panel.chosen) || Panel.chosen < scales.x.min || Panel.chosen > scales.x.max) return;
    const x = Math.round(valToPos(Panel.chosen, "x", true));
    ctx.save();
    ctx.strokeStyle = color("--muted");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }

  resize() {
    const width = Math.floor(this.plotPlace.clientWidth);
    if (width > 40 && width !== this.plot.width) this.plot.setSize({ ...PLOT, width });
  }

  /** Move the cursor to a place in `allSteps`; null: away, the legend then shows the last values. */
  point(index) {
    this.index = index;
    this.quiet = true; // the hook is for the reader's own moves
    const left = index === null ? -10 : this.plot.valToPos(allSteps[index], "x");
    this.plot.setCursor({ left, top: index === null ? -10 : 1 }, false);
    this.quiet = false;
    const { last } = this;
    const step = allSteps[index ?? last];
    this.at.textContent = `${index === null ? "last: " : ""}step ${step}`;
    const texts = this.curves.map(({ values }) => {
      const place = index ?? values.findLastIndex((value, i) => i <= last && isNumber(value));
      return short(values[place]) + (index === null && allSteps[place] !== step ? ` (step ${allSteps[place]})` : "");
    });
    this.outputs.forEach((output, i) => (output.textContent = texts[i]));
    const said = [`step ${step}`, ...this.curves.map(({ label }, i) => `${label} ${texts[i]}`)].join(", ");
    const slider = { valuemin: allSteps[0], valuemax: allSteps.at(-1), valuenow: step, valuetext: said };
    for (const [name, value] of Object.entries(slider)) this.plotPlace.setAttribute(`aria-${name}`, visible(value));
  }

  onKey(event) {
    const last = allSteps.length - 1;
    const now = this.index ?? this.last;
    const [before, after] = [now - 1, now + 1];
    const moves = { ArrowLeft: before, ArrowDown: before, ArrowRight: after, ArrowUp: after, Home: 0, End: last };
    Object.assign(moves, { PageUp: now + 10, PageDown: now - 10 });
    if (event.key === "Enter" || event.key === " ") this.choose();
    else if (event.key in moves) this.onPoint(Math.min(Math.max(moves[event.key], 0), last));
    else return;
    event.preventDefault();
  }

  choose() {
    if (this.index !== null) this.onChoose(allSteps[this.index]);
  }
}

/** All panels; pointing into one moves the cursor of all. Returns a function that marks a step in them. */
function drawCurves(onChoose) {
  const panels = [];
  const onPoint = (index) => panels.forEach((panel) => panel.point(index));
  const redraw = () => panels.forEach(({ plot }) => plot.redraw(false, true));
  for (const panel of listPanels()) {
    panels.push(new Panel(panel, { onPoint, onChoose }));
    byId(panel.isMore ? "more-panels" : "panels").append(panels.at(-1).root);
  }
  byId("more-count").textContent = byId("more-panels").children.length;
  byId("more").hidden = !byId("more-panels").children.length;
  const setPaper = (isPaper) => {
    document.documentElement.classList.toggle("paper", isPaper); // paper has its own width, and no dark side
    panels.forEach((panel) => (isPaper ? panel.plot.setSize(PLOT) : panel.resize()));
    redraw();
  };
  addEventListener("beforeprint", () => setPaper(true));
  addEventListener("afterprint", () => setPaper(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return (step) => {
    Panel.chosen = step;
    redraw();
  };
}

// How the curves are drawn and read: with the pointer, the arrow keys, a table, and as sentences.

const printing = () => window.matchMedia("print").matches;

/** A colour of report.css: canvases do not follow the style sheet by themselves. */
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Pixels that an axis needs for its numbers, which are large where a run has gone wrong. */
const axisWidth = (_, texts) => Math.max(46, 12 + 7 * Math.max(0, ...(texts ?? []).map((text) => text.length)));

/** One panel: a figure with its curves, a legend with values, and a table of all of them. */
class Panel {
  constructor(panel, onPoint, onChoose) {
    this.onPoint = onPoint;
    this.onChoose = onChoose;
    this.at = element("span", { class: "at" });
    this.plotPlace = element("div", {
      class: "plot",
      tabindex: 0,
      role: "slider",
      "aria-label": `${panel.title}: step`,
      "aria-describedby": `curve-${slug(panel.title)}`,
      on: { keydown: (event) => this.onKey(event), focus: () => onPoint(this.index ?? this.panel.steps.length - 1) },
    });
    this.legend = element("ul", { class: "legend" });
    this.words = element("p", { class: "unseen", id: `curve-${slug(panel.title)}` });
    this.values = element("div");
    this.details = element(
      "details",
      { class: "values", on: { toggle: () => this.drawTable() } },
      element("summary", {}, "Values", element("span", { class: "unseen" }, ` of ${panel.title}`)),
      this.values,
    );
    const heading = element("h3", {}, panel.title, element("span", { class: "unit" }, ` ${panel.unit}`));
    const parts = [heading, this.at, this.plotPlace, this.legend, this.details, this.words];
    this.root = element("div", { class: "panel", "data-panel": panel.title }, parts);
    this.update(panel);
    new ResizeObserver(() => this.resize()).observe(this.plotPlace);
  }

  /** Show the curves of `panel`; the plot is made anew only if other curves came. */
  update(panel) {
    const same = this.panel && JSON.stringify(this.names()) === JSON.stringify(this.names(panel));
    this.panel = panel;
    const values = [panel.steps, ...panel.curves.map((curve) => curve.values)];
    if (same) this.plot.setData(values);
    else {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(), values, this.plotPlace);
    }
    this.words.textContent = visible(
      panel.curves.map((curve) => this.named(describeCurve(curve, panel.steps), curve)).join(" "),
    );
    if (!same) this.drawLegend();
    this.drawTable();
    this.point(this.index ?? null);
  }

  names = (panel = this.panel) => panel.curves.map(({ key, run }) => [key, run]);

  /** The text with the run's name before it, if several runs are laid over each other. */
  named = (text, { run }) => (data.runs.length > 1 ? `${data.runs[run].name}, ${text}` : text);

  colorOf = (curve) =>
    curve.key === "reward/total" || curve.key === "time/step"
      ? "--ink"
      : `--c${this.panel.names.indexOf(curve.key) % 8}`;

  options() {
    const { floor, ceiling } = this.panel;
    const axis = { stroke: () => color("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: () => color("--grid"), width: 1 };
    return {
      width: 300,
      height: 150,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { size: 6, width: 0, fill: (_, i) => color(this.colorOf(this.panel.curves[i - 1])) },
      },
      scales: {
        x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: {
          range: (_, low, high) => {
            if (low === null) return [0, 1];
            const room = (high - low || Math.abs(high) || 1) * 0.08;
            const top = ceiling !== undefined && high <= ceiling && high > ceiling / 2 ? ceiling * 1.03 : high + room;
            return [floor !== undefined && low >= floor ? floor : low - room, top];
          },
        },
      },
      axes: [
        {
          ...axis,
          size: 26,
          gap: 4,
          space: 44,
          incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000],
          grid: { show: false },
        },
        { ...axis, size: axisWidth, gap: 6, space: 26, grid, values: (_, splits) => splits.map(short) },
      ],
      series: [
        {},
        ...this.panel.curves.map((curve) => ({
          label: curve.label,
          stroke: () => color(this.colorOf(curve)),
          width: curve.key === "reward/total" ? 2.5 : 1.5,
          dash: curve.run ? [5, 4] : undefined,
          spanGaps: true,
          points: {
            show: isEvaluation(curve.key) || curve.values.filter(isNumber).length < 3,
            size: 6,
            fill: () => color("--surface"),
          },
        })),
      ],
      hooks: {
        setCursor: [(plot) => !this.quiet && this.onPoint(plot.cursor.idx ?? null)],
        draw: [(plot) => this.markChosen(plot)],
        ready: [(plot) => plot.over.addEventListener("click", () => this.choose())],
      },
    };
  }

  /** A line at the step whose samples are shown. */
  markChosen(plot) {
    const { top, height } = plot.bbox;
    if (!isNumber(Panel.chosen) || Panel.chosen < plot.scales.x.min || Panel.chosen > plot.scales.x.max) return;
    const x = Math.round(plot.valToPos(Panel.chosen, "x", true));
    plot.ctx.save();
    plot.ctx.strokeStyle = color("--muted");
    plot.ctx.lineWidth = devicePixelRatio;
    plot.ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    plot.ctx.beginPath();
    plot.ctx.moveTo(x, top);
    plot.ctx.lineTo(x, top + height);
    plot.ctx.stroke();
    plot.ctx.restore();
  }

  resize() {
    const width = Math.floor(this.plotPlace.clientWidth);
    if (width > 40 && width !== this.plot.width && !printing()) this.plot.setSize({ width, height: 150 });
  }

  /** An entry for each key, with a value for each run. */
  drawLegend() {
    this.outputs = this.panel.curves.map(({ run }) => element("output", { "data-run": run }));
    const swatch = (curve) => {
      const look = [curve.run && "dashed", isEvaluation(curve.key) && "dotted"].filter(Boolean);
      return element("span", {
        class: ["swatch", ...look].join(" "),
        css: { "--swatch": `var(${this.colorOf(curve)})` },
      });
    };
    const entry = (key) => {
      const own = this.panel.curves.filter((curve) => curve.key === key);
      const [first, ...others] = own.map((curve) => [swatch(curve), this.outputs[this.panel.curves.indexOf(curve)]]);
      return element("li", { "data-key": key }, first[0], element("span", {}, own[0].label), first[1], others);
    };
    fill(this.legend, [...new Set(this.panel.curves.map(({ key }) => key))].map(entry));
  }

  /** The table is made when it is opened. */
  drawTable() {
    if (!this.details.open) return;
    const { title, steps, curves } = this.panel;
    const rows = steps.map((step, i) => [String(step), ...curves.map(({ values }) => short(values[i]))]);
    const shown = rows.filter((row) => row.slice(1).some((cell) => cell !== "–"));
    fill(
      this.values,
      table(`Values of ${title}`, ["step", ...curves.map((curve) => this.named(curve.label, curve))], shown),
    );
  }

  /** Move the cursor to a place in `steps`; null: away, the legend then shows the last values. */
  point(index) {
    const { steps, curves } = this.panel;
    this.index = index !== null && index < steps.length ? index : null;
    const shown = this.index ?? null;
    this.quiet = true; // the hook is for the reader's own moves
    const left = shown === null ? -10 : this.plot.valToPos(steps[shown], "x");
    this.plot.setCursor({ left, top: shown === null ? -10 : 1 }, false);
    this.quiet = false;
    this.at.textContent = shown === null ? "last values" : `step ${steps[shown]}`;
    const texts = curves.map(({ values }) => short(shown === null ? values.findLast(isNumber) : values[shown]));
    this.outputs.forEach((output, i) => (output.textContent = texts[i]));
    const slider = { valuemin: steps[0], valuemax: steps.at(-1), valuenow: steps[shown ?? steps.length - 1] };
    slider.valuetext = [
      `step ${slider.valuenow}`,
      ...curves.map((curve, i) => `${this.named(curve.label, curve)} ${texts[i]}`),
    ].join(", ");
    for (const [name, value] of Object.entries(slider)) this.plotPlace.setAttribute(`aria-${name}`, visible(value));
  }

  onKey(event) {
    const last = this.panel.steps.length - 1;
    const now = this.index ?? last;
    const moves = {
      ArrowLeft: now - 1,
      ArrowDown: now - 1,
      ArrowRight: now + 1,
      ArrowUp: now + 1,
      PageUp: now + 10,
      PageDown: now - 10,
      Home: 0,
      End: last,
    };
    if (event.key === "Enter" || event.key === " ") this.choose();
    else if (event.key in moves) this.onPoint(Math.min(Math.max(moves[event.key], 0), last));
    else return;
    event.preventDefault();
  }

  choose() {
    if (this.index !== null) this.onChoose(this.panel.steps[this.index]);
  }
}

const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-");

/** Put `children` into `parent`, and touch nothing if they are there already. */
function place(parent, children) {
  if (children.length !== parent.children.length || children.some((child, i) => child !== parent.children[i]))
    fill(parent, children);
}

/** All panels; pointing into one moves the cursor of all. */
class Curves {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.panels = new Map();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    addEventListener("beforeprint", () => this.forPaper(true));
    addEventListener("afterprint", () => this.forPaper(false));
  }

  update(runs) {
    const panels = panelsOf(runs);
    for (const panel of panels) {
      if (this.panels.has(panel.title)) this.panels.get(panel.title).update(panel);
      else this.panels.set(panel.title, new Panel(panel, (index) => this.point(index), this.onChoose));
    }
    const roots = (more) =>
      panels.filter((panel) => Boolean(panel.more) === more).map((panel) => this.panels.get(panel.title).root);
    place(
      byId("panels"),
      panels.length
        ? roots(false)
        : [element("p", { class: "note" }, "There are no curves: the run has logged no step yet.")],
    );
    place(byId("more-panels"), roots(true));
    byId("more").hidden = !roots(true).length;
    byId("more-count").textContent = roots(true).length;
  }

  point = (index) => this.panels.forEach((panel) => panel.point(index));
  redraw = () => this.panels.forEach(({ plot }) => plot.redraw(false, true));

  /** The line at the chosen step. */
  mark(step) {
    Panel.chosen = step;
    this.redraw();
  }

  /** Paper has its own width, and no dark side. */
  forPaper(paper) {
    document.documentElement.classList.toggle("paper", paper);
    this.panels.forEach((panel) => (paper ? panel.plot.setSize({ width: 300, height: 130 }) : panel.resize()));
    this.redraw();
  }
}

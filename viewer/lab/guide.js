// The guided experiments of texts.toml: a question, a prediction, some runs, and what was measured over several seeds.

/** The list of experiments; the open one is below its title. `onRun(settings, task)` starts a run, `finish` ends it. */
class Guide {
  constructor(onRun) {
    Object.assign(this, { onRun, open: null, predicted: new Map(), trained: new Set(), revealed: new Set() });
    this.buttons = data.texts.guide.map((entry) => {
      const looks = { type: "button", "aria-expanded": "false", on: { click: () => this.show(entry) } };
      return element("button", looks, entry.title);
    });
    fill(byId("guide-list"), this.buttons.map((button) => element("li", {}, button)));
  }

  show(entry) {
    this.open = this.open === entry ? null : entry;
    const place = data.texts.guide.indexOf(this.open);
    this.buttons.forEach((button, i) => button.setAttribute("aria-expanded", String(i === place)));
    this.buttons[place]?.parentNode.append(byId("guide-open")); // below its title
    this.draw();
  }

  draw() {
    const entry = this.open;
    byId("guide-open").hidden = !entry;
    if (!entry) return;
    const chosen = this.predicted.get(entry);
    const prediction = (text, i) => {
      const change = () => {
        this.predicted.set(entry, i);
        this.draw();
        byId(`prediction-${i}`).focus();
      };
      const looks = { type: "radio", name: "prediction", id: `prediction-${i}`, checked: i === chosen, on: { change } };
      return element("label", {}, element("input", looks), ` ${text}`);
    };
    const runs = entry.runs.map((one) => {
      const click = () => this.onRun(one.settings, { entry, one });
      const label = `${this.trained.has(one) ? "✓ " : ""}${one.label}`;
      return element("button", { type: "button", disabled: chosen === undefined, on: { click } }, label);
    });
    const predictions = [element("legend", {}, "Your prediction"), entry.predictions.map(prediction)];
    const isRevealed = this.revealed.has(entry);
    const looks = { type: "button", class: "plain", on: { click: () => this.reveal(entry) } };
    const reveal = chosen !== undefined && !isRevealed && element("button", looks, "What happened?");
    fill(
      byId("guide-open"),
      element("p", {}, entry.question),
      element("fieldset", { class: "predictions" }, predictions),
      element("p", { class: "bar" }, runs, reveal),
      chosen === undefined && element("p", { class: "note" }, "Choose a prediction; then you can run it."),
      isRevealed && this.outcome(entry, chosen),
    );
  }

  outcome({ right, predictions, happened, page, link }, chosen) {
    const verdict = chosen === right ? "As you predicted. " : `You predicted: “${predictions[chosen]}” `;
    const source = element("a", { href: pageOf(page) }, link);
    return element("p", { class: "happened", role: "status" }, element("b", {}, verdict), happened, " ", source, ".");
  }

  /** A run is complete; after the last run of its experiment the reader sees what was measured. */
  finish({ entry, one }) {
    this.trained.add(one);
    if (entry.runs.every((each) => this.trained.has(each))) this.revealed.add(entry);
    this.draw();
  }

  reveal(entry) {
    this.revealed.add(entry);
    this.draw();
  }
}

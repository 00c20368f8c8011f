// Six guided experiments: a question, a prediction, one or two runs, and what we measured over several seeds.

const GUIDE = [
  {
    title: "Watch it learn to think",
    question: "The policy thinks in one of four answers, and is right in 95 of 100 answers with a thought, but only in 22 of 100 without. Rewards are 1 for a right answer and 0 otherwise. What will change most?",
    predictions: ["It gets better at sums.", "It thinks more often.", "Its answers get shorter."],
    right: 1,
    runs: [["Train 40 steps", { steps: 40 }]],
    happened: "It thinks more often. Over five seeds and 80 steps, the share of answers with a thought rose from 0.25 to 0.98 or more. Of the gain in accuracy, 0.53 to 0.55 came from this choice, and 0.02 at most from better sums. A thought also makes answers longer: 11 tokens became 29.",
    page: ["experiment_base/README.md#where-the-gain-comes-from", "Where the gain comes from, by seed"],
  },
  {
    title: "Take the baseline away",
    question: "GRPO compares an answer with the other answers to the same question. REINFORCE without a baseline does not compare: a right answer is pushed up by 1, a wrong one by 0. Now add ten points to every reward, right or wrong. Who notices?",
    predictions: ["Nobody: right is still better than wrong.", "REINFORCE does, GRPO does not.", "Both do."],
    right: 1,
    runs: [
      ["REINFORCE, rewards 0 and 1", { steps: 30, algorithm: "reinforce" }],
      ["REINFORCE, rewards 10 and 11", { steps: 30, algorithm: "reinforce", reward: "own", reward_source: "return correct(text, answer) + 10;" }],
      ["GRPO, rewards 10 and 11", { steps: 30, reward: "own", reward_source: "return correct(text, answer) + 10;" }],
    ],
    happened: "With rewards of 0 and 1 the baseline makes no difference: over three seeds both ways ended at 0.94 to 0.95. With ten points more, every answer is pushed up by about the same amount, and the gradient is nearly all noise: REINFORCE without a baseline ended at 0.76 (one seed, 80 steps of 128 questions with one answer each). A group's mean contains the ten points, so GRPO does not notice them at all: look for equal curves.",
    page: ["policy_gradients/reinforce/README.md#what-to-expect", "The noise of the gradient, measured"],
  },
  {
    title: "Too fast",
    question: "The default learning rate is 5e-5. What does four times as much do, and what does forty times as much?",
    predictions: ["Both learn faster.", "Four times learns faster, forty times destroys the policy.", "Both destroy the policy."],
    right: 1,
    runs: [["Four times: 2e-4", { steps: 20, lr: 2e-4 }], ["Forty times: 2e-3", { steps: 20, lr: 2e-3 }]],
    happened: "",
    page: ["docs/hyperparameters.md#learning-rate", "Five learning rates, three seeds each"],
  },
  {
    title: "Old samples",
    question: "In a large system the sampler works while the trainer updates, so answers come from weights of some steps ago. Let them be eight steps old. What happens to the curve?",
    predictions: ["Nothing.", "It learns more slowly.", "It collapses."],
    right: 1,
    runs: [["As it is", { steps: 30 }], ["Eight steps behind", { steps: 30, lag: 8 }]],
    happened: "",
    page: ["scale/engine/README.md#one-step-ahead", "One step behind, measured with an inference engine"],
  },
  {
    title: "Pay it for length",
    question: "Thoughts make answers right, and thoughts are long. So why not pay for length? What happens to the right answers?",
    predictions: ["More right answers: it thinks more.", "Fewer: it finds a cheaper way to be long.", "As many as before."],
    right: 1,
    runs: [["Longer is better", { steps: 40, reward: "long" }]],
    happened: "",
    page: ["docs/reward_models.md#the-proxy-rises-the-truth-turns", "A reward that is gamed, measured"],
  },
  {
    title: "One wrong line",
    question: "Somebody cuts the mask with [:, :-1] instead of [:, 1:]. The first token of each answer is then not trained. One token of thirty: does it matter?",
    predictions: ["Hardly: 29 of 30 tokens are trained.", "It learns more slowly.", "Nothing is learned."],
    right: 2,
    runs: [["As it is", { steps: 30 }], ["Mask off by one", { steps: 30, mistake: "mask" }]],
    happened: "Nothing is learned. The first token decides whether to think, and exactly this token is not trained. Over three seeds and 60 steps, such runs ended at 0.34 (0.30 to 0.38), and correct ones at 0.92. Nothing crashes, and the loss looks as it should.",
    page: ["docs/traps.md#off_by_one", "Twelve mistakes and their curves"],
  },
];

/** The list of experiments, and below it the one that is open. `onRun(settings, task)` starts a run; `finish(task)` ends it. */
class Guide {
  constructor(onRun) {
    Object.assign(this, { onRun, open: null, predicted: new Map(), trained: new Set(), revealed: new Set() });
    const item = ({ title }, i) =>
      element("li", {}, element("button", { type: "button", "aria-expanded": "false", on: { click: () => this.show(i) } }, title));
    fill(byId("guide-list"), GUIDE.map(item));
  }

  show(place) {
    const isClosed = this.open === place;
    this.open = isClosed ? null : place;
    [...byId("guide-list").querySelectorAll("button")].forEach((button, i) =>
      button.setAttribute("aria-expanded", String(i === this.open)),
    );
    this.draw();
  }

  draw() {
    const entry = GUIDE[this.open];
    byId("guide-open").hidden = !entry;
    if (!entry) return;
    const chosen = this.predicted.get(this.open);
    const choose = (i) => () => (this.predicted.set(this.open, i), this.draw(), byId(`prediction-${i}`).focus());
    const prediction = (text, i) =>
      element("label", {},
        element("input", { type: "radio", name: "prediction", id: `prediction-${i}`, checked: i === chosen, on: { change: choose(i) } }),
        ` ${text}`);
    const runs = entry.runs.map(([label, settings]) => {
      const start = () => this.onRun(settings, { entry, settings });
      const mark = this.trained.has(settings) ? "✓ " : "";
      return element("button", { type: "button", disabled: chosen === undefined, on: { click: start } }, mark + label);
    });
    const isDone = this.revealed.has(entry);
    const reveal = element("button", { type: "button", class: "plain", on: { click: () => this.reveal(entry) } }, "Show me without running");
    const verdict = chosen === entry.right ? "As you predicted. " : `You predicted: “${entry.predictions[chosen]}” `;
    const link = element("a", { href: pageOf(entry.page[0]) }, entry.page[1]);
    fill(
      byId("guide-open"),
      element("p", {}, entry.question),
      element("fieldset", { class: "predictions" }, element("legend", {}, "Your prediction"), entry.predictions.map(prediction)),
      element("p", { class: "bar" }, runs, !isDone && chosen !== undefined && reveal),
      chosen === undefined && element("p", { class: "note" }, "Choose a prediction first; then the runs can start."),
      isDone && element("p", { class: "happened" }, element("b", {}, verdict), entry.happened, " ", link, "."),
    );
  }

  /** A run is complete; after the last run of its experiment the reader sees what we measured. */
  finish({ entry, settings }) {
    this.trained.add(settings);
    if (entry.runs.every(([, own]) => this.trained.has(own))) this.reveal(entry);
    else this.draw();
  }

  reveal(entry) {
    this.revealed.add(entry);
    this.draw();
  }
}

/** The address of a page of the repository: in the book pages are HTML. */
function pageOf(path) {
  if (!data.isBook) return data.base + path;
  return data.base + path.replace(/README\.md/, "index.html").replace(/\.md/, ".html");
}

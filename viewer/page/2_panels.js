// The data of the panels; which there are, and what they are called, is in harness/logs/headings.py.

const isEvaluation = (key) => key.startsWith("eval/");

const { series } = data.metrics; // by key, a value or null for each line of metrics.jsonl
const allSteps = [...new Set(data.metrics.steps)].sort((a, b) => a - b);

/** The values of a key by step; a step that has several lines (training, evaluation) shows the last of them. */
function valuesOf(key, scale = 1) {
  const known = new Map();
  (series[key] ?? []).forEach((value, i) => {
    if (value !== null) known.set(data.metrics.steps[i], value * scale);
  });
  return known;
}

/** The panels: [{...panel, curves: [{key, label, values}]}], a value or null by step. */
function listPanels() {
  return data.panels.map(({ labels, scale, ...panel }) => {
    const curves = Object.entries(labels).map(([key, label]) => {
      const values = valuesOf(key, scale);
      return { key, label, values: allSteps.map((step) => values.get(step) ?? null) };
    });
    return { ...panel, curves };
  });
}

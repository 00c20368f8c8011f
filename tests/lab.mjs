// node --expose-gc lab.mjs EXPRESSION: its value as JSON, where input.json and scripts.mjs are in this directory.
import fs from "node:fs";
import { pathToFileURL } from "node:url";

let [posted, waiting] = [[], () => {}];
globalThis.postMessage = (message) => {
  posted.push(message);
  waiting();
};
const lab = await import(pathToFileURL("scripts.mjs"));
const { loaded, given } = JSON.parse(fs.readFileSync("input.json"));
const bytes = (text) => new Uint8Array(Buffer.from(text, "base64"));
const load = { ...loaded, wasm: bytes(loaded.wasm), weights: bytes(loaded.weights).buffer };

/** A training that goes on with the given rows where its own are others, so that later steps can be compared. */
class Compared extends lab.Training {
  sample_completions(step) {
    const rows = super.sample_completions(step);
    this.own_ids = rows.map(({ ids }) => ids);
    const is_other = (row, b) => this.given[step - 1][b].ids.join() !== row.ids.join();
    return rows.map((row, b) => (is_other(row, b) ? { ...row, ...this.given[step - 1][b] } : row));
  }
}

/** The steps of each case {settings, questions, given}; the weights and the last gradient of step i: `CASE-i.f32`. */
function train(cases) {
  const memory = new lab.Memory(new WebAssembly.Module(load.wasm));
  const policy = new lab.Policy(memory, load.config, lab.read_tensors(load.weights));
  policy.prepare_training();
  const [reference, tokenizer] = [policy.copy(), new lab.Tokenizer(load.data.tokenizer)];
  const reward_all = (rows) => rows.map(({ text, answer }) => lab.REWARDS.correct(text, answer));
  return cases.map(({ settings, questions, given }, number) => {
    const training = new Compared(lab.settings_of(settings), policy, reference, tokenizer, questions, reward_all);
    training.restore(training.beginning());
    return (training.given = given).map((_, i) => {
      const { metrics, groups } = training.train_step();
      for (const [array, flag] of [[policy.weights, "w"], [policy.grad, "a"]])
        fs.writeFileSync(`${number}-${i}.f32`, array, { flag });
      const rows = groups.flatMap((group) => group.rows.map(({ advantage, updates }) => ({ advantage, updates })));
      return { metrics, rows, own_ids: training.own_ids };
    });
  });
}

/** Send a message to the worker, and wait for an answer of one of the types. */
async function send(type, message, ...types) {
  posted = [];
  globalThis.onmessage({ data: { type, ...message } });
  const answer = () => posted.find((one) => types.includes(one.type));
  while (!answer()) await new Promise((resolve) => (waiting = resolve));
  return answer();
}

/** The numbers of some steps with these settings, and whether the checksum after ten of them is the promised one. */
async function run(settings, until) {
  await send("load", load, "ready");
  await send("start", { settings }, "paused");
  await send("run", { until }, "paused");
  const steps = posted.filter(({ type }) => type === "step").map(({ metrics, seconds }) => ({ ...metrics, ...seconds }));
  return { steps, checksum: posted.find(({ type }) => type === "checksum")?.value };
}

/** What came of what a reader may do: run, rewind, change, ask, write a reward, and diverge. */
async function talk(settings) {
  const newest = () => JSON.stringify(posted.findLast(({ type }) => type === "step").groups);
  const out = { errors: [] };
  await run(settings, 6);
  out.first = newest();
  await send("rewind", { step: 5 }, "paused");
  await send("step", {}, "paused");
  out.again = newest();
  const rows = posted.findLast(({ type }) => type === "step").groups[1].rows;
  const after = (await send("after", { group: 1 }, "after")).log_probs;
  out.moved = rows.map(({ updates: [{ push, log_probs }] }, b) => push.map((x, t) => x * (after[b][t] - log_probs[t])));
  await send("rewind", { step: 4 }, "paused");
  await send("change", { settings: { lr: 1e-3 } }, "changed");
  await send("run", { until: 6 }, "paused");
  out.changed = newest();
  const { before, now } = await send("ask", { question: "What is 20 plus 38?" }, "answer");
  out.answers = [before.text, now.text];
  out.errors.push((await send("start", { settings: { ...settings, algorithm: "x" } }, "error")).message);
  for (const source of ["return 'x'", "throw new Error('nothing is defined here')", "return ("])
    out.errors.push((await send("check", { source }, "checked")).message);
  await send("start", { settings: { ...settings, lr: 1e38 } }, "paused");
  out.errors.push((await send("run", { until: 9 }, "error")).message);
  const used = () => (gc(), process.memoryUsage().heapUsed);
  await send("start", { settings: { ...settings, max_new_tokens: 2, prompts_per_step: 1 } }, "paused");
  await send("run", { until: 10 }, "paused");
  const before_steps = used();
  await send("run", { until: 30 }, "paused");
  posted = [];
  return { ...out, growth: used() - before_steps };
}

const plain = (_, value) => (ArrayBuffer.isView(value) ? [...value] : value);
fs.writeFileSync("found.json", JSON.stringify(await eval(process.argv[2]), plain));

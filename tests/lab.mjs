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

/** What the worker posts after each of the messages [type, message]; after "used": the bytes in use. */
async function talk(messages) {
  const answers = [];
  for (const [type, message] of [["load", load], ...messages]) {
    posted = [];
    if (type === "used") posted = [(gc(), process.memoryUsage().heapUsed)];
    else globalThis.onmessage({ data: { type, ...message } });
    const is_end = ({ type }) => type !== "step" && type !== "checksum";
    while (!posted.some(is_end)) await new Promise((resolve) => (waiting = resolve));
    answers.push(posted);
  }
  return answers.slice(1);
}

const plain = (_, value) => (ArrayBuffer.isView(value) ? [...value] : value);
fs.writeFileSync("found.json", JSON.stringify(await eval(process.argv[2]), plain));

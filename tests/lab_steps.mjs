// node lab_steps.mjs SCRIPTS INPUT FOLDER: trains as the page of the laboratory does, and writes what each step was.
import fs from "node:fs";
import { pathToFileURL } from "node:url";

const [scripts, input, folder] = process.argv.slice(2);
globalThis.postMessage = () => {};
const lab = await import(pathToFileURL(scripts));
const { loaded, cases } = JSON.parse(fs.readFileSync(input));
const bytes = (text) => new Uint8Array(Buffer.from(text, "base64"));
const memory = new lab.Memory(new WebAssembly.Module(bytes(loaded.wasm)));
const policy = new lab.Policy(memory, loaded.config, bytes(loaded.weights).buffer);
policy.prepare_training();
const reference = policy.copy();
const tokenizer = new lab.Tokenizer(loaded.data.tokenizer);

/** A training that goes on with the given rows where its own are others, so that later steps can be compared. */
class Compared extends lab.Training {
  sample_completions(step) {
    const rows = super.sample_completions(step);
    this.own_ids = rows.map(({ ids }) => ids);
    rows.forEach((row, b) => {
      const given = this.given[step - 1][b];
      if (given.ids.join() !== row.ids.join()) Object.assign(row, given);
    });
    return rows;
  }
}

const found = cases.map(({ settings, questions, given }, number) => {
  const reward_all = (rows) => rows.map(({ text, answer }) => lab.REWARDS[settings.reward ?? "correct"](text, answer));
  const training = new Compared(lab.settings_of(settings), policy, reference, tokenizer, questions, reward_all);
  const zeros = new Float32Array(policy.size);
  training.restore({ ...training.state(), weights: reference.weights, m: zeros, v: zeros, updates: 0 });
  training.given = given;
  return given.map((_, i) => {
    const { metrics, groups } = training.train_step();
    fs.writeFileSync(`${folder}/${number}-${i}.f32`, policy.weights);
    fs.writeFileSync(`${folder}/gradient.f32`, policy.grad); // of the last update
    const rows = groups.flatMap((group) => group.rows.map(({ advantage, updates }) => ({ advantage, updates })));
    return { metrics, rows, own_ids: training.own_ids };
  });
});
const plain = (_, value) => (ArrayBuffer.isView(value) ? [...value] : value);
fs.writeFileSync(`${folder}/found.json`, JSON.stringify(found, plain));
